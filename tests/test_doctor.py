"""The doctor: what it finds, what it calls wrong, and how it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from launch import environment, mpiexec

from hpczero import cli, doctor
from hpczero.comm import machine
from hpczero.comm.machine import Launcher, Leftovers, Shm
from hpczero.comm.probe import Gpu, Library
from hpczero.diagnosis import SEVERITIES, Rank, Report, diagnose
from hpczero.infinity import speed as speeds
from hpczero.infinity.speed import Speed

KEYS = [
    "verdict", "problems", "nodes", "world_size", "refusal", "mpi", "launcher", "ranks", "shm",
    "torch", "cupy", "h5py", "devices", "bandwidth", "import_seconds", "installed_on",
    "environment", "complaints", "speeds",
]  # fmt: skip


def check(found: dict[str, Any], ranks: int) -> None:
    assert list(found) == KEYS
    assert found["verdict"] in SEVERITIES
    assert (found["world_size"], found["nodes"], found["refusal"]) == (ranks, 1, "")
    assert found["mpi"]["thread_level"] == "multiple"
    assert found["mpi"]["gpu"]["support"] in ("yes", "maybe", "no")
    assert found["mpi"]["gpu"]["answers"]
    assert all("libmpi" in path for path in found["mpi"]["paths"])
    assert [rank["rank"] for rank in found["ranks"]] == list(range(ranks))
    assert [rank["local_rank"] for rank in found["ranks"]] == list(range(ranks))
    for rank in found["ranks"]:
        assert rank["cores"] == len(machine.unranged(rank["cpus"])) > 0
        assert rank["threads"] > 0
        assert rank["start_seconds"] > 0
    assert [shm["host"] for shm in found["shm"]] == [found["ranks"][0]["host"]]
    assert found["shm"][0]["size"] >= found["shm"][0]["free"] > 0
    assert found["h5py"]["hdf5"][0].isdigit()
    assert found["import_seconds"]["slowest"] >= found["import_seconds"]["fastest"] > 0
    assert "unknown" not in found["installed_on"].values()


def ask(*flags: str) -> int:
    """Run the doctor in this process and return its exit code."""
    try:
        cli.main(["doctor", *flags])
    except SystemExit as end:
        return cast("int", end.code)
    return 0


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep this process from being released from the watch."""
    monkeypatch.setattr(cli.watch, "release", lambda: None)


@pytest.mark.usefixtures("quiet")
def test_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    code = ask("--json")
    found = json.loads(capsys.readouterr().out)
    check(found, ranks=1)
    assert code == SEVERITIES[found["verdict"]]
    assert found["bandwidth"] == {}
    assert any("no bandwidth" in problem["text"] for problem in found["problems"])


@pytest.mark.usefixtures("quiet")
def test_tables_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    ask()
    output = capsys.readouterr().out
    for text in ("thread level", "GPU support", "/dev/shm on", "1 rank and 1 node", "HDF5"):
        assert text in output
    assert output.splitlines()[-1].startswith("verdict: ")
    assert "  -> start the doctor like the job" in output


def test_two_ranks_measure_bandwidth() -> None:
    job = mpiexec(2, "-m", "hpczero", "doctor", "--json")
    found = json.loads(job.stdout[job.stdout.index("{") : job.stdout.rindex("}") + 1])
    check(found, ranks=2)
    assert job.returncode == SEVERITIES[found["verdict"]] < 3, job.stdout
    assert found["launcher"]["ranks"] == 2
    assert list(found["bandwidth"]) == ["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
    for row in found["bandwidth"].values():
        assert list(row) == ["fp32", "bf16"]
        assert all(0 < speed < 1000 for speed in row.values())


def test_a_low_thread_level_is_an_error_that_ends_all_ranks_alike() -> None:
    job = mpiexec(2, "-m", "hpczero", "doctor", env={"MPI4PY_RC_THREAD_LEVEL": "funneled"})
    assert job.returncode == 3, job.stdout
    assert job.stdout.count("verdict: error") == 1
    assert "error: expected MPI with MPI_THREAD_MULTIPLE, found thread level 1" in job.stdout
    assert "failed" not in job.stdout
    assert "left with" not in job.stdout


def test_one_rank_under_a_launcher_of_more_is_an_error() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "hpczero", "doctor", "--json"],
        capture_output=True,
        text=True,
        env=environment({"MV2_COMM_WORLD_SIZE": "4"}),
        check=False,
    )
    assert run.returncode == 3, run.stderr
    found = json.loads(run.stdout)  # nothing but JSON on stdout
    assert found["problems"][0]["severity"] == "error"
    assert "(MV2_COMM_WORLD_SIZE=4), but MPI sees a world of 1" in found["problems"][0]["text"]
    assert "srun --mpi=" in found["problems"][0]["cure"]


