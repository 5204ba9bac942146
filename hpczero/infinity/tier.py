"""What every tier can do, and the tier that is memory."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import torch

from hpczero.plan import TierName

CUT = max(4096, mmap.PAGESIZE)
"""Parts of arrays are cut at multiples of so many elements; see [Note: parts]."""


def done() -> Future[None]:
    """Return a future of nothing to wait for."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


_DONE = done()


class Array:
    """Hold a flat tensor that is always in memory: reading, writing and dropping do nothing.

    See `hpczero.infinity` for what they do where it isn't. Parts are elements [start, stop), by
    default all.
    """

    resident = True
    """Whether `tensor` can be looked at without `read`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def take(self, start: int = 0, stop: int | None = None) -> None:
        """Say that a part will be filled, and then written or dropped: it costs its bytes."""

    def read(self, start: int = 0, stop: int | None = None) -> Future[None]:
        """Bring a part into `tensor`; costs its bytes until it is written or dropped."""
        return _DONE

    def write(self, start: int = 0, stop: int | None = None) -> Future[None]:
        """Keep a part as it is in `tensor` now, which must not change until this is done; drop."""
        return _DONE

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Give back the memory of a part that was read and not changed."""

    def settle(self, filled: Future[None], look: Callable[[], None]) -> Future[None]:
        """Keep everything as soon as it has been filled; done when `look` has looked at it.

        Where everything stays in memory anyway nobody looks: whoever wants to, can at any time.
        """
        return filled

    def filling(self, adds: bool) -> contextlib.AbstractContextManager[object]:
        """Return the block in which everything is filled before it settles, or added to.

        Waits at its beginning for what it adds to, and for room where much waits to be kept.
        """
        return contextlib.nullcontext()

    def values(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return any elements: a view, or a copy of what is elsewhere."""
        return self.tensor[start:stop]

    def coming(self, after: Future[None] = _DONE) -> contextlib.AbstractContextManager[object]:
        """Begin to read everything once `after` is done; the block waits for it, and drops it."""
        return _arrival(self, _then(after, self.read))

    @contextlib.contextmanager
    def here(self, changes: bool = False) -> Iterator[torch.Tensor]:
        """Have all of it in `tensor` inside the block, and keep what the block changes, if so."""
        self.read().result()
        try:
            yield self.tensor
        except BaseException:
            self.drop()
            raise
        if changes:
            self.write().result()
        else:
            self.drop()

    @contextlib.contextmanager
    def anew(self) -> Iterator[torch.Tensor]:
        """Have room for all of it inside the block, which fills it whole, and keep that."""
        with self.filling(adds=False):
            try:
                yield self.tensor
            except BaseException:
                self.drop()
                raise
            self.write().result()


@contextlib.contextmanager
def until(done: Future[None]) -> Iterator[None]:
    """Wait for something at the beginning of a block."""
    done.result()
    yield


def _then(first: Future[None], begin: Callable[[], Future[None]]) -> Future[None]:
    """Return a future of what is begun as soon as `first` is done."""
    if first.done():
        first.result()
        return begin()
    chained: Future[None] = Future()

    def end(second: Future[None]) -> None:
        error = second.exception()
        if error is None:
            chained.set_result(None)
        else:
            chained.set_exception(error)

    def go_on(first: Future[None]) -> None:
        try:
            first.result()
            begin().add_done_callback(end)
        except BaseException as error:  # nobody else would hear of it
            chained.set_exception(error)

    first.add_done_callback(go_on)
    return chained


@contextlib.contextmanager
def _arrival(array: Array, reading: Future[None]) -> Iterator[None]:
    reading.result()
    try:
        yield
    finally:
        array.drop()


class Part(NamedTuple):
    """Name elements [start, stop) of an array."""

    array: Array
    start: int
    stop: int

    @property
    def tensor(self) -> torch.Tensor:
        """Return the part's place in memory."""
        return self.array.tensor[self.start : self.stop]

    def values(self, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of the part: a view, or a copy of what is elsewhere."""
        return self.array.values(self.start + start, self.start + stop)


class Moved(NamedTuple):
    """Count bytes that went between a tier and where they are used: a file and memory, say."""

    read: int
    written: int


class Tier(Protocol):
    """Keep named flat arrays; a rank's own, nothing here is known to other ranks."""

    @property
    def name(self) -> TierName:
        """Return what it is to the accounts."""

    @property
    def moved(self) -> Moved:
        """Return the bytes that went from and to it."""

    def zeros(self, name: str, numel: int, dtype: torch.dtype) -> Array:
        """Return a new array of zeros."""


class Memory:
    """Keep arrays in memory.

    Args:
        name: what this memory is to the accounts, "device" or "host".
    """

    def __init__(self, name: TierName) -> None:
        self.name: TierName = name
        self.moved = Moved(0, 0)
        """What its user has said: nothing is copied here."""

    def count(self, read: int = 0, written: int = 0) -> None:
        """Count bytes that are read by the device, or written by it, where this is the host's."""
        self.moved = Moved(self.moved.read + read, self.moved.written + written)

    def zeros(self, name: str, numel: int, dtype: torch.dtype) -> Array:
        """Return a new array of zeros, whose memory is taken as it is written."""
        return Array(torch.zeros(numel, dtype=dtype))
