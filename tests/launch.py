"""Start a job of several ranks from a test."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What a launcher tells its ranks; a launcher started by a rank must not inherit it.
LAUNCHED = ("PMI", "PMIX", "PRTE", "OMPI", "HYD", "MPI_LOCAL")

SETTINGS = {
    # Open MPI: run as root in a container, and with more ranks than cores.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


# Else DeepSpeed compiles an all-reduce in shared memory when it starts, under a lock that a killed
# process leaves behind for ever: that takes a compiler and half a minute. Without it gloo reduces.
_COMPILE_NOTHING = """
import os, runpy, sys, deepspeed.ops
deepspeed.ops.__compatible_ops__ = {}
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Job:
    """A finished job: what a CompletedProcess tells."""

    args: list[str]
    returncode: int
    stdout: str  # of all ranks and of the launcher, stderr included


def mpiexec(n: int, *argv: str, timeout: float = 60, env: Mapping[str, str] | None = None) -> Job:
    """Run `mpiexec -n N python ARGV` and wait for its end.

    Takes the launcher beside this Python (a wheel's) before the one on PATH.

    Raises:
        TimeoutError: it still ran after `timeout` seconds; it's killed, and its output shown.
    """
    args = [launcher(), "-n", str(n), sys.executable, *argv]
    process = subprocess.Popen(
        args,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment(env or {}),
        start_new_session=True,
    )
    try:
        stdout, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end_tree(process.pid)
        stdout, _ = process.communicate()
        raise TimeoutError(
            f"{' '.join(args)} did not end within {timeout:g} s; its output:\n{stdout}"
        ) from None
    except BaseException:
        end_tree(process.pid)
        raise
    return Job(args, process.returncode, stdout)


def deepspeed_python() -> str | None:
    """Return a Python that has DeepSpeed: HPCZERO_TEST_DEEPSPEED, else this one if it has."""
    here = sys.executable if importlib.util.find_spec("deepspeed") else None
    return os.environ.get("HPCZERO_TEST_DEEPSPEED") or here


needs_deepspeed = pytest.mark.skipif(
    deepspeed_python() is None,
    reason="needs DeepSpeed: pip install '.[bench]', or HPCZERO_TEST_DEEPSPEED=PYTHON",
)


def deepspeed(ranks: int, script: Path, *argv: str, log: Path, timeout: float = 300) -> None:
    """Run a script that imports DeepSpeed on some ranks, as its launcher would.

    Raises:
        AssertionError: a rank failed; shows what all printed, which `log` keeps.
    """
    python = deepspeed_python()
    assert python is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # Only the tests' own modules: this Python's packages may be of another version than that one's.
    world |= {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT / "tests"), "BACKEND": "deepspeed"}
    with log.open("w") as output:  # a file: a full pipe would stop one rank while another waits
        processes = [
            subprocess.Popen(
                [python, "-c", _COMPILE_NOTHING, str(script), *argv],
                env=environment({"RANK": str(rank), "LOCAL_RANK": str(rank)}) | world,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank in range(ranks)
        ]
        try:
            codes = [process.wait(timeout=timeout) for process in processes]
        finally:
            for process in processes:
                end_tree(process.pid)
                process.wait()
    assert codes == [0] * ranks, log.read_text()[-8000:]


def launcher() -> str:
    """Return the path of mpiexec.

    Raises:
        FileNotFoundError: there is none beside this Python or on PATH.
    """
    beside = os.path.dirname(sys.executable)  # noqa: PTH120 - a venv's python is a link: don't follow
    found = shutil.which("mpiexec", path=beside) or shutil.which("mpiexec")
    if found is None:
        raise FileNotFoundError("no mpiexec: install MPI, or pip install 'hpczero[mpich]'")
    return found


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a new job, free of what an outer launcher set for this process."""
    mine = dict(os.environ)
    if any(name in mine for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")):
        mine = {name: value for name, value in mine.items() if not name.startswith(LAUNCHED)}
    paths = [str(ROOT), *filter(None, [mine.get("PYTHONPATH")])]
    return {**mine, "PYTHONPATH": os.pathsep.join(paths), **SETTINGS, **extra}


def end_tree(pid: int) -> None:
    """Kill a process and all its descendants: launchers give their ranks sessions of their own."""
    pids = [pid]
    for parent in pids:
        pids.extend(_children(parent))
    for child in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Tell whether a process still runs; a zombie that nobody waits for doesn't."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def _children(parent: int) -> list[int]:
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if (fields := _stat(pid)) and int(fields[1]) == parent]


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return []