# ---- diagnoses of machines that we haven't got


def rank(number: int, **changes: Any) -> Rank:
    healthy = Rank(
        rank=number,
        host="n1",
        machine="a",
        node=0,
        local_rank=number,
        cores=4,
        cpus="0-3",
        threads=1,
        visible_devices=0,
        device="cpu",
        start_seconds=2.0,
        versions={"torch": "2.13.0", "mpi": "MPICH 5"},
    )
    return replace(healthy, **changes)


def machine_with(**changes: Any) -> Report:
    """Return a Report that has no problem but those of the changes."""
    healthy = Report(
        world_size=2,
        refusal="",
        mpi=Library("MPICH", "5.0.2", "MPICH", "5.0", "multiple", [], Gpu("no", "nothing", {})),
        launcher=Launcher("srun", 2, "none"),
        ranks=[rank(0), rank(1)],
        shm=[Shm("n1", 64 << 30, 60 << 30)],
        torch={"bf16_is_fast": True},
        cupy={},
        h5py={"installed": True, "parallel": True},
        devices=[],
        bandwidth={},
        import_seconds={"slowest": 2.0, "fastest": 1.0},
        installed_on={"torch": "nfs4"},
        environment={},
        complaints=[],
        speeds=[None, None],
    )
    return replace(healthy, **changes)


OPEN_MPI = Library("Open MPI", "5.0.11", "", "3.1", "multiple", [], Gpu("no", "nothing", {}))
NARROW = [rank(0, cpus="2"), rank(1, cpus="2")]
DEAD = {"mpich_shm_*": Leftovers("MPICH", 3, 8 << 30)}


def test_a_healthy_machine_has_no_problem() -> None:
    assert diagnose(machine_with()) == []


