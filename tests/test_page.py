"""The page of runs: what it shows, and what it says of folders that are none."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from hpczero import cli, page

SMALL = "--layers 2 --hidden 64 --heads 2 --seq 16 --batch 2 --steps 3 --no-progress".split()  # noqa: SIM905


def run(folder: Path, *flags: str) -> Path:
    cli.main(["train", *SMALL, *flags, "--out", str(folder)])
    return folder


def test_a_page_of_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = run(tmp_path / "a", "--trace"), run(tmp_path / "b<1>", "--stage", "1", "--dtype", "fp32")
    out = tmp_path / "page.html"
    cli.main(["report", *map(str, runs), "--out", str(out)])
    assert f"wrote {out}: 2 runs" in capsys.readouterr().out
    text = out.read_text()
    assert 'src="' not in text and 'href="http' not in text
    for drawing in text.split("<svg")[1:]:
        ET.fromstring("<svg" + drawing[: drawing.index("</svg>")] + "</svg>")
    assert text.count("<svg") == 5
    assert "b&lt;1&gt;" in text
    summary = json.loads((runs[1] / "summary.json").read_text())
    assert f"<td>{summary['loss_first']:.4f} to {summary['loss_last']:.4f}</td>" in text


def test_time_is_counted_once(tmp_path: Path) -> None:
    found = page.read(run(tmp_path, "--trace"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    outer = [
        event
        for event in events
        if event["ph"] == "X" and event["tid"] == 0 and event["name"] in ("forward", "backward")
    ]
    assert len(outer) == 6
    inside = sum(found.causes[cause] for cause in ("forward", "backward"))
    assert 0 < inside <= sum(event["dur"] for event in outer) / 1e6 * (1 + 1e-9)
    assert all(seconds >= 0 for seconds in found.causes.values())
    assert {"forward", "backward", "optimizer", "wait for exchange"} <= set(found.causes)


def test_what_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["report", str(tmp_path)])
    assert caught.value.code == 1
    assert "expected a folder that hpczero train has written to its end" in capsys.readouterr().err
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(page.RunError, match="not as hpczero train writes it"):
        page.read(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(page.RunError, match="expected a line per step, found none"):
        page.read(tmp_path)
