"""What the doctor found, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hpczero.comm.machine import SHM, Launcher, Shm, unranged
from hpczero.comm.probe import Library
from hpczero.infinity.speed import Speed

SEVERITIES = {"ok": 0, "note": 0, "warning": 1, "error": 3}
"""The exit code of each, the worst last; 2 is a usage error's."""

SHM_PER_RANK = 32 << 20  # Open MPI's segment is 16 MiB, MPICH's 1 to 4
SLOW_IMPORT = 30.0  # seconds; from node-local storage it takes 2


@dataclass(frozen=True)
class Problem:
    """Tell what is wrong, and the cure."""

    severity: str
    text: str
    cure: str


@dataclass(frozen=True)
class Rank:
    """Describe what one rank has."""

    rank: int
    host: str
    machine: str
    """Its identity: on one machine MPI may see several nodes."""
    node: int
    """The lowest rank of the node."""
    local_rank: int
    cores: int
    """Usable by this rank."""
    cpus: str
    """Which, as in `0-3,8`."""
    threads: int
    """Of torch, before hpczero shares the cores out."""
    visible_devices: int
    device: str
    """Which of them is this rank's, or "cpu"."""
    start_seconds: float
    """From the start of the process to the doctor: Python, torch, MPI."""
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Hold all that was found; `asdict` is the JSON."""

    world_size: int
    refusal: str
    """Why hpczero won't run here, in the words of its own error; empty if it will."""
    mpi: Library
    launcher: Launcher
    ranks: list[Rank]
    shm: list[Shm]
    torch: dict[str, Any]
    cupy: dict[str, Any]
    h5py: dict[str, Any]
    devices: list[str]
    bandwidth: dict[str, dict[str, float]]
    import_seconds: dict[str, float]
    installed_on: dict[str, str]
    environment: dict[str, str]
    complaints: list[str]
    """What libraries said when they were asked."""
    speeds: list[Speed | None]
    """By rank, of the folder for offloading, if one was asked about."""

    @property
    def nodes(self) -> int:
        """Return the number of nodes, as MPI sees them."""
        return len({rank.node for rank in self.ranks})

    @property
    def machines(self) -> list[list[Rank]]:
        """Return the ranks by machine."""
        groups: dict[str, list[Rank]] = {}
        for rank in self.ranks:
            groups.setdefault(rank.machine, []).append(rank)
        return list(groups.values())


def diagnose(found: Report) -> list[Problem]:
    """Return what is wrong, the worst first."""
    problems = [problem for check in _CHECKS for problem in check(found)]
    return sorted(problems, key=lambda problem: -list(SEVERITIES).index(problem.severity))


def _check_start(found: Report) -> Iterator[Problem]:
    started = found.launcher.ranks or 1
    if found.refusal:
        text, _, cure = found.refusal.partition(". ")
        yield Problem("error", text, cure)
    elif found.world_size == 1 < started:
        yield Problem(
            "error",
            f"the launcher ({found.launcher.name}) started {started} ranks, MPI sees a world of 1",
            "start the ranks with mpiexec or srun: each would train alone",
        )
    elif found.world_size == 1:
        yield Problem(
            "note",
            "one rank: no bandwidth was measured",
            "start the doctor like the job: mpiexec -n 4 hpczero doctor",
        )


def _check_versions(found: Report) -> Iterator[Problem]:
    first = found.ranks[0].versions
    for name in first:
        others = {
            rank.versions[name]: rank for rank in found.ranks if rank.versions[name] != first[name]
        }
        for text, rank in others.items():
            yield Problem(
                "error",
                f"rank 0 has {name} {first[name]}, rank {rank.rank} on {rank.host} has {text}",
                "give all nodes the same environment (PATH, PYTHONPATH, modules, container)",
            )


def _check_cores(found: Report) -> Iterator[Problem]:
    for ranks in found.machines:
        host, size = ranks[0].host, len(ranks)
        cores = len(set().union(*(unranged(rank.cpus) for rank in ranks)))
        if size > cores:
            yield Problem(
                "warning",
                f"{size} ranks share {plural(cores, 'core')} on {host}",
                "start fewer ranks per node, or give each more cores (srun -c, mpiexec --map-by "
                "core, --bind-to none)",
            )
            idle = found.environment.get("OMPI_MCA_mpi_yield_when_idle", "").lower()
            if found.mpi.vendor == "Open MPI" and idle not in ("1", "true", "yes"):
                yield Problem(
                    "warning",
                    f"Open MPI's waiting ranks spin on {host} and take the cores from those that "
                    "compute",
                    "export OMPI_MCA_mpi_yield_when_idle=1",
                )
        threads = found.environment.get("OMP_NUM_THREADS", "")
        if threads.isdigit() and int(threads) > 1 and size * int(threads) > cores:
            yield Problem(
                "warning",
                f"OMP_NUM_THREADS={threads} makes {size * int(threads)} threads on "
                f"{plural(cores, 'core')} of {host}",
                f"export OMP_NUM_THREADS={max(1, cores // size)}, or unset it for hpczero train",
            )


