"""Jobs whose disk fails, is full or slow, or that end at once: named, soon, and nothing is left."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from launch import Job, mpiexec

START = """
import errno, os, sys, time
import torch
from torch import nn
from mpi4py import MPI
import hpczero

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
folder = os.environ["FOLDER"]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()

def engine_of(params="nvme", **more):
    torch.manual_seed(0)
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": folder},
        "offload_param": {"device": params, "nvme_path": folder},
        **more,
    }
    return hpczero.Engine(Net(), {"zero_optimization": zero, "bf16": {"enabled": True}})

def train(engine, steps):
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 64, dtype=torch.bfloat16)))
        engine.step()

read, write = os.preadv, os.pwritev

def failing(call, name, after):
    count = [0]
    def instead(number, buffers, offset):
        count[0] += 1
        if count[0] > after and rank == size - 1:
            if not os.path.exists(f"{folder}/event"):
                open(f"{folder}/event", "w").write(str(time.time()))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(number, buffers, offset)
    setattr(os, name, instead)
"""


def run(folder: Path, body: str, n: int = 2, timeout: float = 60) -> Job:
    return mpiexec(n, "-c", START + body, timeout=timeout, env={"FOLDER": str(folder)})


@pytest.mark.parametrize(
    ("call", "what", "after"),
    [
        pytest.param(call, what, n, marks=[] if (call, n) == ("pwritev", 0) else pytest.mark.slow)
        for call, what in (("preadv", "reading"), ("pwritev", "writing"))
        for n in (0, 5, 11)
    ],
)
def test_a_broken_disk_ends_the_job(tmp_path: Path, call: str, what: str, after: int) -> None:
    """In a gather, an update, or the writing of a gradient: whichever call is the n-th."""
    done = run(
        tmp_path,
        f"engine = engine_of(); train(engine, 2); failing(os.{call}, {call!r}, {after})\n"
        "train(engine, 100)",
    )
    ended = time.time()
    assert done.returncode != 0
    assert re.search(rf"hpczero: rank 1 of 2 .*\n(.*\n)*.*{what} '", done.stdout), done.stdout
    assert str(tmp_path) in done.stdout
    event = tmp_path / "event"
    assert ended - float(event.read_text()) < 10
    event.unlink()
    assert not list(tmp_path.iterdir())


def test_a_wrong_byte_ends_the_job_where_checksums_are_on(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "engine = engine_of(offload_checksums=True); train(engine, 2)\n"
        "def wrong(number, buffers, offset):\n"
        "    count = read(number, buffers, offset)\n"
        "    buffers[0][5] ^= rank\n"
        "    return count\n"
        "os.preadv = wrong; train(engine, 100)",
    )
    assert done.returncode != 0
    said = r"hpczero: rank 1 of 2 .*\n(.*\n)*.*aren't those that were written"
    assert re.search(said, done.stdout), done.stdout
    assert str(tmp_path) in done.stdout


@pytest.mark.parametrize("params", ["none", pytest.param("nvme", marks=pytest.mark.slow)])
def test_a_program_may_end_right_after_a_step(tmp_path: Path, params: str) -> None:
    """Though one rank's disk is slow: its update ends, and so does the job, well."""
    done = run(
        tmp_path,
        f"engine = engine_of({params!r}, offload_keep_files=True); train(engine, 1)\n"
        "os.pwritev = lambda *args: (time.sleep(0.2 * rank), write(*args))[1]\n"
        "train(engine, 1)",
    )
    said = [line for line in done.stdout.splitlines() if "as long as in fp32" not in line]
    assert (done.returncode, said) == (0, [])  # but for what some CPUs are told about bf16
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("n", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("later", ["", pytest.param("time.sleep(1)", marks=pytest.mark.slow)])
def test_the_last_update_fails(tmp_path: Path, later: str, n: int) -> None:
    """Nobody would wait for it any more: neither where it still goes on nor where it has ended."""
    done = run(
        tmp_path,
        "engine = engine_of('none'); train(engine, 2); engine.synchronize()\n"
        "if rank == size - 1: failing(os.pwritev, 'pwritev', 0)\n"
        f"train(engine, 1)\n{later}",
        n=n,
    )
    assert done.returncode != 0
    assert re.search(rf"hpczero: rank {n - 1} of {n} .*failed", done.stdout), done.stdout
    assert "writing '" in done.stdout


@pytest.mark.slow
def test_a_failure_that_a_rank_keeps_to_itself_is_told_at_its_end(tmp_path: Path) -> None:
    """The others wait for it in a gather, and would never learn why it doesn't come."""
    done = run(
        tmp_path,
        "engine = engine_of(); train(engine, 2)\n"
        "if rank == size - 1: failing(os.preadv, 'preadv', 0)\n"
        "try: train(engine, 3)\n"
        "except OSError: pass",
    )
    assert done.returncode != 0
    assert re.search(r"hpczero: rank 1 of 2 .*failed", done.stdout), done.stdout
    assert "reading '" in done.stdout


def test_a_disk_that_is_too_small_is_said_by_all(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "from hpczero.infinity import filetier\n"
        "filetier._free = lambda number: 10_000 * (3 - rank)\n"
        "try:\n"
        "    engine_of()\n"
        "except OSError as error:\n"
        "    print(f'{rank} {error}\\n', end='', flush=True)\n"
        "    assert error.errno == errno.ENOSPC\n",
    )
    assert done.returncode == 0, done.stdout
    needed = 3 * (64 * 64 + 64) * 16
    text = rf"(\d) \[Errno 28\] offloading needs {needed} bytes on \S+, free are \d+"
    assert sorted(re.findall(text, done.stdout)) == ["0", "1"], done.stdout
    assert not list(tmp_path.iterdir())


def test_a_folder_that_one_rank_cannot_write_is_said_by_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(
        tmp_path,
        "folder += '/file' if rank == 1 else '/here'\n"
        "try:\n"
        "    engine_of()\n"
        "except OSError as error:\n"
        "    print(f'{rank} {error}\\n', end='', flush=True)\n",
    )
    assert done.returncode == 0, done.stdout
    text = r"(\d) \[Errno \d+\].*(?:Not a directory|File exists)"
    assert sorted(re.findall(text, done.stdout)) == ["0", "1"], done.stdout


@pytest.mark.parametrize("when", [pytest.param("building", marks=pytest.mark.slow), "training"])
def test_a_killed_job_leaves_nothing(tmp_path: Path, when: str) -> None:
    kill = "import signal; os.kill(os.getpid(), signal.SIGKILL)"
    building = f"hpczero.partition.optimizer.cut = lambda *_: exec({kill!r})\nengine_of()"
    body = building if when == "building" else f"train(engine_of(), 2); {kill}"
    done = run(tmp_path, body)
    assert done.returncode != 0
    assert not list(tmp_path.iterdir())
