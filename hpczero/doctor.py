"""Examine the machine and the job: what is there, what is wrong, and the cure.

    hpczero doctor                    # this process alone
    mpiexec -n 4 hpczero doctor       # as the job would run, with a bandwidth per collective
    srun -n 8 hpczero doctor --json   # one JSON object on stdout

`examine` gathers a Report; what is wrong follows from it alone, in diagnosis.py.
"""

from __future__ import annotations

import os
import platform
import socket
import warnings
from dataclasses import asdict
from importlib.metadata import distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import hpczero
from hpczero import data, report
from hpczero.comm import probe
from hpczero.comm.machine import (
    SHM,
    Launcher,
    filesystem,
    identity,
    launcher,
    process_age,
    ranges,
    shared_memory,
)
from hpczero.comm.world import World
from hpczero.diagnosis import SEVERITIES, Problem, Rank, Report, diagnose, in_words, plural
from hpczero.infinity.speed import measure
from hpczero.partition.precision import multiplies_fast
from hpczero.train import share_cores

SHOWN = 16  # ranks in the table

# What changes how a job runs; values of others may be nobody's business.
_TELLING = (
    "OMPI_MCA_", "PRTE_MCA_", "MPICH_", "MPIR_CVAR_", "I_MPI_", "MV2_", "UCX_", "FI_", "HPCZERO_",
    "OMP_", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES", "HDF5_", "MPI4PY_RC_", "SLURM_MPI_TYPE", "SLURM_CPU_BIND",
)  # fmt: skip
_OWN = ("OMPI_MCA_PREFIXES", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs", "OMPI_MCA_cpu_type")


def doctor(as_json: bool, folder: Path | None = None) -> int:
    """Examine, print on rank 0, and return the exit code; all ranks call.

    Args:
        as_json: print one JSON object.
        folder: for offloading, to be measured too.
    """
    found = examine(folder)
    code = 0
    if found is not None:
        problems = diagnose(found)
        worst = problems[0].severity if problems else "ok"
        code = SEVERITIES[worst]
        if as_json:
            verdict = {
                "verdict": worst,
                "problems": [asdict(problem) for problem in problems],
                "nodes": found.nodes,
            }
            print(report.to_json(verdict | asdict(found), indent=2), flush=True)
        else:
            _print(found, problems, worst)
    return int(probe.share(code))


# ---- examine


def examine(folder: Path | None = None) -> Report | None:
    """Return the Report on rank 0, None elsewhere; all ranks call."""
    started = process_age()
    place = probe.place()
    devices, complaints = _devices()
    cpus = os.sched_getaffinity(0)
    mine = Rank(
        rank=place.rank,
        host=socket.gethostname(),
        machine=identity(),
        node=place.node,
        local_rank=place.local_rank,
        cores=len(cpus),
        cpus=ranges(cpus),
        threads=torch.get_num_threads(),
        visible_devices=len(devices),
        device=_device(place.local_rank, devices),
        start_seconds=started,
        versions=_versions(),
    )
    ranks = probe.gather(mine)
    shm = probe.gather(shared_memory() if place.local_rank == 0 else None)
    refusal, bandwidth = "", {}
    try:
        world = World.of()
    except RuntimeError as error:  # raised before any rank talks to another
        refusal = str(error)
    else:
        if world.size > 1:
            share_cores(world)
            bandwidth = probe.bandwidth(world)
    speeds = probe.gather(None if folder is None else measure(folder, place.rank))
    if ranks is None or shm is None or speeds is None:
        return None
    seconds = [rank.start_seconds for rank in ranks]
    return Report(
        world_size=place.size,
        refusal=refusal,
        mpi=probe.library(),
        launcher=launcher(os.environ),
        ranks=ranks,
        shm=list({found.host: found for found in shm if found is not None}.values()),
        torch={
            "version": torch.__version__,
            "threads": mine.threads,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cuda_available": bool(devices),
            "bf16_is_fast": bool(devices) or multiplies_fast(torch.bfloat16),
        },
        cupy=_cupy(),
        h5py=_h5py(),
        devices=devices,
        bandwidth=bandwidth,
        import_seconds={"slowest": max(seconds), "fastest": min(seconds)},
        installed_on={name: filesystem(_home(name)) for name in ("hpczero", "torch")},
        environment={
            name: os.environ[name]
            for name in sorted(os.environ)
            if name.startswith(_TELLING) and name not in _OWN
        },
        complaints=complaints,
        speeds=speeds,
    )


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "hpczero": hpczero.__version__,
        **{name: version(name) for name in ("torch", "mpi4py", "numpy")},
        "mpi": probe.library().description,
    }


