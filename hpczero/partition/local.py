"""A bucket's gradients of this rank alone, before they are reduced."""

from __future__ import annotations

import torch

from hpczero.comm.copies import copy_into
from hpczero.partition.arena import Arena
from hpczero.partition.layout import Layout


class LocalGradients:
    """Collect gradients of parameters in a flat run, for one reduction after the other.

    Costs a buffer of the arena from the first gradient on, unless a run is given.
    """

    def __init__(self, layout: Layout, arena: Arena, dtype: torch.dtype) -> None:
        self._layout, self._arena, self._dtype = layout, arena, dtype
        self._run: torch.Tensor | None = None
        self._filled = [False] * len(layout.slots)

    @property
    def begun(self) -> bool:
        """Tell whether there is a run, which a reduction has not taken yet."""
        return self._run is not None

    def begin_in(self, run: torch.Tensor) -> None:
        """Collect in this run, unless another has begun."""
        if self._run is None:
            self._run = run

    def add(self, index: int, grad: torch.Tensor) -> None:
        """Add a parameter's gradient to what came before it in this run."""
        if self._run is None:
            self._run = self._arena.lend(self._layout.padded, self._dtype)
        slot = self._layout.slots[index]
        region = self._run[slot.start : slot.stop]
        flat = (grad.to_dense() if grad.is_sparse else grad).detach().reshape(-1)
        if self._filled[index]:
            region.add_(flat)
        else:
            copy_into(region, flat)
            self._filled[index] = True

    def take(self) -> torch.Tensor:
        """Return the run, zero where no gradient came, and begin another with the next one."""
        run = self._run
        if run is None:
            run = self._arena.lend(self._layout.padded, self._dtype)
        for index, slot in enumerate(self._layout.slots):
            if not self._filled[index]:
                run[slot.start : slot.stop].zero_()
            self._filled[index] = False
        for start, stop in self._layout.gaps():
            run[start:stop].zero_()
        self._run = None
        return run
