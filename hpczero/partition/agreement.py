"""Compare what ranks have or did, and name the first difference."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import nn

from hpczero.comm.courier import ranks_text
from hpczero.comm.wire import Cargo
from hpczero.comm.world import World
from hpczero.errors import Disagreement

OWN = {"nvme_path"}
"""Settings that each rank has for itself."""


def digest(lines: Sequence[str]) -> bytes:
    """Return 16 bytes that differ where the lines do."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).digest()


def settings(tree: Mapping[str, Any], prefix: str = "config ") -> list[str]:
    """Return a line for each key of nested settings: `config zero_optimization.stage: 3`.

    Folders of files that a rank has for itself may differ, and are left out.
    """
    lines: list[str] = []
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            lines += settings(value, f"{prefix}{key}.")
        elif key not in OWN:
            lines.append(f"{prefix}{key}: {value!r}")
    return lines


def describe(model: nn.Module) -> list[str]:
    """Return a line for each parameter and buffer of a model."""
    parameters = [
        f"parameter {name!r}: {tuple(p.shape)}, {p.dtype}, requires_grad={p.requires_grad}"
        for name, p in model.named_parameters()
    ]
    buffers = [f"buffer {name!r}: {tuple(b.shape)}, {b.dtype}" for name, b in model.named_buffers()]
    return parameters + buffers


def compare(world: World, what: str, lines: Sequence[str]) -> None:
    """Compare lines over all ranks by their digest; all ranks call.

    Raises:
        Disagreement: they differ; names the first line that does, and the ranks.
    """
    digests = world.gathers.exchange(Cargo("exchange", what, 0), digest(lines)).result()
    if len(set(digests)) > 1:
        raise_difference(world, what, lines)


def raise_difference(world: World, what: str, lines: Sequence[str], where: str = "") -> NoReturn:
    """Name the first line in which ranks differ; all ranks come here together."""
    everyone = world.gathers.exchange_objects(what, list(lines)).result()
    length = max(len(other) for other in everyone)
    padded = [list(other) + ["nothing more"] * (length - len(other)) for other in everyone]
    index, at = next(
        (index, column)
        for index, column in enumerate(zip(*padded, strict=True))
        if len(set(column)) > 1
    )
    groups: dict[str, list[int]] = {}
    for rank, line in enumerate(at):
        groups.setdefault(line, []).append(rank)
    found = "\n".join(f"  {ranks_text(ranks)}: {line}" for line, ranks in groups.items())
    raise Disagreement(
        f"the ranks differ in their {what} ({where}entry {index + 1}):\n{found}\n"
        "all ranks must build the same model from the same config and run the same modules in one "
        "order"
    )
