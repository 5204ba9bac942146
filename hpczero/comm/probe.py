"""Look at the MPI that is loaded: what it is, what it can do, how fast it carries."""

from __future__ import annotations

import ctypes
import os
import statistics
import struct
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from hpczero.comm.wire import Cargo
from hpczero.comm.world import World

BYTES = 16 << 20
REPEATS = 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}
_QUERIES = ("cuda", "rocm", "hip", "ze")  # MPIX_Query_<kind>_support
_KINDS = ("CUDA", "ZE", "HIP")  # MPIX_GPU_query_support's, by number
# With these an MPI that was built for GPUs serves them; they prove nothing about how it was built.
_LEADS = (
    "MPICH_GPU_SUPPORT_ENABLED",  # Cray
    "MV2_USE_CUDA",
    "OMPI_MCA_opal_cuda_support",
    "MPIR_CVAR_ENABLE_GPU",
    "I_MPI_OFFLOAD",
)
_OFF = ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Gpu:
    """Say whether MPI takes pointers to GPU memory."""

    support: str
    """"yes" (MPI says so), "maybe" (only the environment asks for it) or "no"."""
    decided_by: str
    answers: dict[str, str]
    """Everything that was asked, and the answer."""


@dataclass(frozen=True)
class Library:
    """Describe the MPI library of this process."""

    vendor: str
    version: str
    description: str
    standard: str
    thread_level: str
    paths: list[str]
    gpu: Gpu


@dataclass(frozen=True)
class Place:
    """Say where a rank is, as MPI sees it."""

    rank: int
    size: int
    node: int
    """The lowest rank of the node."""
    local_rank: int
    local_size: int


def library() -> Library:
    """Return what this process has loaded; local."""
    vendor, version = MPI.get_vendor()
    paths = _loaded()
    info = dict(MPI.COMM_WORLD.Get_info().items())
    kinds = info.get("mpi_memory_alloc_kinds", "")
    return Library(
        vendor=vendor,
        version=".".join(map(str, version)),
        description=MPI.Get_library_version().splitlines()[0].strip(" \0"),
        standard=".".join(map(str, MPI.Get_version())),
        thread_level=_LEVELS[MPI.Query_thread()],
        paths=paths,
        gpu=decide(_ask(paths), kinds, os.environ),
    )


def decide(queries: Mapping[str, bool], kinds: str, environ: Mapping[str, str]) -> Gpu:
    """Return whether MPI serves GPUs: its own word first, then what the environment hints.

    Args:
        queries: functions that MPI has for this question, and their answers.
        kinds: MPI's info `mpi_memory_alloc_kinds`.
        environ: the variables of this process.
    """
    answers = {name: "yes" if yes else "no" for name, yes in queries.items()}
    said = [name for name, yes in queries.items() if yes]
    if kinds:
        answers["mpi_memory_alloc_kinds"] = kinds
    if any(kind in kinds for kind in ("cuda", "rocm", "level_zero")):
        said.append("mpi_memory_alloc_kinds")
    answers |= {name: environ[name] for name in _LEADS if name in environ}
    leads = [name for name in _LEADS if environ.get(name, "").lower() not in _OFF]
    if said:
        return Gpu("yes", said[0], answers)
    if leads:
        return Gpu("maybe", f"{leads[0]} in the environment; MPI itself doesn't say", answers)
    return Gpu("no", "nothing says yes", answers)


def _loaded() -> list[str]:
    """Return the MPI libraries that are mapped into this process."""
    paths = {
        line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()
    }
    names = ("libmpi.", "libmpi_", "libmpich", "libpmpi")
    return sorted(path for path in paths if Path(path).name.startswith(names))


def _ask(paths: list[str]) -> dict[str, bool]:
    """Call what the loaded libraries have of the functions that tell about GPUs."""
    answers = {}
    for path in paths:
        mpi = ctypes.CDLL(path)
        for kind in _QUERIES:
            name = f"MPIX_Query_{kind}_support"
            if hasattr(mpi, name):
                answers[name] = bool(getattr(mpi, name)())
        if hasattr(mpi, "MPIX_GPU_query_support"):
            for number, kind in enumerate(_KINDS):
                yes = ctypes.c_int(0)
                known = mpi.MPIX_GPU_query_support(number, ctypes.byref(yes)) == MPI.SUCCESS
                answers[f"MPIX_GPU_query_support({kind})"] = known and bool(yes.value)
    return answers


# ---- ranks: on COMM_WORLD itself, since a World may be what can't be had


def place() -> Place:
    """Return where this rank is; all ranks call."""
    comm = MPI.COMM_WORLD
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    leader = node.bcast(comm.rank)
    found = Place(comm.rank, comm.size, leader, node.rank, node.size)
    node.Free()
    return found


def gather(value: Any) -> list[Any] | None:
    """Return the objects of all ranks on rank 0, None elsewhere; all ranks call."""
    return MPI.COMM_WORLD.gather(value)


def share(value: Any) -> Any:
    """Return rank 0's object; all ranks call."""
    return MPI.COMM_WORLD.bcast(value)


# ---- bandwidth


def bandwidth(world: World) -> dict[str, dict[str, float]]:
    """Return GB/s by collective and dtype; all ranks call.

    Bytes of the full vector (16 MiB) over the time of the slowest rank, the median of five, after
    one to warm up; carried like the engine's collectives. Takes seconds.
    """
    found: dict[str, dict[str, float]] = {}
    for name, dtype in DTYPES.items():
        count = BYTES // dtype.itemsize // world.size * world.size
        for collective, run in _collectives(world, torch.ones(count, dtype=dtype)).items():
            _slowest(world, run)
            seconds = statistics.median(_slowest(world, run) for _ in range(REPEATS))
            found.setdefault(collective, {})[name] = count * dtype.itemsize / seconds / 1e9
    return found


def _collectives(world: World, full: torch.Tensor) -> dict[str, Callable[[], Future[None]]]:
    shard = torch.ones(full.numel() // world.size, dtype=full.dtype)
    cargo = Cargo("doctor", "doctor", full.numel() * full.element_size())
    gathers, reductions = world.gathers, world.reductions
    mean = world.size  # so that ones stay ones
    return {
        "all_gather": lambda: gathers.all_gather(cargo, full, shard),
        "reduce_scatter": lambda: reductions.reduce_scatter(cargo, full, shard, divisor=mean),
        "all_reduce": lambda: reductions.all_reduce(cargo, full, divisor=mean),
        "broadcast": lambda: gathers.broadcast(cargo, full),
    }


def _slowest(world: World, run: Callable[[], Future[None]]) -> float:
    """Return the seconds of the slowest rank."""
    cargo = Cargo("doctor", "seconds", 0)
    world.gathers.exchange(cargo, bytes(8)).result()  # all begin together
    start = time.perf_counter()
    run().result()
    record = struct.pack("d", time.perf_counter() - start)
    records = world.gathers.exchange(cargo, record).result()
    return max(float(struct.unpack("d", record)[0]) for record in records)
