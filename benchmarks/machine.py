"""What every result says of how it came about: machine, versions, commit, command, date."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIELDS = ("benchmark", "date", "command", "commit", "dirty", "machine", "versions", "rows")
"""What every JSON holds; `rows` has all samples."""

_MPI = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
_MPI += "print(MPI.Get_library_version())"


def dtypes() -> list[str]:
    """Return what is worth timing here: bf16 comes last, where torch multiplies it fast."""
    import torch

    from hpczero.partition.precision import multiplies_fast

    return ["fp32", *(["bf16"] if multiplies_fast(torch.bfloat16) else [])]


def record(benchmark: str, rows: Any, *, launched: int = 1, **content: Any) -> dict[str, Any]:
    """Return a result with all FIELDS; costs a second, for the processes that it asks.

    Args:
        benchmark: the name.
        rows: what was measured.
        launched: ranks that mpiexec started, this one among them; 1 means plain python.
        content: what else was set or found.
    """
    return {
        "benchmark": benchmark,
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "command": command(launched),
        "commit": commit(),
        "dirty": dirty(),
        "machine": machine(),
        "versions": versions(),
        **content,
        "rows": rows,
    }


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def command(ranks: int) -> str:
    """Return the command that started this process, with plain names for the programs."""
    launched = ["mpiexec", "-n", str(ranks)] if ranks > 1 else []
    return shlex.join([*launched, "python", *sys.orig_argv[1:]]).replace(f"{ROOT}/", "")


def machine() -> dict[str, Any]:
    """Describe this node."""
    return {
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "architecture": platform.machine(),
        "kernel": platform.release(),
    }


def cpu() -> str:
    """Return the processor's name, with its family and model: virtual machines shorten names."""
    pairs = [x.split(":", 1) for x in Path("/proc/cpuinfo").read_text().splitlines() if ":" in x]
    found = {name.strip(): value.strip() for name, value in reversed(pairs)}
    if "cpu family" not in found:
        return found.get("model name", "unknown")
    return f"{found['model name']}, family {found['cpu family']} model {found['model']}"


def versions() -> dict[str, str]:
    """Return the versions of Python, of MPI and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in ("torch", "hpczero", "mpi4py", "h5py", "deepspeed"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    # In a process of its own: this one may be a driver, which must not become a rank.
    told = subprocess.run([sys.executable, "-c", _MPI], capture_output=True, text=True)
    lines = told.stdout.splitlines()
    found["mpi"] = " ".join(lines[0].strip(" \0").split()) if lines else "none"
    return found


def commit() -> str:
    """Return the commit that is checked out."""
    return _git("rev-parse", "--short=10", "HEAD")


def dirty() -> bool:
    """Tell whether files differ from the commit, other than results and their page."""
    return bool(_git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs"))


def is_current(result: Path) -> bool:
    """Tell whether a result was measured with the code that is here, on such a processor."""
    if not result.exists():
        return False
    found = json.loads(result.read_text())
    code = ("hpczero", "benchmarks", f":!{RESULTS.relative_to(ROOT)}")
    same = _run_git("diff", "--quiet", found["commit"], "--", *code).returncode == 0
    return same and not found["dirty"] and found["machine"]["cpu"] == cpu()


def _git(*words: str) -> str:
    told = _run_git(*words)
    return told.stdout.strip() if told.returncode == 0 else "unknown"


def _run_git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
