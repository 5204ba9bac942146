"""One page that shows runs side by side: loss, speed, where the time goes, memory, traffic."""

from __future__ import annotations

import html
import io
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpczero.comm.collectives import COLLECTIVES
from hpczero.comm.timeline import WAITS
from hpczero.report import STATES, read_steps

CAUSES = ("forward", "backward", "optimizer", *WAITS.values(), "io")
"""What the program's own row of a trace is made of."""


class RunError(ValueError):
    """Say what is wrong with a run's folder."""


@dataclass(frozen=True)
class Run:
    """Hold what `hpczero train` wrote."""

    name: str
    steps: Sequence[Any]
    summary: Mapping[str, Any]
    causes: Mapping[str, float]
    """Seconds of rank 0's program by cause; empty without a trace."""


def read(folder: Path) -> Run:
    """Return a run.

    Raises:
        RunError: the folder isn't one that `hpczero train` has written.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text())
        steps = read_steps(folder / "metrics.jsonl")
    except OSError as error:
        raise RunError(
            f"expected a folder that hpczero train has written to its end, found {error.strerror}: "
            f"{str(error.filename)!r}"
        ) from None
    except (ValueError, TypeError) as error:
        raise RunError(f"{folder}: not as hpczero train writes it: {error}") from None
    if not steps:
        raise RunError(f"{folder / 'metrics.jsonl'}: expected a line per step, found none")
    trace = folder / "trace.json"
    return Run(str(folder), steps, summary, _causes(trace) if trace.exists() else {})


def _causes(trace: Path) -> dict[str, float]:
    """Return the seconds of each cause; a wait inside forward or backward counts as waiting."""
    events = json.loads(trace.read_text())["traceEvents"]
    bars = [e for e in events if e["ph"] == "X" and e["pid"] == e["tid"] == 0]
    bars.sort(key=lambda bar: (bar["ts"], -bar["dur"]))
    seconds: dict[str, float] = defaultdict(float)
    around: list[dict[str, Any]] = []
    for bar in bars:
        while around and around[-1]["ts"] + around[-1]["dur"] <= bar["ts"]:
            around.pop()
        if around:
            seconds[around[-1]["cat"]] -= bar["dur"] / 1e6
        seconds[bar["cat"]] += bar["dur"] / 1e6
        around.append(bar)
    return dict(seconds)


def write(runs: Sequence[Run], path: Path) -> None:
    """Write the page: one HTML file that needs no other."""
    parts = [
        _figure("Loss", "step", [(r.name, _column(r, "step"), _column(r, "loss")) for r in runs]),
        _figure(
            "Tokens per second",
            "step",
            [(r.name, _column(r, "step"), _column(r, "tokens_per_second")) for r in runs],
        ),
        _bars("Seconds of rank 0 by cause", CAUSES, {r.name: r.causes for r in runs if r.causes}),
        _bars("Memory of the fullest rank beside the formula, MB", STATES, _memory(runs)),
        _bars("Traffic of a step, MB sent per rank", COLLECTIVES, _traffic(runs)),
        _table(runs),
    ]
    body = "\n".join(part for part in parts if part)
    path.write_text(
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>hpczero</title>"
        "<style>body{font:15px system-ui,sans-serif;max-width:60em;margin:2em auto}"
        "td,th{text-align:right;padding:.2em .8em}td:first-child,th:first-child{text-align:left}"
        "svg{max-width:100%;height:auto}</style></head>\n"
        f"<body><h1>hpczero: {len(runs)} run{'s' if len(runs) > 1 else ''}</h1>\n{body}\n"
        "</body></html>\n"
    )


def _column(run: Run, name: str) -> list[float]:
    return [getattr(step, name) for step in run.steps]


def _memory(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    rows = {}
    for run in runs:
        fullest = max(run.summary["memory_by_rank"], key=lambda memory: sum(memory.values()))
        rows[run.name] = {state: fullest[state] / 1e6 for state in STATES}
        formula = run.summary["memory_formula"]
        rows[f"{run.name}, formula"] = {state: formula[state] / 1e6 for state in STATES}
    return rows


def _traffic(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    return {
        run.name: {name: row["sent"] / 1e6 for name, row in run.summary["traffic"].items()}
        for run in runs
    }


def _table(runs: Sequence[Run]) -> str:
    heads = ["run", "ranks", "stage", "dtype", "update", "parameters", "loss", "peak PSS, MB"]
    rows = [
        [
            run.name,
            run.summary["ranks"],
            run.summary["stage"],
            run.summary["dtype"],
            run.summary["kernel"],
            f"{run.summary['parameters']:,}",
            f"{run.summary['loss_first']:.4f} to {run.summary['loss_last']:.4f}",
            f"{(run.summary['peak_pss'] or 0) / 1e6:,.0f}",
        ]
        for run in runs
    ]
    lines = ["".join(f"<th>{html.escape(head)}</th>" for head in heads)]
    lines += ["".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _figure(title: str, across: str, lines: Sequence[tuple[str, Sequence[float], Any]]) -> str:
    figure, axes = _axes(title)
    for name, x, y in lines:
        axes.plot(x, y, label=name, linewidth=1.2, marker="." if len(x) < 50 else None)
    axes.set_xlabel(across)
    axes.legend(fontsize=8)
    return _svg(figure)


def _bars(title: str, kinds: Sequence[str], rows: Mapping[str, Mapping[str, float]]) -> str:
    """Return stacked bars, one for each row; nothing without rows."""
    if not rows:
        return ""
    # As high as the bars or their legend.
    figure, axes = _axes(title, height=max(1.0 + 0.35 * len(rows), 0.8 + 0.18 * len(kinds)))
    names, left = list(rows), [0.0] * len(rows)
    for kind in kinds:
        widths = [rows[name].get(kind, 0.0) for name in names]
        axes.barh(names, widths, left=left, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return _svg(figure)


def _axes(title: str, height: float = 3.2) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    drawing = text.getvalue()
    return drawing[drawing.index("<svg") :]
