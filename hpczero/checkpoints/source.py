"""What a checkpoint offers to those who copy it: named tensors, read a run at a time.

[Note: a source]
Writers of foreign formats see any checkpoint as a Source and ask for runs of flattened tensors, so
that no side ever holds a whole tensor, whichever way the other has cut it. A kind names what is
kept of a parameter: "weights" is the model's state dict (parameters in the precision of the
optimizer's master copy, and persistent buffers as they are), the others are the optimizer's own
names for its states ("exp_avg", "exp_avg_sq").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

PIECE = 4 << 20
"""Bytes that are read at a time."""

Progress = Callable[[int, int], None]
"""Is told the bytes done and the bytes in all."""


class Done:
    """Count the bytes of a copy, and tell them to whoever asked.

    Args:
        total: bytes in all.
        progress: is told after each piece; None for nobody.
    """

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress = total, progress
        self._bytes = 0

    def add(self, size: int) -> None:
        """Count a piece."""
        self._bytes += size
        if self._progress is not None:
            self._progress(self._bytes, self._total)


class Source(Protocol):
    """Offer named tensors that are read run by run."""

    def kinds(self) -> list[str]:
        """Return what there is: "weights", and the optimizer's states under its own names."""

    def names(self, kind: str) -> list[str]:
        """Return the tensors of a kind in the model's order, without tied aliases."""

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """Return a tensor's full shape."""

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """Return a tensor's type as it is stored."""

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a flattened tensor, verified, as a 1-D CPU tensor.

        Raises:
            CheckpointError, ValueError: what is stored is damaged.
            ValueError: the range isn't inside the tensor.
        """

    def tied(self) -> dict[str, str]:
        """Return the other names of tied parameters: alias to the name that `names` has."""


def numel(source: Source, kind: str, name: str) -> int:
    """Return the number of elements of a tensor."""
    count = 1
    for extent in source.shape(kind, name):
        count *= extent
    return count


def check_range(start: int, stop: int, count: int, name: str) -> None:
    """Raise ValueError unless elements [start, stop) are inside a tensor of `count` elements."""
    if not 0 <= start <= stop <= count:
        raise ValueError(
            f"expected a range within the {count} elements of {name!r}, found [{start}, {stop})"
        )


def converted(dtype: torch.dtype, target: torch.dtype | None) -> torch.dtype:
    """Return the type that a tensor is written in: floating tensors take the target.

    Raises:
        ValueError: the target isn't a floating type.
    """
    if target is not None and not target.is_floating_point:
        raise ValueError(f"expected a floating dtype to convert to, found {target}")
    return target if target is not None and dtype.is_floating_point else dtype


def pieces(source: Source, kind: str, name: str, dtype: torch.dtype | None) -> Iterator[Tensor]:
    """Yield a flattened tensor in runs of at most PIECE bytes, converted as `converted` says.

    Raises:
        OverflowError: a finite number isn't finite in the target type.
    """
    stored = source.dtype(kind, name)
    target = converted(stored, dtype)
    count, step = numel(source, kind, name), PIECE // max(stored.itemsize, target.itemsize)
    for start in range(0, count, step):
        piece = source.read(kind, name, start, min(start + step, count))
        if target == stored:
            yield piece
            continue
        written = piece.to(target)
        lost = _finite(piece) & ~_finite(written)
        if lost.any():
            largest = float(piece[_finite(piece)].double().abs().max())
            raise OverflowError(
                f"expected numbers that {target} can hold, found {int(lost.sum())} in {name!r} "
                f"that it can't (the largest is {largest:g}): choose a wider dtype, such as "
                "torch.bfloat16"
            )
        yield written


def _finite(numbers: Tensor) -> Tensor:
    return (numbers if numbers.itemsize > 1 else numbers.float()).isfinite()  # 8-bit floats lack it


def raw(flat: Tensor) -> memoryview:
    """Return the bytes of a 1-D CPU tensor, in place."""
    return flat.contiguous().view(torch.uint8).numpy().data
