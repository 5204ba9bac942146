"""What a training run tells: a line per step, a summary, a table at the end."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

import hpczero
from hpczero import sizing
from hpczero.comm.timeline import hidden
from hpczero.engine import Engine

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

STATES = ("params", "grads", "states", "buffers")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
MOVES = {
    "read": "read from files",
    "written": "written to files",
    "to_host": "to the host",
    "from_host": "from the host",
}
"""What the keys of `Engine.io` are called in tables."""


class Step(NamedTuple):
    """Describe a step as a line of metrics.jsonl does."""

    step: int  # from 1
    loss: float  # mean over ranks and micro-steps
    lr: float
    grad_norm: float  # before clipping
    skipped: bool
    step_seconds: float
    tokens_per_second: float  # of all ranks
    waited: Mapping[str, float] = {}  # seconds that rank 0's program waited, by what for
    carried: Mapping[str, float] = {}  # seconds of its couriers, meanwhile: see `Times`


class Journal:
    """Write metrics.jsonl and show how far the run is: a bar on a terminal, lines elsewhere.

    Args:
        out: the folder for the file; made if missing.
        steps: of the whole run.
        progress: False shows nothing.
        active: on rank 0 only; elsewhere every method does nothing.
        done: steps before this run, whose lines stay.
    """

    def __init__(
        self, out: Path, steps: int, progress: bool, *, active: bool, done: int = 0
    ) -> None:
        self.out = out
        self.steps = steps
        self.progress = progress
        self.active = active
        self.done = done
        self.history: list[Step] = []
        """Steps written so far, those before this run too."""
        self.every = max(1, steps // 20)  # lines: enough to see the loss fall, few enough for a log
        self.file: IO[str] | None = None
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.stack = ExitStack()

    def __enter__(self) -> Journal:
        if self.active:
            self.out.mkdir(parents=True, exist_ok=True)
            path = self.out / "metrics.jsonl"
            if self.done and path.exists():
                self.history = [step for step in read_steps(path) if step.step <= self.done]
            part = path.with_suffix(".part")  # renamed, so that no history is lost on the way
            part.write_text("".join(to_json(step._asdict()) + "\n" for step in self.history))
            part.replace(path)
            self.file = self.stack.enter_context(path.open("a"))
            if self.progress and _on_terminal():
                self.bar = self.stack.enter_context(_bar())
                self.task = self.bar.add_task("", total=self.steps, completed=self.done)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stack.close()

    def write(self, step: Step) -> None:
        """Write a step's line, readable by others at once, and show it."""
        self.history.append(step)
        if self.file is None:
            return
        self.file.write(to_json(step._asdict()) + "\n")
        self.file.flush()
        text = f"loss {step.loss:.4f}  lr {step.lr:.2e}  {step.tokens_per_second:,.0f} tokens/s"
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, advance=1, description=text)
        elif self.progress and (step.step % self.every == 0 or step.step in (1, self.steps)):
            print(f"step {step.step:>{len(str(self.steps))}}/{self.steps}  {text}", flush=True)


def read_steps(path: Path) -> list[Step]:
    """Return the steps of a metrics.jsonl.

    Raises:
        OSError: there is none.
        ValueError, TypeError: it isn't as a Journal writes it.
    """
    # The last line of a killed run may be half; it is then of a step that wasn't saved.
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")
    ]
    return [Step(**{**line, **_nan(line)}) for line in lines]


