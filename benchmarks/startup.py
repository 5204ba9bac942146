"""Time the start of a program: imports, the files they open, and the way to the first step's end.

    python -m benchmarks.startup --out startup.json

Imports run in fresh processes that take turns, with the files in the page cache. Files are those
that Python opens (its audit event `open`); where strace is installed, also every open, stat and
readlink of the process: what a parallel file system would have to answer on every rank.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.jobs import Job, Setting

IMPORTS = {
    "python": "pass",
    "torch": "import torch",
    "torch.distributed": "import torch, torch.distributed",
    "torch.distributed, with FSDP2": "import torch, torch.distributed.fsdp",
    "mpi4py": "from mpi4py import MPI",
    "hpczero": "import hpczero",
    "DeepSpeed": "import deepspeed",
}
FIRST_STEPS = ("floor", "DDP", "FSDP2, resharded", "DeepSpeed 3", "hpczero 3")

_CHILD = """
import json, sys, time
opened = 0
def count(event, args):
    global opened
    opened += event == "open"
sys.addaudithook(count)
start = time.perf_counter()
{statement}
seconds = time.perf_counter() - start
print("\\n" + json.dumps([seconds, opened, len(sys.modules)]))
"""


def importing(statement: str) -> tuple[float, int, int]:
    """Return the seconds, the files opened and the modules loaded in a fresh process."""
    code = _CHILD.format(statement=statement)
    told = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=machine.ROOT
    )
    seconds, opened, modules = json.loads(told.stdout.splitlines()[-1])
    return seconds, opened, modules


def system_calls(statement: str) -> int | None:
    """Return how often a fresh process asks the file system for a path; None without strace."""
    if shutil.which("strace") is None:
        return None
    with tempfile.NamedTemporaryFile() as log:
        subprocess.run(
            ["strace", "-f", "-e", "trace=%file", "-o", log.name, sys.executable, "-c", statement],
            check=True,
            capture_output=True,
            cwd=machine.ROOT,
        )
        return len(Path(log.name).read_text().splitlines())


def main() -> None:
    """Run the benchmark; starts the jobs itself."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    statements = {
        name: text for name, text in IMPORTS.items() if name != "DeepSpeed" or has_deepspeed
    }
    names = [name for name in FIRST_STEPS if not name.startswith("DeepSpeed") or has_deepspeed]

    samples: dict[str, list[tuple[float, int, int]]] = {name: [] for name in statements}
    for number in range(1 + args.rounds):
        for name, statement in statements.items():
            taken = importing(statement)
            if number:  # the first fills the page cache and writes bytecode
                samples[name].append(taken)
    imports: dict[str, Any] = {}
    for name, each in samples.items():
        seconds = [one[0] for one in each]
        imports[name] = {
            "median": statistics.median(seconds),
            "files_opened": each[0][1],
            "modules": each[0][2],
            "system_calls": system_calls(statements[name]),
            "seconds": seconds,
        }
        row = imports[name]
        print(
            f"import {name:32}{row['median']:7.3f} s  {row['files_opened']:6} files"
            f"  {row['system_calls']} calls",
            flush=True,
        )
    setting = Setting.of(args.model, "fp32", 1, args.ranks)
    launches: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.launches):
        for name in names:
            with Job(name, setting) as job:
                launches[name].append(job.step()["since_launch"])
    first_steps = {
        name: {"median": statistics.median(taken), "seconds": taken}
        for name, taken in launches.items()
    }
    for name, first in first_steps.items():
        print(f"first step of {name:25}{first['median']:7.3f} s", flush=True)
    if args.out:
        result = machine.record(
            "startup",
            {"imports": imports, "first_steps": first_steps},
            model=args.model,
            ranks=args.ranks,
            threads_per_rank=setting.threads,
        )
        machine.write(args.out, result)


if __name__ == "__main__":
    main()
