"""What a training run tells: a line per step, a summary, a table at the end."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import hpczero
from hpczero import sizing
from hpczero.engine import Engine

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

STATES = ("params", "grads", "states", "buffers")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


class Step(NamedTuple):
    """Describe a step as a line of metrics.jsonl does."""

    step: int  # from 1
    loss: float  # mean over ranks and micro-steps
    lr: float
    grad_norm: float  # before clipping
    skipped: bool
    step_seconds: float
    tokens_per_second: float  # of all ranks


class Journal:
    """Write metrics.jsonl and show how far the run is: a bar on a terminal, lines elsewhere.

    Args:
        out: the folder for the file; made if missing.
        steps: of the whole run.
        progress: False shows nothing.
        active: on rank 0 only; elsewhere every method does nothing.
    """

    def __init__(self, out: Path, steps: int, progress: bool, *, active: bool) -> None:
        self.out = out
        self.steps = steps
        self.progress = progress
        self.active = active
        self.every = max(1, steps // 20)  # lines: enough to see the loss fall, few enough for a log
        self.file: IO[str] | None = None
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.stack = ExitStack()

    def __enter__(self) -> Journal:
        if self.active:
            self.out.mkdir(parents=True, exist_ok=True)
            self.file = self.stack.enter_context((self.out / "metrics.jsonl").open("w"))
            if self.progress and _on_terminal():
                self.bar = self.stack.enter_context(_bar())
                self.task = self.bar.add_task("", total=self.steps)
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
        if self.file is None:
            return
        self.file.write(to_json(step._asdict()) + "\n")
        self.file.flush()
        text = f"loss {step.loss:.4f}  lr {step.lr:.2e}  {step.tokens_per_second:,.0f} tokens/s"
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, advance=1, description=text)
        elif self.progress and (step.step % self.every == 0 or step.step in (1, self.steps)):
            print(f"step {step.step:>{len(str(self.steps))}}/{self.steps}  {text}", flush=True)


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


def summarise(engine: Engine, out: Path, losses: list[float], pss: PeakPss) -> None:
    """Write summary.json and print the closing table, on rank 0; all ranks call."""
    mine = {"memory": {key: engine.memory()[key] for key in STATES}, "pss": pss.peak}
    ranks = engine.world.gather_objects(mine)
    if ranks is None:
        return
    summary = _summary(engine, losses, ranks)
    # By rename, so that whoever waits for the file never reads half of it.
    part = out / "summary.json.part"
    part.write_text(to_json(summary, indent=2) + "\n")
    part.replace(out / "summary.json")
    _print_tables(summary, _formula(engine, stage=0))


def _summary(engine: Engine, losses: list[float], ranks: list[dict[str, Any]]) -> dict[str, Any]:
    stage = engine.config.zero_optimization.stage
    peaks = [rank["pss"] for rank in ranks]
    traffic = engine.traffic()["by_collective"]
    return {
        "parameters": engine.parameters_count,
        "ranks": engine.world_size,
        "nodes": engine.world.nodes,
        "stage": stage,
        "dtype": "bf16" if engine.config.bf16.enabled else "fp32",
        "memory": ranks[0]["memory"],
        "memory_by_rank": [rank["memory"] for rank in ranks],
        "memory_formula": _formula(engine, stage),
        "traffic": {name: traffic[name] for name in COLLECTIVES},
        "peak_pss": max((peak for peak in peaks if peak is not None), default=None),
        "peak_pss_by_rank": peaks,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "versions": {
            "python": platform.python_version(),
            "hpczero": hpczero.__version__,
            **{name: version(name) for name in ("torch", "mpi4py", "numpy")},
            "mpi": engine.world.library,
        },
    }


def _formula(engine: Engine, stage: int) -> dict[str, int]:
    accumulation = engine.config.accumulation
    return sizing.memory_formula(engine.bucket_shapes(), stage, engine.world_size, accumulation)


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


def _print_tables(summary: dict[str, Any], plain: dict[str, int]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(force_terminal=_on_terminal(), highlight=False)
    largest = max(summary["memory_by_rank"], key=lambda memory: sum(memory.values()))
    memory = Table("MB", title=f"Memory of the fullest of {summary['ranks']} ranks")
    columns = {
        f"stage {summary['stage']}, measured": largest,
        "formula": summary["memory_formula"],
        "plain data parallel": plain,
    }
    for name in columns:
        memory.add_column(name, justify="right")
    for state in STATES:
        memory.add_row(state, *(_megabytes(column[state]) for column in columns.values()))
    memory.add_section()
    memory.add_row("all", *(_megabytes(sum(column.values())) for column in columns.values()))
    console.print(memory)

    traffic = Table("per step", title="Traffic in multiples of the model")
    for name in ("calls", "multiples", "MB", "MB sent"):
        traffic.add_column(name, justify="right")
    total = 0.0
    for name, row in summary["traffic"].items():
        total += row["multiples"]
        sizes = (_megabytes(row["bytes"]), _megabytes(row["sent"]))
        traffic.add_row(name, str(row["calls"]), f"{row['multiples']:.2f}", *sizes)
    traffic.add_section()
    traffic.add_row("all", "", f"{total:.2f}")
    console.print(traffic)
    first, last = summary["loss_first"], summary["loss_last"]
    peak = summary["peak_pss"]
    pss = "" if peak is None else f", peak PSS {_megabytes(peak)} MB per rank"
    console.print(f"{summary['parameters']:,} parameters, loss {first:.4f} -> {last:.4f}{pss}")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f}"