def _devices() -> tuple[list[str], list[str]]:
    """Return the names of the devices that torch sees, and its warnings about them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = [torch.cuda.get_device_name(number) for number in range(count)]
    return names, [str(warning.message) for warning in caught]


def _device(local_rank: int, devices: list[str]) -> str:
    if not devices:
        return "cpu"
    number = local_rank % len(devices)
    return f"cuda:{number} {devices[number]}"


def _cupy() -> dict[str, Any]:
    """Describe cupy without loading it."""
    # Its wheels have names by CUDA's version.
    wheels = [item for item in distributions() if str(item.name).lower().startswith("cupy")]
    return {
        "installed": find_spec("cupy") is not None,
        "version": wheels[0].version if wheels else None,
        "package": wheels[0].name if wheels else None,
    }


def _h5py() -> dict[str, Any]:
    try:
        own, hdf5, parallel = data.hdf5_build()
    except ImportError as error:
        return {"installed": False, "error": str(error)}
    return {"installed": True, "version": own, "hdf5": hdf5, "parallel": parallel}


def _home(package: str) -> Path:
    spec = find_spec(package)
    return Path(spec.origin if spec and spec.origin else "/")


# ---- print


def _print(found: Report, problems: list[Problem], worst: str) -> None:
    ranks, nodes = plural(found.world_size, "rank"), plural(found.nodes, "node")
    report.show_table(
        f"hpczero {hpczero.__version__} on {ranks} and {nodes}",
        ["what", "found"],
        [*_rows(found), None, *found.environment.items()],
        justify="left",
    )
    report.show_table(
        "Ranks" + (f" (the first {SHOWN})" if len(found.ranks) > SHOWN else ""),
        ["rank", "host", "node of", "local rank", "cores", "threads", "device"],
        [
            (
                str(r.rank),
                r.host,
                str(r.node),
                str(r.local_rank),
                f"{r.cores} ({r.cpus})",
                str(r.threads),
                r.device,
            )
            for r in found.ranks[:SHOWN]
        ],
    )
    if found.bandwidth:
        columns = list(probe.DTYPES)
        report.show_table(
            "Bandwidth of 16 MiB",
            ["GB/s", *columns],
            [
                (name, *(f"{row[column]:.2f}" for column in columns))
                for name, row in found.bandwidth.items()
            ],
        )
    speeds = [(rank, speed) for rank, speed in enumerate(found.speeds) if speed is not None]
    if speeds:
        report.show_table(
            f"Files in {speeds[0][1].folder}, all ranks at the same time",
            ["rank", "write, GB/s", "read, GB/s", "free", "past the cache"],
            [
                (
                    str(rank),
                    f"{speed.write:.2f}",
                    f"{speed.read:.2f}",
                    in_words(speed.free),
                    "yes" if speed.direct else "no",
                )
                for rank, speed in speeds[:SHOWN]
            ],
        )
    for problem in problems:
        print(f"{problem.severity}: {problem.text}")
        if problem.cure:
            print(f"  -> {problem.cure}")
    print(f"verdict: {worst}", flush=True)


def _rows(found: Report) -> list[tuple[str, str]]:
    mpi, cupy = found.mpi, found.cupy
    answers = "".join(f"\n{name}: {answer}" for name, answer in mpi.gpu.answers.items())
    free = {shm.host: f"{in_words(shm.free)} free of {in_words(shm.size)}" for shm in found.shm}
    seconds = found.import_seconds
    return [
        ("MPI", f"{mpi.vendor} {mpi.version}, standard {mpi.standard}, {', '.join(mpi.paths)}"),
        ("thread level", mpi.thread_level),
        ("GPU support", f"{mpi.gpu.support}: {mpi.gpu.decided_by}{answers}"),
        ("launcher", _launcher_text(found.launcher)),
        ("Python", found.ranks[0].versions["python"]),
        ("torch", _torch_text(found.torch)),
        ("cupy", f"{cupy['version']} ({cupy['package']})" if cupy["installed"] else "no"),
        ("h5py", _h5py_text(found.h5py)),
        ("devices", ", ".join(found.devices) or "none: the ranks compute on the CPU"),
        *((f"{SHM} on {host}", text) for host, text in free.items()),
        ("start", f"{seconds['fastest']:.1f} to {seconds['slowest']:.1f} s: Python, torch, MPI"),
        ("installed on", ", ".join(f"{k} on {v}" for k, v in found.installed_on.items())),
    ]


def _launcher_text(found: Launcher) -> str:
    ranks = "" if found.ranks is None else f", {plural(found.ranks, 'rank')}"
    return f"{found.name}{ranks}; allocation: {found.allocation}"


def _torch_text(found: dict[str, Any]) -> str:
    builds = {"CUDA": found["cuda"], "ROCm": found["hip"]}
    built = [f"{kind} {number}" for kind, number in builds.items() if number] or ["CPUs"]
    return f"{found['version']}, built for {built[0]}"


def _h5py_text(found: dict[str, Any]) -> str:
    if not found["installed"]:
        return "no"
    kind = "parallel" if found["parallel"] else "serial"
    return f"{found['version']}, HDF5 {found['hdf5']}, {kind}"
