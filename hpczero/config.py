"""The configuration: DeepSpeed's JSON keys, typed, every problem reported at once."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from hpczero.errors import ConfigError


def _integral(value: object) -> object:
    # Users write 5e8 for an integer, and JSON has no other way to say it shortly.
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_integral)]
Positive = Annotated[Integer, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Switch(_Section):
    """Turn a feature on or off."""

    enabled: bool = False


class ZeroOptimization(_Section):
    """Choose what is partitioned."""

    stage: Annotated[Integer, Field(ge=0, le=3)] = 0
    stage3_prefetch_bucket_size: Annotated[Integer, Field(ge=0)] | Literal["auto"] = "auto"
    """Elements gathered ahead of use; 0 gathers on demand, "auto" is the largest bucket."""


class AdamParams(_Section):
    """Set Adam's constants; the defaults are torch's."""

    lr: Annotated[float, Field(ge=0)] = 1e-3
    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.999)
    eps: Annotated[float, Field(ge=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """None is torch's default: 0.01 for AdamW, 0 for Adam."""


class Optimizer(_Section):
    """Choose the optimizer."""

    type: Literal["Adam", "AdamW"] = "AdamW"
    params: AdamParams = AdamParams()

    @property
    def weight_decay(self) -> float:
        """Return the weight decay in force."""
        if self.params.weight_decay is not None:
            return self.params.weight_decay
        return 0.01 if self.type == "AdamW" else 0.0


class Config(_Section):
    """Describe a training run in DeepSpeed's terms; `Config()` is stage 0 in fp32."""

    train_batch_size: Positive | None = None
    train_micro_batch_size_per_gpu: Positive | None = None
    gradient_accumulation_steps: Positive | None = None
    gradient_clipping: Annotated[float, Field(ge=0)] = 0.0
    bf16: Switch = Switch()
    zero_optimization: ZeroOptimization = ZeroOptimization()
    optimizer: Optimizer = Optimizer()

    @classmethod
    def load(cls, source: Config | Mapping[str, Any] | str | PathLike[str]) -> Config:
        """Return the Config that a Config, a mapping or a JSON file describes.

        Raises:
            ConfigError: unknown keys, wrong types or values, all of them in one message.
            FileNotFoundError: there is no such file.
        """
        if isinstance(source, Config):
            return source
        origin = "the config"
        if not isinstance(source, Mapping):
            origin = str(source)
            source = _read(Path(source))
        try:
            return cls.model_validate(dict(source))
        except ValidationError as error:
            raise ConfigError([_explain(item) for item in error.errors()], origin) from None

    def resolve(self, world_size: int) -> Config:
        """Return the Config with the batch arithmetic completed for this many ranks.

        Any two of `train_batch_size`, `train_micro_batch_size_per_gpu` and
        `gradient_accumulation_steps` give the third.

        Raises:
            ConfigError: the three contradict each other, or don't divide.
        """
        total = self.train_batch_size
        micro = self.train_micro_batch_size_per_gpu
        accumulation = self.gradient_accumulation_steps
        if total is None:
            accumulation = accumulation or 1
            total = micro * accumulation * world_size if micro else None
        elif accumulation is None and micro is not None:
            accumulation = max(1, total // (micro * world_size))
        else:
            accumulation = accumulation or 1
            micro = micro or max(1, total // (accumulation * world_size))
        if total is not None and micro is not None and total != micro * accumulation * world_size:
            product = micro * accumulation * world_size
            raise ConfigError(
                [
                    f"train_batch_size {total} != train_micro_batch_size_per_gpu {micro} * "
                    f"gradient_accumulation_steps {accumulation} * world size {world_size} "
                    f"= {product}: leave one of the three out, or set train_batch_size to {product}"
                ]
            )
        return self.model_copy(
            update={
                "train_batch_size": total,
                "train_micro_batch_size_per_gpu": micro,
                "gradient_accumulation_steps": accumulation,
            }
        )

    @property
    def accumulation(self) -> int:
        """Return the number of micro-steps in a step."""
        return self.gradient_accumulation_steps or 1


def _read(path: Path) -> Mapping[str, Any]:
    text = path.read_text()
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError([f"expected JSON, found {error.msg} at {where}"], str(path)) from None
    if not isinstance(value, Mapping):
        raise ConfigError([f"expected a JSON object, found a {type(value).__name__}"], str(path))
    return value


def _explain(item: Any) -> str:
    # A union's branch names ("int", "literal['auto']") are pydantic's, not the user's.
    location = [part for part in item["loc"] if not _is_branch(part)]
    path = ".".join(str(part) for part in location)
    if item["type"] != "extra_forbidden":
        return f"{path}: {item['msg']}, found {item['input']!r}"
    keys = list(_section(location[:-1]).model_fields)
    close = difflib.get_close_matches(str(location[-1]), keys, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known keys here: {', '.join(keys)}"
    return f"unknown key {path!r}: {hint}"


def _is_branch(part: object) -> bool:
    return isinstance(part, str) and (
        part.startswith(("constrained-", "function-", "literal[")) or part in ("int", "float")
    )


def _section(path: list[Any]) -> type[BaseModel]:
    section: type[BaseModel] = Config
    for key in path:
        annotation = section.model_fields[key].annotation
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        section = annotation
    return section
