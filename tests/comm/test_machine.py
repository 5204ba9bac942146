"""What the operating system shows."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.comm import machine
from hpczero.comm.machine import Launcher, Leftovers, launcher


@given(st.sets(st.integers(0, 300)))
def test_ranges_and_back(cpus: set[int]) -> None:
    assert machine.unranged(machine.ranges(cpus)) == cpus


def test_ranges_read_like_the_kernels() -> None:
    assert machine.ranges({0, 1, 2, 5, 7, 8}) == "0-2,5,7-8"
    assert machine.ranges(set()) == ""


def old_file(path: Path, size: int) -> Path:
    path.write_bytes(b"x" * size)
    os.utime(path, (time.time() - 3600,) * 2)
    return path


def test_leftovers_are_old_files_of_mine_that_nobody_has_mapped(tmp_path: Path) -> None:
    for name in ("mpich_shm_1_0", "mpich_shm_2_0", "sm_segment.vm.0.1", "nobodys"):
        old_file(tmp_path / name, 8192)
    (tmp_path / "mpich_shm_young").write_bytes(b"x" * 8192)
    used = old_file(tmp_path / "mpich_shm_used", 8192)
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        found = machine.shared_memory(tmp_path)
    assert found.leftovers == {
        "mpich_shm_*": Leftovers("MPICH", 2, 16384),
        "sm_segment.*": Leftovers("Open MPI", 1, 8192),
    }
    assert found.size >= found.free > 0


def test_no_shared_memory_is_none_free(tmp_path: Path) -> None:
    found = machine.shared_memory(tmp_path / "none")
    assert (found.size, found.free, found.leftovers) == (0, 0, {})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Launcher("none", None, "none")),
        (
            {"PMI_SIZE": "4", "PMI_RANK": "0", "HYDI_CONTROL_FD": "7"},
            Launcher("hydra (mpiexec of MPICH or Intel)", 4, "none"),
        ),
        (
            {"PMIX_RANK": "0", "PRTE_LAUNCHED": "1", "OMPI_COMM_WORLD_SIZE": "2", "PBS_JOBID": "9"},
            Launcher("Open MPI's mpiexec", 2, "PBS job 9"),
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"},
            Launcher("srun", 8, "Slurm job 7"),
        ),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, Launcher("none", None, "Slurm job 7")),
        (
            # srun started hydra's proxies
            {"SLURM_STEP_NUM_TASKS": "2", "HYDI_CONTROL_FD": "4", "PMI_SIZE": "8"},
            Launcher("hydra (mpiexec of MPICH or Intel)", 8, "none"),
        ),
        ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4"}, Launcher("torchrun", 4, "none")),
        ({"PMIX_RANK": "0"}, Launcher("unknown, by PMIx", None, "none")),
    ],
)  # fmt: skip
def test_launcher(environ: dict[str, str], expected: Launcher) -> None:
    assert launcher(environ) == expected


def test_filesystem_is_that_of_the_deepest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    root = tmp_path.resolve()
    lines = [
        "/dev/vda / ext4 rw 0 0",
        f"s:/x {root}/a\\040b nfs4 rw",
        f"l {root}/a\\040b/c lustre rw",
    ]
    mounts.write_text("\n".join(lines))
    for path, kind in {"a b/x.py": "nfs4", "a b/c/d/x.py": "lustre", "x.py": "ext4"}.items():
        assert machine.filesystem(root / path, mounts) == kind


def test_the_age_of_this_process_grows() -> None:
    before = machine.process_age()
    time.sleep(0.02)
    assert 0 < before < machine.process_age()
