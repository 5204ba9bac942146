"""What a rank does when: spans of time, for a picture that Perfetto or chrome://tracing opens.

How long spans took is always added up, by cause: about a microsecond each. They are kept for the
picture only when that is started; then each takes 100 bytes.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, NamedTuple, get_args

LIMIT = 500_000
"""Spans that a rank keeps; later ones are counted, not kept."""

TRACKS = ("program", "gathers", "reductions", "checkpoints")
"""Rows of a rank's picture: the main thread, and one for each courier."""


class Span(NamedTuple):
    """Hold one bar of the picture; times are seconds of this rank's clock."""

    track: str
    name: str
    cause: str  # forward, backward, optimizer, wait for ..., wait, gather, reduce, io
    start: float
    end: float


Wait = Literal[
    "gathers",
    "reductions",
    "new weights",
    "update",
    "other ranks",
    "exchange",
    "buffers",
    "metrics",
]
"""What the program waits for."""

WAITS: dict[Wait, str] = {what: f"wait for {what}" for what in get_args(Wait)}
"""What each is called as a cause."""

Totals = Mapping[tuple[str, str], float]
"""Seconds by track and cause."""


class Times(NamedTuple):
    """Hold seconds of this rank: what its program waited for, and what its couriers did."""

    waited: dict[str, float]  # by what for
    carried: dict[str, float]  # gather, reduce; ranks: waiting for others to come to a collective

    @property
    def hidden(self) -> float | None:
        """Return the part of the gathers' time in which the program didn't wait for them."""
        return hidden(self.waited, self.carried)


def hidden(waited: Mapping[str, float], carried: Mapping[str, float]) -> float | None:
    """Return the part of the gathers' time that compute hid, None without gathers."""
    gather = carried.get("gather", 0.0)
    if gather == 0.0:
        return None
    open_ = waited.get("gathers", 0.0) + waited.get("new weights", 0.0)
    return max(0.0, 1.0 - open_ / gather)


class Timeline:
    """Collect the spans of this rank.

    Every track belongs to one thread, which alone adds to its seconds.
    """

    def __init__(self) -> None:
        self.on = False
        self._seconds: dict[tuple[str, str], float] = {}
        self.spans: list[Span] = []
        self.lost = 0
        """Spans beyond the limit."""

    def restart(self, on: bool) -> None:
        """Forget what was recorded, and record from now on, or nothing more."""
        self.on, self.spans, self.lost = on, [], 0

    def span(self, track: str, name: str, cause: str) -> Timing:
        """Count how long the block takes; record it too, where recording is on."""
        return Timing(self, track, name, cause)

    def wait(self, what: Wait, name: str) -> Timing:
        """Count how long the program waits in the block."""
        return Timing(self, "program", name, WAITS[what])

    def totals(self) -> Totals:
        """Return all seconds so far, for `since`."""
        return dict(self._seconds)

    def since(self, before: Totals) -> Times:
        """Return what has been counted since `totals`."""
        now = self.totals()

        def seconds(track: str, cause: str) -> float:
            return now.get((track, cause), 0.0) - before.get((track, cause), 0.0)

        return Times(
            {what: seconds("program", cause) for what, cause in WAITS.items()},
            {
                "gather": seconds("gathers", "gather") + seconds("reductions", "gather"),
                "reduce": seconds("reductions", "reduce"),
                "ranks": seconds("gathers", "wait") + seconds("reductions", "wait"),
            },
        )

    def _end(self, track: str, name: str, cause: str, start: float, end: float) -> None:
        key = (track, cause)
        self._seconds[key] = self._seconds.get(key, 0.0) + end - start
        if not self.on:
            return
        if len(self.spans) < LIMIT:
            self.spans.append(Span(track, name, cause, start, end))
        else:
            self.lost += 1


class Timing:
    """Time a block: a context manager that is cheaper than a generator."""

    __slots__ = ("_cause", "_line", "_name", "_start", "_track")

    def __init__(self, line: Timeline, track: str, name: str, cause: str) -> None:
        self._line, self._track, self._name, self._cause = line, track, name, cause

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end = time.perf_counter()
        self._line._end(self._track, self._name, self._cause, self._start, end)


def offset(mine: Sequence[float], first: Sequence[float]) -> float:
    """Return what to add to this rank's clock to have rank 0's.

    Args:
        mine: this rank's times at moments that were nearly the same for all: ends of collectives.
        first: rank 0's times at the same moments.
    """
    return statistics.median(b - a for a, b in zip(mine, first, strict=True))


def write(path: Path, ranks: Iterable[tuple[str, float, Sequence[Span]]], zero: float) -> None:
    """Write the spans of all ranks as one Chrome trace, on rank 0's clock.

    Args:
        path: of the JSON file.
        ranks: host, clock offset and spans of each rank.
        zero: where the trace begins.
    """
    with path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for rank, (host, shift, spans) in enumerate(ranks):
            _write_rank(file, rank, host, shift - zero, spans)
        file.write(json.dumps({"name": "end of trace", "ph": "M", "pid": 0, "args": {}}))
        file.write("\n]}\n")


def _write_rank(file: IO[str], rank: int, host: str, shift: float, spans: Sequence[Span]) -> None:
    name = {
        "name": "process_name",
        "ph": "M",
        "pid": rank,
        "args": {"name": f"rank {rank}, {host}"},
    }
    file.write(json.dumps(name) + ",\n")
    for number, track in enumerate(TRACKS):
        name = {"name": "thread_name", "ph": "M", "pid": rank, "tid": number}
        file.write(json.dumps({**name, "args": {"name": track}}) + ",\n")
    for span in spans:
        event = {
            "name": span.name,
            "cat": span.cause,
            "ph": "X",
            "pid": rank,
            "tid": TRACKS.index(span.track),
            "ts": round((span.start + shift) * 1e6, 3),
            "dur": round((span.end - span.start) * 1e6, 3),
        }
        file.write(json.dumps(event) + ",\n")
