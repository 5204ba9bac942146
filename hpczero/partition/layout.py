"""Which interval of which flat run belongs to which parameter and to which rank: integers only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

ALIGN = 64
"""Every parameter and every cut is a multiple of this many elements."""


class Slot(NamedTuple):
    """Place one parameter in its flat run."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int

    @property
    def stop(self) -> int:
        """Return the element behind the last."""
        return self.start + self.numel


class Layout(NamedTuple):
    """Cut a flat run of parameters into equal shards, one per rank."""

    slots: tuple[Slot, ...]
    padded: int
    """Elements of the flat run: a multiple of ALIGN * ranks."""
    ranks: int

    @classmethod
    def of(cls, parameters: Sequence[tuple[str, tuple[int, ...]]], ranks: int) -> Layout:
        """Lay out parameters, given by name and shape, in their order."""
        slots, start = [], 0
        for name, shape in parameters:
            slots.append(Slot(name, tuple(shape), start, math.prod(shape)))
            start = round_up(slots[-1].stop, ALIGN)
        return cls(tuple(slots), round_up(start, ALIGN * ranks), ranks)

    @property
    def numel(self) -> int:
        """Return the elements of the parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    @property
    def shard(self) -> int:
        """Return the elements of one rank's shard."""
        return self.padded // self.ranks

    def interval(self, rank: int) -> tuple[int, int]:
        """Return the interval of the flat run that a rank owns."""
        return rank * self.shard, (rank + 1) * self.shard

    def used(self, start: int, stop: int) -> int:
        """Return the elements of [start, stop) that belong to parameters."""
        return sum(max(0, min(stop, slot.stop) - max(start, slot.start)) for slot in self.slots)

    def gaps(self) -> list[tuple[int, int]]:
        """Return the intervals that belong to no parameter."""
        edges = [0, *(edge for slot in self.slots for edge in (slot.start, slot.stop)), self.padded]
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def persistent(layouts: Sequence[Layout], threshold: int, total: int | None) -> list[bool]:
    """Tell which flat runs stay gathered: those of parameters below `threshold` elements only.

    In their order, as long as they have at most `total` elements together (None: no limit).
    """
    chosen, elements = [], 0
    for layout in layouts:
        small = max(slot.numel for slot in layout.slots) < threshold
        fits = total is None or elements + layout.numel <= total
        chosen.append(small and fits)
        elements += layout.numel if chosen[-1] else 0
    return chosen


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that isn't below the value."""
    return -(-value // multiple) * multiple
