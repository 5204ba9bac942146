"""What a rank does when: spans of time, for a picture that Perfetto or chrome://tracing opens.

Off unless started; then each span costs about a microsecond and 100 bytes.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

LIMIT = 500_000
"""Spans that a rank keeps; later ones are counted, not kept."""

TRACKS = ("program", "gathers", "reductions", "checkpoints")
"""Rows of a rank's picture: the main thread, and one for each courier."""


class Span(NamedTuple):
    """Hold one bar of the picture; times are seconds of this rank's clock."""

    track: str
    name: str
    cause: str  # forward, backward, step, wait, gather, reduce, optimizer, io
    start: float
    end: float


class Timeline:
    """Collect the spans of this rank."""

    def __init__(self) -> None:
        self.on = False
        self.spans: list[Span] = []
        self.lost = 0
        """Spans beyond the limit."""

    def restart(self, on: bool) -> None:
        """Forget what was recorded, and record from now on, or nothing more."""
        self.on, self.spans, self.lost = on, [], 0

    def span(self, track: str, name: str, cause: str) -> contextlib.AbstractContextManager[None]:
        """Record how long the block takes, where recording is on."""
        return self._record(track, name, cause) if self.on else _NOTHING

    @contextlib.contextmanager
    def _record(self, track: str, name: str, cause: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            if len(self.spans) < LIMIT:
                self.spans.append(Span(track, name, cause, start, time.perf_counter()))
            else:
                self.lost += 1


_NOTHING = contextlib.nullcontext()


def offset(mine: Sequence[float], first: Sequence[float]) -> float:
    """Return what to add to this rank's clock to have rank 0's.

    Args:
        mine: this rank's times at moments that were nearly the same for all: ends of collectives.
        first: rank 0's times at the same moments.
    """
    return statistics.median(b - a for a, b in zip(mine, first, strict=True))


def write(path: Path, ranks: Sequence[tuple[str, float, Sequence[Span]]]) -> None:
    """Write the spans of all ranks as one Chrome trace, on rank 0's clock.

    Args:
        path: of the JSON file.
        ranks: host, clock offset and spans of each rank.
    """
    starts = [span.start + shift for _, shift, spans in ranks for span in spans]
    zero = min(starts, default=0.0)
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