def _check_nodes(found: Report) -> Iterator[Problem]:
    for ranks in found.machines:
        nodes = len({rank.node for rank in ranks})
        if nodes > 1:
            yield Problem(
                "note",
                f"MPI sees {nodes} nodes on the one machine {ranks[0].host}",
                "where that isn't meant (MPIR_CVAR_NUM_CLIQUES, a simulated cluster), start the "
                "ranks by one launcher so that they share memory",
            )


def _check_shm(found: Report) -> Iterator[Problem]:
    for shm in found.shm:
        wanted = SHM_PER_RANK * sum(rank.host == shm.host for rank in found.ranks)
        if shm.free < wanted:
            yield Problem(
                "warning",
                f"{SHM} on {shm.host} has {in_words(shm.free)} free of {in_words(shm.size)}, and "
                f"MPI may want {in_words(wanted)}",
                "docker run --shm-size=8g or --ipc=host, or mount -o remount,size=8g /dev/shm; "
                "remove leftovers",
            )
        if shm.leftovers:
            files = sum(left.files for left in shm.leftovers.values())
            taken = sum(left.bytes for left in shm.leftovers.values())
            owners = ", ".join(sorted({left.owner for left in shm.leftovers.values()}))
            names = " -o ".join(f"-name '{pattern}'" for pattern in shm.leftovers)
            yield Problem(
                "warning" if 10 * taken > shm.size else "note",
                f"{SHM} on {shm.host} holds {in_words(taken)} in {plural(files, 'file')} of dead "
                f"jobs ({owners})",
                f"where no job of yours runs on {shm.host}: "
                f"find {SHM} -user $USER \\( {names} \\) -delete",
            )


def _check_devices(found: Report) -> Iterator[Problem]:
    for complaint in found.complaints:
        yield Problem("warning", f"torch says: {complaint}", "let driver and torch's build agree")
    for ranks in found.machines:
        devices = ranks[0].visible_devices
        if len(ranks) > devices > 1:  # a rank that sees one may have it for itself
            yield Problem(
                "note",
                f"{len(ranks)} ranks share {devices} devices on {ranks[0].host}",
                "start one rank per device",
            )
    if found.devices and found.mpi.gpu.support != "yes":
        yield Problem(
            "note",
            f"MPI takes no pointers to GPU memory, as far as it says ({found.mpi.gpu.decided_by})",
            "data goes through host memory; an MPI built for the GPU (on Cray with "
            "MPICH_GPU_SUPPORT_ENABLED=1) saves the copies",
        )


def _check_precision(found: Report) -> Iterator[Problem]:
    if not found.torch["bf16_is_fast"]:
        yield Problem(
            "note",
            "this CPU has no instructions by which torch multiplies bf16: a step may take 5 to 100 "
            "times as long as in fp32",
            "train in fp32 here, as `hpczero train` does unless told otherwise",
        )


def _check_h5py(found: Report) -> Iterator[Problem]:
    if not found.h5py["installed"]:
        yield Problem("warning", f"h5py doesn't load: {found.h5py['error']}", "pip install h5py")
    elif not found.h5py["parallel"]:
        yield Problem(
            "note",
            "h5py is built without MPI",
            "nothing to do: each rank writes a file of its own",
        )


def _check_folder(found: Report) -> Iterator[Problem]:
    told = [(rank, speed) for rank, speed in enumerate(found.speeds) if speed is not None]
    failed = [(rank, speed) for rank, speed in told if speed.error]
    for rank, speed in failed[:1]:
        others = f", and {len(failed) - 1} more ranks can't" if len(failed) > 1 else ""
        yield Problem(
            "error",
            f"rank {rank} can't offload to {speed.folder}: {speed.error}{others}",
            "give a folder that every rank can write, with room for its part",
        )
    cached = [speed for _, speed in told if not speed.error and not speed.direct]
    if cached:
        yield Problem(
            "note",
            f"{cached[0].folder} takes no direct I/O: what is offloaded passes the system's cache",
            "leave memory for the cache, or take a folder on a local disk",
        )


def _check_import(found: Report) -> Iterator[Problem]:
    slowest = found.import_seconds["slowest"]
    if slowest > SLOW_IMPORT:
        kinds = ", ".join(f"{name} on {kind}" for name, kind in found.installed_on.items())
        yield Problem(
            "warning",
            f"starting took up to {slowest:.0f} s ({kinds})",
            "copy the Python environment to node-local storage when the job starts (sbcast, tar)",
        )


_CHECKS: tuple[Callable[[Report], Iterator[Problem]], ...] = (
    _check_start,
    _check_versions,
    _check_cores,
    _check_nodes,
    _check_shm,
    _check_devices,
    _check_precision,
    _check_h5py,
    _check_folder,
    _check_import,
)


def plural(number: int, noun: str) -> str:
    """Return `1 rank` or `2 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def in_words(number: int) -> str:
    """Return bytes as people read them."""
    return f"{number / 2**20:,.0f} MiB" if number < 2**30 else f"{number / 2**30:,.1f} GiB"