def _nan(line: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers that JSON couldn't write."""
    return {key: math.nan for key, value in line.items() if value is None}


class PeakPss:
    """Keep the largest PSS sample of this process.

    PSS counts a page that k processes share as a k-th. A sample takes a millisecond and about six
    more per GiB, since the kernel walks the page tables; so after the first three steps only every
    tenth is sampled.
    """

    def __init__(self) -> None:
        self.peak: int | None = None

    def sample(self, step: int) -> None:
        """Take a sample if this step is one of those sampled."""
        if step < 3 or step % 10 == 0:
            pss = current_pss()
            if pss is not None:
                self.peak = max(pss, self.peak or 0)


def current_pss() -> int | None:
    """Return this process's proportional set size in bytes, None where the kernel doesn't tell."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def to_json(value: Any, indent: int | None = None) -> str:
    """Return strict JSON: numbers that it can't write (nan, infinity) become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def summarise(engine: Engine, out: Path, steps: Sequence[Step], pss: PeakPss, new: int) -> None:
    """Write summary.json and print the closing table, on rank 0; all ranks call.

    Args:
        engine: that trained.
        out: the folder of the run.
        steps: of the whole run.
        pss: of this rank.
        new: how many of the steps this engine did.
    """
    memory = engine.memory()
    mine = {
        "memory": {key: memory[key] for key in STATES},
        "tier": memory["tier"],
        "io": {way: nbytes / new for way, nbytes in engine.io().items()},
        "pss": pss.peak,
    }
    ranks = engine.world.gather_objects(mine)
    if ranks is None:
        return
    summary = _summary(engine, steps, ranks)
    # By rename, so that whoever waits for the file never reads half of it.
    part = out / "summary.json.part"
    part.write_text(to_json(summary, indent=2) + "\n")
    part.replace(out / "summary.json")
    plain = sizing.memory_formula(
        engine.bucket_shapes(), 0, engine.world_size, engine.config.accumulation
    )
    _print_tables(summary, plain)


def _summary(engine: Engine, steps: Sequence[Step], ranks: list[dict[str, Any]]) -> dict[str, Any]:
    stage = engine.config.zero_optimization.stage
    formula = engine.memory_formula()
    peaks = [rank["pss"] for rank in ranks]
    traffic = engine.traffic()["by_collective"]
    return {
        "parameters": engine.parameters_count,
        "ranks": engine.world_size,
        "nodes": engine.world.nodes,
        "stage": stage,
        "dtype": engine.config.compute,
        "kernel": engine.kernel,
        "memory": ranks[0]["memory"],
        "memory_by_rank": [rank["memory"] for rank in ranks],
        "memory_formula": {key: formula[key] for key in STATES},
        "memory_by_tier": ranks[0]["tier"],
        "memory_formula_by_tier": formula["tier"],
        "io": ranks[0]["io"],
        "io_minimum": engine.io_minimum(),
        "further_units": engine.further_units,
        "traffic": {name: traffic[name] for name in COLLECTIVES},
        "peak_pss": max((peak for peak in peaks if peak is not None), default=None),
        "peak_pss_by_rank": peaks,
        "seconds": _seconds(steps),
        "loss_first": steps[0].loss,
        "loss_last": steps[-1].loss,
        "versions": {
            "python": platform.python_version(),
            "hpczero": hpczero.__version__,
            **{name: version(name) for name in ("torch", "mpi4py", "numpy")},
            "mpi": engine.world.library,
        },
    }


def _seconds(steps: Sequence[Step]) -> dict[str, Any]:
    """Return the mean seconds of rank 0's steps by cause; the first step is left out."""
    counted = [step for step in steps[1:] or steps if step.waited]
    if not counted:
        return {}

    def means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {key: statistics.fmean(row[key] for row in rows) for key in rows[0]}

    waited = means([step.waited for step in counted])
    carried = means([step.carried for step in counted])
    return {
        "step": statistics.fmean(step.step_seconds for step in counted),
        "waited": waited,
        "carried": carried,
        "gathers_hidden": hidden(waited, carried),
    }


def draw(path: Path, steps: Sequence[Step]) -> None:
    """Draw loss and learning rate over the steps; without matplotlib, say so in a line."""
    try:
        # Not pyplot: no global state, and no window system is looked for.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        print(f"no {path.name}: {error} (pip install matplotlib)", flush=True)
        return
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    loss, lr = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    numbers = [step.step for step in steps]
    style: dict[str, Any] = {"linewidth": 1.2, "marker": "." if len(steps) < 50 else None}
    loss.plot(numbers, [step.loss for step in steps], color="tab:blue", **style)
    lr.plot(numbers, [step.lr for step in steps], color="tab:gray", **style)
    lr.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useOffset=False)
    lr.xaxis.get_major_locator().set_params(integer=True)
    lr.set_ylim(bottom=0)
    loss.set_ylabel("loss")
    lr.set_ylabel("learning rate")
    lr.set_xlabel("step")
    for axes in (loss, lr):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


# ---- shown on rank 0; rich loads here, when first used


def _on_terminal() -> bool:
    # Open MPI gives each rank a pseudo-terminal: without a real one behind it, it has no columns.
    return sys.stdout.isatty() and os.get_terminal_size(sys.stdout.fileno()).columns > 0


