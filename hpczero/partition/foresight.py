"""How far ahead to gather, from how long gathers and computing take.

[Note: how far ahead]
Weights foreseen and in use take what `sizing` counts: beside the root's the two largest units. As
long as a unit in use is smaller, more can be foreseen, so that a large unit is begun several small
ones early. Where units are alike this hides all that can be hidden: the network never rests. Where
compute lies in front and weights behind, as in convolutional nets, it doesn't: there gathers must
be begun further ahead, which takes memory. So the MEASURED steps are timed on each rank, and rank 0
tries on paper what up to FURTHER units more would save; all ranks take its answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from hpczero.comm.timeline import Timeline, Totals

MEASURED = range(1, 3)
"""Steps that are timed, from 0: the first one foresees nothing yet."""

FURTHER = 2
"""Units that may be whole beyond those that `sizing` counts."""

GAIN = 0.05
"""Of a step's time, that must be saved to be worth the memory."""

LEAST_NUMEL = 1 << 16
"""Elements of the largest unit from which timing is worth it: gathers of less are mere latency."""


class Visit(NamedTuple):
    """Describe what a unit does in a pass."""

    numel: int  # gathered for it
    seconds: float  # computed in it


def waiting(visits: Sequence[Visit], seconds_per_element: float, whole: int) -> float:
    """Return for how long a pass waits for gathers, by the rule of the Runtime's prefetch.

    Args:
        visits: the units of the pass, in order.
        seconds_per_element: of gathers, which follow one another.
        whole: elements in use and foreseen, at most.
    """
    waited = now = free = 0.0
    done: list[float] = []
    for index, visit in enumerate(visits):
        room = whole - sum(other.numel for other in visits[index : len(done)])
        while len(done) < len(visits):
            numel = visits[len(done)].numel
            room -= numel
            if room < 0 and len(done) > index:
                break
            free = max(free, now) + numel * seconds_per_element
            done.append(free)
        late = max(0.0, done[index] - now)
        waited += late
        now += late + visit.seconds
    return waited


def further(
    passes: Sequence[Sequence[Visit]], seconds_per_element: float, wholes: Sequence[int]
) -> int:
    """Return how many further units to keep whole: the least that is about as good as the most.

    Args:
        passes: forwards and backwards that were timed.
        seconds_per_element: of gathers.
        wholes: elements in use and foreseen, at most, with 0, 1, ... further units.
    """
    computed = sum(visit.seconds for visits in passes for visit in visits)
    waits = [
        sum(waiting(visits, seconds_per_element, whole) for visits in passes) for whole in wholes
    ]
    return next(
        number
        for number, waited in enumerate(waits)
        if waited - min(waits) <= GAIN * (computed + waited)
    )


class Gauge:
    """Time what the units of a step compute, and what its gathers take."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._before: Totals = timeline.totals()
        self.passes: list[list[Visit]] = []
        self._at: tuple[str, str, int] | None = None
        """Phase, name and elements of the unit that computes."""
        self._since = 0.0
        self._seconds = 0.0
        self._gathered = 0

    def gather(self, numel: int) -> None:
        """Note that a gather was posted."""
        self._gathered += numel

    def enter(self, phase: str, name: str, numel: int) -> None:
        """Begin to count for a unit, unless it is the one counted for already."""
        if self._at is None or self._at[:2] != (phase, name):
            if self._at is None or self._at[0] != phase:
                self.passes.append([])
            self._at, self._seconds = (phase, name, numel), 0.0
            self.passes[-1].append(Visit(numel, 0.0))
        self._since = self._working()

    def leave(self) -> None:
        """Count for the current unit what passed since `enter`, without waiting."""
        if self._at is not None and self._since:
            self._seconds += self._working() - self._since
            self.passes[-1][-1] = Visit(self._at[2], self._seconds)
        self._since = 0.0

    @property
    def seconds_per_element(self) -> float:
        """Return the mean time that an element took to be gathered."""
        carried = self._timeline.since(self._before).carried
        return carried["gather"] / max(1, self._gathered)

    def _working(self) -> float:
        return time.perf_counter() - sum(self._timeline.since({}).waited.values())
