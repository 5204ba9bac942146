"""The order in which units ran, to foresee which comes next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Schedule(Generic[T]):
    """Record the units of a pass and foresee those of the next one.

    A unit that wasn't foreseen (a skipped branch, another mode) moves the position to where it was
    seen last time, or leaves it; the pass that ends becomes the new expectation.
    """

    def __init__(self) -> None:
        self._expected: list[T] = []
        self._seen: list[T] = []
        self._position = 0

    def begin(self) -> None:
        """Start a pass."""
        if self._seen:
            self._expected, self._seen = self._seen, []
        self._position = 0

    def visit(self, unit: T) -> None:
        """Note that a unit runs now."""
        self._seen.append(unit)
        with contextlib.suppress(ValueError):
            self._position = self._expected.index(unit, self._position) + 1

    def ahead(self) -> Iterator[T]:
        """Yield the units that are expected to run next."""
        yield from self._expected[self._position :]

    def next_pass(self) -> Iterator[T]:
        """Yield the units that the pass after this one is expected to run."""
        yield from self._seen or self._expected
