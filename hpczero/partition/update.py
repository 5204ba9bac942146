"""One update of Adam over all buckets: at once, or in a thread while the next step begins."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from hpczero.comm import watch
from hpczero.gpu.adam import adam_
from hpczero.gpu.reference import AdamStep
from hpczero.infinity.stream import Chunk, stream
from hpczero.infinity.tier import CUT, done
from hpczero.infinity.workers import Workers
from hpczero.partition.bucket import Bucket
from hpczero.partition.segments import Segment
from hpczero.partition.task import Task
from hpczero.sizing import STREAMED

Segments = Mapping[int, Sequence[tuple[Segment, AdamStep]]]
"""By the id of a bucket: its segments, each with the constants of its step."""


class Update(NamedTuple):
    """Hold all that an update works on, so that the buckets can go on meanwhile."""

    tasks: Sequence[tuple[Bucket, Task]]
    segments: Segments
    tile_size: int
    """Of the kernel's twin in torch."""
    streamed: int
    """Elements that are brought into memory at a time, of what is elsewhere."""

    def run(self) -> None:
        """Update chunk after chunk, in the order in which the next forward needs them.

        Raises:
            OSError: a file can't be read or written.
        """
        last: Bucket | None = None
        for bucket, task, lo, hi in stream(self._chunks()):
            if last is not None and last is not bucket and not last.updated.done():
                last.updated.set_result(None)  # what it has to write is on its way
            last = bucket
            moments = [task.states[kind].tensor for kind in ("exp_avg", "exp_avg_sq")]
            for segment, constants in self.segments.get(id(bucket), ()):
                place = slice(max(segment.start, lo), min(segment.stop, hi))
                if place.start < place.stop:
                    adam_(
                        task.target.tensor[place],
                        task.master.tensor[place],
                        task.gradient(place),
                        moments[0][place],
                        moments[1][place],
                        constants,
                        self.tile_size,
                    )

    def run_and_tell(self) -> None:
        """Update everything, and end the waiting for all buckets whatever happens."""
        try:
            self.run()
        except BaseException as error:
            for bucket in self._waited_for():
                bucket.updated.set_exception(error)
            raise
        for bucket in self._waited_for():
            bucket.updated.set_result(None)

    def _waited_for(self) -> Iterator[Bucket]:
        return (bucket for bucket, _ in self.tasks if not bucket.updated.done())

    def _chunks(self) -> Iterator[Chunk[tuple[Bucket, Task, int, int]]]:
        """Yield what is updated at a time: a bucket's interval, or parts of what is elsewhere."""
        for bucket, task in self.tasks:
            numel = task.master.tensor.numel()
            size = max(numel, 1) if task.resident else self.streamed
            for lo in range(0, numel, size):
                hi = min(lo + size, numel)
                yield Chunk((bucket, task, lo, hi), task.uses(lo, hi))


class Updater:
    """Run updates in a thread, one at a time."""

    def __init__(self) -> None:
        self._worker: Workers | None = None
        self._last: Future[None] = done()

    def begin(self, update: Update) -> None:
        """Let an update go on in the thread; the last one is complete."""
        if self._worker is None:
            self._worker = Workers(1, "hpczero-update")
            # Not `close`: whoever collects this may be a thread that the update waits for.
            weakref.finalize(self, self._worker.end).atexit = False
        self._last = self._worker.submit(update.run_and_tell)
        _UNHEARD.add(self._last)
        self._last.add_done_callback(_forget)

    def join(self) -> None:
        """Wait until the last update is complete.

        Raises:
            OSError: a file can't be read or written.
        """
        try:
            self._last.result()
        except Exception:
            _UNHEARD.discard(self._last)  # the caller hears of it
            raise


def part_size(limit: int | None) -> int:
    """Return the elements that an update brings into memory at a time, `limit` at most."""
    return max(CUT, min(limit or STREAMED, STREAMED) // CUT * CUT)


_UNHEARD: set[Future[None]] = set()
"""Updates that go on, or have failed and nobody knows."""


def _forget(update: Future[None]) -> None:
    if update.exception() is None:
        _UNHEARD.discard(update)


def _join_all() -> None:
    """End what updates go on, before this rank parts from others that wait for them."""
    try:
        for update in list(_UNHEARD):
            update.result()
    except BaseException as error:
        watch.fail_with(error, error.__traceback__, "failed")


watch.at_exit(_join_all)