@pytest.mark.parametrize(
    ("changes", "severity", "text", "cure"),
    [
        ({"refusal": "found this: so. Do that"}, "error", "found this: so", "Do that"),
        (
            {"world_size": 1, "launcher": Launcher("torchrun", 4, "none")},
            "error", "torchrun) started 4 ranks, MPI sees a world of 1", "mpiexec or srun",
        ),
        (
            {"ranks": [rank(0), rank(1, host="n2", versions={"torch": "2.6", "mpi": "MPICH 5"})]},
            "error", "rank 0 has torch 2.13.0, rank 1 on n2 has 2.6", "same environment",
        ),
        (
            {"ranks": [rank(0), rank(1, host="n2", node=1, cpus="0", machine="b")], "environment":
             {"OMP_NUM_THREADS": "4"}},
            "warning", "makes 4 threads on 1 core of n2", "export OMP_NUM_THREADS=1",
        ),
        ({"ranks": NARROW}, "warning", "2 ranks share 1 core on n1", "fewer ranks per node"),
        (
            {"ranks": NARROW, "mpi": OPEN_MPI},
            "warning", "waiting ranks spin on n1", "OMPI_MCA_mpi_yield_when_idle=1",
        ),
        (
            {"environment": {"OMP_NUM_THREADS": "4"}},
            "warning", "makes 8 threads on 4 cores of n1", "export OMP_NUM_THREADS=2",
        ),
        (
            {"shm": [Shm("n1", 64 << 20, 60 << 20)]},
            "warning", "60 MiB free of 64 MiB, and MPI may want 64 MiB", "--shm-size",
        ),
        (
            {"shm": [Shm("n1", 64 << 30, 9 << 30, DEAD)]},
            "warning", "8.0 GiB in 3 files of dead jobs (MPICH)", "-name 'mpich_shm_*'",
        ),
        ({"shm": [Shm("n1", 64 << 40, 9 << 30, DEAD)]}, "note", "of dead jobs", "no job of yours"),
        ({"h5py": {"installed": True, "parallel": False}}, "note", "without MPI", "nothing to do"),
        ({"h5py": {"installed": False, "error": "no"}}, "warning", "doesn't load: no", "pip"),
        (
            {"speeds": [Speed("/a", direct=True), Speed("/a", error="[Errno 28] full")]},
            "error", "rank 1 can't offload to /a: [Errno 28] full", "room for its part",
        ),
        ({"speeds": [Speed("/nfs"), None]}, "note", "/nfs takes no direct I/O", "cache"),
        ({"complaints": ["driver too old"]}, "warning", "torch says: driver too old", "driver"),
        ({"devices": ["H200"]}, "note", "no pointers to GPU memory", "host memory"),
        ({"torch": {"bf16_is_fast": False}}, "note", "multiplies bf16", "train in fp32"),
        (
            {"ranks": [rank(n, visible_devices=2) for n in range(3)]},
            "note", "3 ranks share 2 devices on n1", "one rank per device",
        ),
        (
            {"ranks": [rank(0), rank(1, node=1, local_rank=0)]},
            "note", "2 nodes on the one machine n1", "by one launcher",
        ),
        (
            {"import_seconds": {"slowest": 51.0, "fastest": 2.0}},
            "warning", "up to 51 s (torch on nfs4)", "node-local storage",
        ),
        ({"world_size": 1, "ranks": [rank(0)], "launcher": Launcher("none", None, "none")},
         "note", "no bandwidth", "mpiexec -n 4 hpczero doctor"),
    ],
)  # fmt: skip
def test_a_problem_and_its_cure(
    changes: dict[str, Any], severity: str, text: str, cure: str
) -> None:
    problems = diagnose(machine_with(**changes))
    found = [problem for problem in problems if text in problem.text]
    assert len(found) == 1, problems
    assert found[0].severity == severity
    assert cure in found[0].cure


def test_open_mpi_that_yields_is_no_problem() -> None:
    setting = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    problems = diagnose(machine_with(ranks=NARROW, mpi=OPEN_MPI, environment=setting))
    assert [problem.text for problem in problems] == ["2 ranks share 1 core on n1"]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("changes", "verdict", "code"),
    [
        ({}, "ok", 0),
        ({"h5py": {"installed": True, "parallel": False}}, "note", 0),
        ({"ranks": NARROW, "h5py": {"installed": True, "parallel": False}}, "warning", 1),
        ({"refusal": "a. b", "ranks": NARROW}, "error", 3),
    ],
)
def test_the_exit_code_is_that_of_the_worst(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    verdict: str,
    code: int,
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda folder: machine_with(**changes))
    assert ask("--json") == code
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == verdict
    assert [p["severity"] for p in found["problems"]][:1] == ([] if verdict == "ok" else [verdict])


@pytest.mark.usefixtures("quiet")
def test_a_folder_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speeds.measure, "__defaults__", (16 << 20,))
    ask("--io", str(tmp_path / "made"), "--json")
    found = json.loads(capsys.readouterr().out)
    (speed,) = found["speeds"]
    assert speed["folder"] == str(tmp_path / "made")
    assert speed["free"] > 16 << 20
    assert speed["write"] > 0 < speed["read"]
    assert not list((tmp_path / "made").iterdir())
    ask("--io", str(tmp_path / "made"))
    assert "past the cache" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    assert ask("--io", str(tmp_path / "file")) == SEVERITIES["error"]
    assert "rank 0 can't offload to" in capsys.readouterr().out
