"""All benchmarks: what runs, on how many ranks, and which result it writes.

To add one: an entry here, a table in page.py, and a marker in docs/results.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders import FLOOR, OFFLOADED
from benchmarks.jobs import launcher


@dataclass(frozen=True)
class Benchmark:
    """Describe a run that writes one result."""

    name: str
    """Of the result: results/NAME.json."""
    module: str
    arguments: tuple[str, ...] = ()
    ranks: int = 0
    """Of mpiexec; 0 starts plain python, which may start jobs itself."""
    quick: tuple[str, ...] = ()
    """Arguments that override others, for a run of seconds that proves nothing but that it runs."""
    minutes: float = 1
    """How long it takes on two cores, about."""

    def command(self, out: Path, *, quick: bool = False) -> list[str]:
        """Return the command line that writes the result to `out`."""
        launched = [launcher(), "-n", str(self.ranks)] if self.ranks else []
        argv = [sys.executable, "-m", f"benchmarks.{self.module}", *self.arguments]
        return [*launched, *argv, *(self.quick if quick else ()), "--out", str(out)]


def _step(model: str, dtype: str, batch: int, steps: int, minutes: float) -> Benchmark:
    """Describe timed steps of each contender, which take turns: more of them if they are short."""
    quick = ["--model", "tiny", "--batch", "1", "--steps", "2", "--rounds", "1", "--warmup", "1"]
    if model != "small":  # once per precision is enough for all of them
        quick += ["--contenders", "floor", "FSDP2, resharded", "hpczero 3"]
    return Benchmark(
        f"step-{model}-{dtype}",
        "step",
        (
            *("--model", model, "--dtype", dtype, "--batch", str(batch)),
            *("--rounds", "1", "--steps", str(steps)),
        ),
        quick=tuple(quick),
        minutes=minutes,
    )


def _collectives(ranks: int, minutes: float) -> Benchmark:
    quick = ("--megabytes", "1", "4", "--rounds", "2")
    return Benchmark(f"collectives-{ranks}", "collectives", (), ranks, quick, minutes)


def _scaling(ranks: int) -> Benchmark:
    quick = ("--model", "tiny", "--steps", "2", "--warmup", "1")
    return Benchmark(f"scaling-{ranks}", "scaling", ("run",), ranks, quick, 1)


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        _step("small", "fp32", batch=4, steps=25, minutes=15),
        _step("small", "bf16", batch=4, steps=25, minutes=12),
        _step("medium", "fp32", batch=2, steps=10, minutes=20),
        _step("medium", "bf16", batch=1, steps=10, minutes=15),
        Benchmark(
            "step-files",
            "step",
            (
                *("--model", "medium", "--dtype", "bf16", "--batch", "4", "--rounds", "1"),
                *("--steps", "10", "--contenders", FLOOR, *OFFLOADED),
            ),
            quick=(
                *("--model", "tiny", "--batch", "1", "--steps", "2", "--warmup", "1"),
                *("--contenders", FLOOR, "hpczero 3, all in files"),
            ),
            minutes=10,
        ),
        _collectives(2, minutes=2),
        _collectives(4, minutes=5),
        _scaling(1),
        _scaling(2),
        _scaling(4),
        Benchmark("startup", "startup", quick=("--rounds", "1", "--launches", "1"), minutes=6),
        Benchmark("adam", "adam", quick=("--count", "1000000", "--rounds", "2"), minutes=0.5),
        Benchmark(
            "slow_network",
            "slow_network",
            ("--rounds", "3", "--steps", "10"),
            quick=("--model", "tiny", "--rounds", "1", "--steps", "2", "--contenders", "hpczero"),
            minutes=13,
        ),
        Benchmark(
            "slow_network-apart",
            "slow_network",
            (
                *("--ranks", "1", "--batch", "6", "--rounds", "2", "--steps", "10"),
                *("--contenders", FLOOR, "FSDP2", "hpczero"),
            ),
            quick=(
                *("--model", "tiny", "--rounds", "1", "--steps", "2"),
                *("--contenders", FLOOR, "hpczero"),
            ),
            minutes=5,
        ),
        Benchmark("delayed", "delayed", quick=("--steps", "3"), minutes=2),
        Benchmark(
            "tiers",
            "tiers",
            ranks=2,
            quick=("--mebibytes", "64", "--rounds", "2", "--quick"),
            minutes=3,
        ),
        Benchmark(
            "capacity",
            "capacity",
            quick=(
                *("--shape", "64x2x32", "--mebibytes", "400", "--most", "8"),
                *("--contenders", "DDP", "hpczero 3, all in files"),
            ),
            minutes=20,
        ),
        Benchmark("equal", "equal", quick=("--layers", "2", "--shape", "64x2x32"), minutes=3),
        Benchmark(
            "checkpoint",
            "checkpoint",
            ranks=2,
            quick=("--model", "tiny", "--rounds", "1"),
            minutes=2,
        ),
    )
}
