"""The one order of reductions, and when each is posted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpczero.partition.bucket import Bucket


class Reducer:
    """Post the reductions of a backward in fixed order: the reverse of the layout.

    All ranks post all trainable buckets, whatever ran; see [Note: two orders].
    """

    def __init__(self, buckets: Sequence[Bucket], idle: Callable[[Bucket], bool]) -> None:
        self._order = [bucket for bucket in reversed(buckets) if bucket.trainable]
        self._idle = idle
        self._next = 0
        self._reduces = False

    def begin(self, reduces: bool) -> None:
        """Start a backward; `reduces` False only accumulates locally."""
        self._reduces = reduces
        self._next = 0
        for bucket in self._order:
            bucket.begin_backward()

    def close(self, bucket: Bucket) -> None:
        """Take a bucket's gradients for complete; post it when those before it are posted."""
        if not self._reduces or bucket.closed:
            return
        bucket.closed = True
        while self._next < len(self._order):
            bucket = self._order[self._next]
            # A bucket that didn't run gets no gradient: it must not hold back those behind it.
            if not bucket.closed and not self._idle(bucket):
                return
            bucket.closed = True
            bucket.reduce()
            self._next += 1

    def flush(self) -> None:
        """Post whatever this backward has not posted yet."""
        for bucket in self._order:
            self.close(bucket)

    def finish(self) -> None:
        """Post what no backward of this step has reduced, and wait for all reductions."""
        for bucket in self._order:
            if not bucket.reduced:
                bucket.reduce()
        self.wait()

    @property
    def reduced(self) -> bool:
        """Tell whether a backward of this step has posted its reductions."""
        return bool(self._order) and self._order[0].reduced

    def wait(self) -> None:
        """Wait until all posted reductions are done."""
        for bucket in self._order:
            bucket.wait_reduced()

    def late(self) -> list[bool]:
        """Tell for each bucket, in order, whether a gradient came too late on this rank."""
        return [bucket.late for bucket in self._order]

    def reduce_late(self, late: Sequence[bool]) -> None:
        """Reduce late gradients of the buckets that have them on any rank, and wait."""
        for bucket, wanted in zip(self._order, late, strict=True):
            if wanted:
                bucket.reduce_late()
        self.wait()

    def end_step(self) -> None:
        """Forget the gradients of this step."""
        for bucket in self._order:
            bucket.end_step()