def _bar() -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )


@contextmanager
def byte_progress(what: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show on a terminal how many bytes of all are done, as the function given is told."""
    if quiet or not _on_terminal():
        yield lambda done, total: None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str] | None],
    *,
    justify: Literal["left", "right"] = "right",
    wrap: bool = True,
) -> None:
    """Print a table; `justify` is of all columns but the first, and a row None draws a line.

    `wrap=False` lets lines be as long as they need, where they go to no terminal.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    table.add_column(columns[0], overflow="fold")
    for name in columns[1:]:
        table.add_column(name, justify=justify, overflow="fold")
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*map(Text, row))
    terminal = _on_terminal()
    width = None if terminal or wrap else 10_000
    Console(force_terminal=terminal, highlight=False, width=width).print(table)


def _print_tables(summary: dict[str, Any], plain: dict[str, int]) -> None:
    largest = max(summary["memory_by_rank"], key=lambda memory: sum(memory.values()))
    columns = {
        f"stage {summary['stage']}, measured": largest,
        "formula": summary["memory_formula"],
        "plain data parallel": plain,
    }
    show_table(
        f"Memory of the fullest of {summary['ranks']} ranks",
        ["MB", *columns],
        [
            *(
                (state, *(_megabytes(column[state]) for column in columns.values()))
                for state in STATES
            ),
            None,
            ("all", *(_megabytes(sum(column.values())) for column in columns.values())),
        ],
    )
    _print_tiers(summary)
    traffic = summary["traffic"]
    total = sum(row["multiples"] for row in traffic.values())
    show_table(
        "Traffic in multiples of the model",
        ["per step", "calls", "multiples", "MB", "MB sent"],
        [
            *(
                (
                    name,
                    str(row["calls"]),
                    f"{row['multiples']:.2f}",
                    _megabytes(row["bytes"]),
                    _megabytes(row["sent"]),
                )
                for name, row in traffic.items()
            ),
            None,
            ("all", "", f"{total:.2f}", "", ""),
        ],
    )
    _print_seconds(summary["seconds"])
    first, last = summary["loss_first"], summary["loss_last"]
    peak = summary["peak_pss"]
    pss = "" if peak is None else f", peak PSS {_megabytes(peak)} MB per rank"
    print(f"{summary['parameters']:,} parameters, loss {first:.4f} -> {last:.4f}{pss}", flush=True)


def _print_tiers(summary: dict[str, Any]) -> None:
    """Show what rank 0 keeps where, if anything is off the device."""
    measured, formula = summary["memory_by_tier"], summary["memory_formula_by_tier"]
    used = [tier for tier in measured if any(measured[tier].values())]
    if used == ["device"]:
        return
    show_table(
        "States of rank 0 by tier",
        ["MB", *(text for tier in used for text in (tier, "formula"))],
        [
            (
                state,
                *(_megabytes(each[tier][state]) for tier in used for each in (measured, formula)),
            )
            for state in STATES[:-1]
        ],
    )
    ways = {way: nbytes for way, nbytes in summary["io_minimum"].items() if nbytes}
    if ways:
        show_table(
            "Moved by rank 0, a step",
            ["MB", "measured", "minimum"],
            [
                (MOVES[way], _megabytes(summary["io"][way]), _megabytes(least))
                for way, least in ways.items()
            ],
        )


def _print_seconds(seconds: dict[str, Any]) -> None:
    if not seconds:
        return
    waited, step = seconds["waited"], seconds["step"]

    def row(name: str, spent: float) -> tuple[str, str, str]:
        return name, f"{spent:.4f}", f"{spent / step:.1%}"

    part = seconds["gathers_hidden"]
    title = "Time of a step on rank 0"
    show_table(
        title if part is None else f"{title}; {part:.0%} of the gathers' time hidden",
        ["", "seconds", "of the step"],
        [
            *(row(f"waiting for {what}", spent) for what, spent in waited.items()),
            row("all else", step - sum(waited.values())),
            None,
            row("step", step),
            None,
            *(row(_CARRIED[what], spent) for what, spent in seconds["carried"].items()),
        ],
    )


_CARRIED = {
    "gather": "meanwhile: gathers",
    "reduce": "meanwhile: reductions",
    "ranks": "meanwhile: for others to come",
}


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f}"
