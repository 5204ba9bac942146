"""Spans, and the trace that is made of them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hpczero.comm import timeline
from hpczero.comm.timeline import WAITS, Span, Timeline, hidden, offset, write


def test_nothing_is_recorded_until_it_is_on() -> None:
    line = Timeline()
    with line.span("program", "a", "forward"):
        pass
    line.restart(True)
    with pytest.raises(ValueError, match="x"), line.span("program", "b", "wait"):
        raise ValueError("x")
    assert [(span.name, span.cause) for span in line.spans] == [("b", "wait")]
    assert line.spans[0].start <= line.spans[0].end
    line.restart(False)
    assert line.spans == []


def test_seconds_are_counted_without_recording() -> None:
    line = Timeline()
    with line.wait("gathers", "a"):
        time.sleep(0.01)
    before = line.totals()
    with line.wait("gathers", "a"):
        time.sleep(0.02)
    with line.span("gathers", "a", "gather"):
        time.sleep(0.04)
    with line.span("reductions", "a", "wait"):
        time.sleep(0.01)
    times = line.since(before)
    assert line.spans == []
    assert set(times.waited) == set(WAITS)
    assert 0.02 <= times.waited["gathers"] < sum(line.totals().values()) - 0.06 + 1e-3
    assert times.carried["gather"] >= 0.04
    assert times.carried["ranks"] >= 0.01
    assert times.carried["reduce"] == 0.0


@pytest.mark.parametrize(
    ("waited", "carried", "part"),
    [
        ({"gathers": 1.0}, {"gather": 4.0}, 0.75),
        ({"gathers": 1.0, "new weights": 1.0, "reductions": 9.0}, {"gather": 4.0}, 0.5),
        ({"gathers": 9.0}, {"gather": 4.0}, 0.0),  # it waited for other ranks to come, too
        ({}, {"gather": 4.0}, 1.0),
        ({"gathers": 1.0}, {"gather": 0.0}, None),
    ],
)
def test_what_part_of_gathers_is_hidden(
    waited: dict[str, float], carried: dict[str, float], part: float | None
) -> None:
    assert hidden(waited, carried) == part


def test_spans_beyond_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "LIMIT", 2)
    line = Timeline()
    line.restart(True)
    for _ in range(5):
        with line.span("program", "a", "forward"):
            pass
    assert (len(line.spans), line.lost) == (2, 3)


def test_clocks_agree_in_the_trace(tmp_path: Path) -> None:
    assert offset([10.0, 11.0, 13.5], [0.0, 1.0, 3.0]) == -10.0
    write(
        tmp_path / "trace.json",
        [
            ("a", 0.0, [Span("program", "forward", "forward", 5.0, 6.0)]),
            ("b", -10.0, [Span("gathers", "blocks.0", "gather", 15.5, 15.75)]),
        ],
        5.0,
    )
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    bars = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert bars == [(0, 0, "forward", 0.0, 1e6), (1, 1, "blocks.0", 5e5, 2.5e5)]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0, a", "rank 1, b"]
