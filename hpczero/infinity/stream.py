"""Walk over arrays that are elsewhere: read what comes next while using what is here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Generic, NamedTuple, TypeVar

from hpczero.infinity.tier import Array
from hpczero.sizing import AHEAD, BEHIND, STREAMED

T = TypeVar("T")


class Use(NamedTuple):
    """Say what is done with a part of an array."""

    array: Array
    start: int
    stop: int
    reads: bool
    """Whether its content matters; else it is written whole."""
    writes: bool


class Chunk(NamedTuple, Generic[T]):
    """Hold what is used at a time."""

    what: T
    uses: Sequence[Use]


def parts(array: Array, *, reads: bool) -> Iterator[Chunk[Use]]:
    """Yield an array part by part, each to be read, or else to be written whole."""
    numel = array.tensor.numel()
    for start in range(0, numel, STREAMED):
        use = Use(array, start, min(start + STREAMED, numel), reads, not reads)
        yield Chunk(use, [use])


def stream(chunks: Iterable[Chunk[T]]) -> Iterator[T]:
    """Yield what each chunk is for when its parts are here; keep what the loop has changed.

    Costs the memory of AHEAD + 1 + BEHIND chunks. Nothing is under way any more at the end.

    Raises:
        OSError: a tier can't read or write.
    """
    coming = iter(chunks)
    reading: deque[tuple[Chunk[T], list[Future[None]]]] = deque()
    writing: deque[list[Future[None]]] = deque()
    while True:
        while len(reading) <= AHEAD and (chunk := next(coming, None)) is not None:
            reading.append((chunk, _begin(chunk.uses)))
        if not reading:
            break
        chunk, futures = reading.popleft()
        _wait(futures)
        yield chunk.what
        for use in chunk.uses:
            if not use.writes:
                use.array.drop(use.start, use.stop)
        writing.append([use.array.write(use.start, use.stop) for use in chunk.uses if use.writes])
        if len(writing) > BEHIND:
            _wait(writing.popleft())
    for futures in writing:
        _wait(futures)


def copy(source: Array, target: Array) -> None:
    """Copy an array to one of as many elements, part by part: neither is whole in memory for it.

    Raises:
        OSError: a tier can't read or write.
    """
    pairs = zip(parts(source, reads=True), parts(target, reads=False), strict=True)
    for use in stream(Chunk(ours.what, [ours.what, theirs.what]) for ours, theirs in pairs):
        part = slice(use.start, use.stop)
        target.tensor[part].copy_(source.tensor[part])


def _begin(uses: Iterable[Use]) -> list[Future[None]]:
    begun = []
    for array, start, stop, reads, _ in uses:
        if reads:
            begun.append(array.read(start, stop))
        else:
            array.take(start, stop)
    return begun


def _wait(futures: Iterable[Future[None]]) -> None:
    for future in futures:
        future.result()
