"""What one update of a bucket works on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from hpczero.infinity.stream import Use
from hpczero.infinity.tier import Array


class Task(NamedTuple):
    """Hold what one update of a bucket works on, while the bucket goes on with the next step."""

    grads: Array
    offset: int
    """Of the updated interval in `grads`."""
    master: Array
    states: Mapping[str, Array]
    target: Array
    """Of the new weights, in the compute dtype."""

    @property
    def resident(self) -> bool:
        """Tell whether all of it is always in memory."""
        return all(use.array.resident for use in self.uses(0, 0))

    def gradient(self, place: slice) -> torch.Tensor:
        """Return a part of the reduced gradient of the updated interval."""
        return self.grads.tensor[self.offset + place.start : self.offset + place.stop]

    def uses(self, start: int, stop: int) -> list[Use]:
        """Return what the update of an interval of `master` reads and writes."""
        at = self.offset
        found = [
            Use(self.grads, at + start, at + stop, reads=True, writes=False),
            Use(self.master, start, stop, reads=True, writes=True),
            *(Use(array, start, stop, True, True) for array in self.states.values()),
        ]
        if self.target is not self.master:
            found.append(Use(self.target, start, stop, reads=False, writes=True))
        return found
