"""What a configuration's sections are made of, and what to say about a bad one."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from hpczero.deepspeed_keys import ACCEPTED, UNSUPPORTED
from hpczero.errors import ConfigError


def _integral(value: object) -> object:
    # Users write 5e8 for an integer, and JSON has no other way to say it shortly.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _floor(value: object) -> object:
    # transformers works out bucket sizes as 0.9 * hidden**2, which is 15099494.4 for 4096.
    return math.floor(value) if isinstance(value, float) and math.isfinite(value) else value


Integer = Annotated[int, BeforeValidator(_integral)]
Positive = Annotated[Integer, Field(ge=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Size = Annotated[int, BeforeValidator(_floor), Field(ge=0)] | Literal["auto"]
"""Elements; "auto" is for the engine to choose."""
PositiveSize = Annotated[int, BeforeValidator(_floor), Field(ge=1)] | Literal["auto"]


class Section(BaseModel):
    """Check a JSON object: fields are acted on, DeepSpeed's other keys are in deepspeed_keys.

    A value of "auto" or null means the default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    path: ClassVar[str | None] = None
    """Where deepspeed_keys lists the section's other keys."""

    @model_validator(mode="before")
    @classmethod
    def _without_idle_keys(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {key: value for key, value in given.items() if not cls._says_nothing(key, value)}

    @classmethod
    def _says_nothing(cls, key: object, value: Any) -> bool:
        foreign = cls.foreign_keys()
        if value is None or (isinstance(value, str) and value == "auto"):
            return key in cls.model_fields or key in foreign
        if not isinstance(key, str) or key not in foreign:
            return False
        unsupported = UNSUPPORTED.get(cls.path or "", {}).get(key)
        return unsupported is None or unsupported.quiet(value)

    @classmethod
    def foreign_keys(cls) -> list[str]:
        """Return DeepSpeed's keys of this section that aren't fields."""
        if cls.path is None:
            return []
        return [*ACCEPTED.get(cls.path, {}), *UNSUPPORTED.get(cls.path, {})]


def explain(error: ValidationError, model: type[Section], prefix: str = "") -> list[str]:
    """Return a line per bad key: what was expected, what was found, what to do."""
    lines: list[str] = []
    expected: dict[str, tuple[list[str], object]] = {}
    for item in error.errors():
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            lines += cause.problems
            continue
        section, keys = _locate(model, item["loc"])
        path = prefix + ".".join(keys)
        kind, message = item["type"], item["msg"]
        if kind in ("extra_forbidden", "invalid_key"):
            lines.append(_unknown(section, path, item["loc"][-1], item["input"]))
        elif kind == "missing":
            lines.append(f"{path}: missing")
        elif kind == "model_type":
            lines.append(f"{path}: expected a JSON object, found {shown(item['input'])}")
        else:
            expected.setdefault(path, ([], item["input"]))[0].append(message)
    for path, (messages, value) in expected.items():  # a union has one message per branch
        wishes = " or ".join(message.removeprefix("Input should be ") for message in messages)
        lines.append(f"{path}: expected {wishes}, found {shown(value)}")
    return lines


def guess(name: str, known: Iterable[str]) -> str:
    """Return which known name was probably meant, else all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"


def shown(value: object) -> str:
    """Return a value for a message, shortened."""
    try:
        text = repr(value)
    except ValueError:  # an integer of too many digits
        return f"a huge {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _unknown(section: type[Section], path: str, key: object, value: object) -> str:
    unsupported = UNSUPPORTED.get(section.path, {}) if section.path is not None else {}
    if key in unsupported:
        return (
            f"DeepSpeed's key {path!r} isn't supported by hpczero yet, found {shown(value)}: "
            f"{unsupported[str(key)].advice}"
        )
    close = difflib.get_close_matches(str(key), section.foreign_keys(), n=1)
    return f"unknown key {path!r}: {guess(str(key), [*section.model_fields, *close])}"


def _locate(
    model: type[Section], location: tuple[int | str, ...]
) -> tuple[type[Section], list[str]]:
    """Return the section that an error is in, and its keys without pydantic's names of branches."""
    section, inside = model, True
    keys: list[str] = []
    for part in location:
        if not inside:
            if isinstance(part, int):
                keys.append(str(part))
            continue
        keys.append(str(part))
        field = section.model_fields.get(str(part))
        annotation = None if field is None else field.annotation
        kinds = [annotation, *get_args(annotation)]
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        inside = bool(inner)
        section = inner[0] if inner else section
    return section, keys
