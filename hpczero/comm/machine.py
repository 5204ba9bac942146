"""Look at the machine as the operating system shows it: launcher, shared memory, cores, disks."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

SHM = Path("/dev/shm")

_LEFTOVERS = {
    "mpich_shm_*": "MPICH",
    "sm_segment.*": "Open MPI",
    "vader_segment.*": "Open MPI",
    "psm2_shm.*": "Omni-Path",
    "Intel_MPI_*": "Intel MPI",
}
# Who started this rank: the variable that only this launcher sets, and where it says of how many.
_LAUNCHERS = (
    ("Open MPI's mpiexec", "PRTE_LAUNCHED", "OMPI_COMM_WORLD_SIZE"),
    ("Open MPI's mpiexec", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("MVAPICH's launcher", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
    ("PALS (Cray)", "PALS_RANKID", "PALS_SIZE"),
    ("hydra (mpiexec of MPICH or Intel)", "HYDI_CONTROL_FD", "PMI_SIZE"),
    ("hydra (mpiexec of MPICH or Intel)", "MPI_LOCALNRANKS", "PMI_SIZE"),
    ("srun", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
    ("torchrun", "TORCHELASTIC_RUN_ID", "WORLD_SIZE"),
    ("unknown, by PMIx", "PMIX_RANK", "PMIX_SIZE"),
    ("unknown, by PMI", "PMI_RANK", "PMI_SIZE"),
)
_ALLOCATIONS = {
    "SLURM_JOB_ID": "Slurm",
    "PBS_JOBID": "PBS",
    "LSB_JOBID": "LSF",
    "COBALT_JOBID": "Cobalt",
}


@dataclass(frozen=True)
class Leftovers:
    """Count files of dead jobs of this user."""

    owner: str
    files: int
    bytes: int


@dataclass(frozen=True)
class Shm:
    """Describe the shared memory of a node."""

    host: str
    size: int
    free: int
    leftovers: dict[str, Leftovers] = field(default_factory=dict)
    """By the pattern of their names."""


@dataclass(frozen=True)
class Launcher:
    """Say who started this process, going by its environment."""

    name: str
    ranks: int | None
    allocation: str


def launcher(environ: Mapping[str, str]) -> Launcher:
    """Return who started this process, as its environment tells."""
    allocations = [
        f"{kind} job {environ[name]}" for name, kind in _ALLOCATIONS.items() if name in environ
    ]
    allocation = ", ".join(allocations) or "none"
    for name, mark, size in _LAUNCHERS:
        if mark in environ:
            count = environ.get(size, "")
            return Launcher(name, int(count) if count.isdigit() else None, allocation)
    return Launcher("none", None, allocation)


def shared_memory(folder: Path = SHM, processes: Path = Path("/proc")) -> Shm:
    """Describe a node's shared memory.

    A leftover belongs to this user, is mapped into no process that can be seen, and is older than a
    minute.
    """
    try:
        space = os.statvfs(folder)
        files = list(folder.iterdir())
    except OSError:
        return Shm(socket.gethostname(), 0, 0)
    candidates: dict[str, list[Path]] = {}
    for path in files:
        for pattern in _LEFTOVERS:
            if fnmatch(path.name, pattern):
                candidates.setdefault(pattern, []).append(path)
    used = _mapped(folder, processes) if candidates else set()
    leftovers = {}
    for pattern, paths in candidates.items():
        sizes = [size for path in paths if (size := _leftover(path, used)) is not None]
        if sizes:
            leftovers[pattern] = Leftovers(_LEFTOVERS[pattern], len(sizes), sum(sizes))
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    return Shm(socket.gethostname(), size, free, leftovers)


def _leftover(path: Path, used: set[str]) -> int | None:
    """Return the bytes that a dead job's file takes, None if it isn't one."""
    try:
        status = path.stat()
    except OSError:  # gone meanwhile
        return None
    alive = str(path) in used or status.st_uid != os.getuid() or status.st_mtime > time.time() - 60
    return None if alive else 512 * status.st_blocks


def _mapped(folder: Path, processes: Path) -> set[str]:
    """Return the files of a folder that some process has mapped."""
    used = set()
    for maps in processes.glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:  # another user's, or gone
            continue
        used |= {line.split(maxsplit=5)[-1] for line in lines if f" {folder}/" in line}
    return used


def filesystem(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the type of the file system that holds a path, such as nfs4, lustre or ext4."""
    kinds = {}
    for line in mounts.read_text().splitlines():
        _, point, kind, *_ = line.split()
        kinds[Path(point.replace("\\040", " "))] = kind  # a later mount hides an earlier one
    return next((kinds[parent] for parent in path.resolve().parents if parent in kinds), "unknown")


def ranges(numbers: Iterable[int]) -> str:
    """Return `0-2,5` for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def unranged(text: str) -> set[int]:
    """Return 0, 1, 2, 5 for `0-2,5`."""
    found: set[int] = set()
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def identity() -> str:
    """Return what only processes on this machine have: containers may share or change hostnames."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_age() -> float:
    """Return the seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
