"""A job that hangs is ended with a table that points at the odd rank."""

from __future__ import annotations

import re
import time

import pytest
from launch import Job, mpiexec

from hpczero.comm.monitor import Report, _odd, timeout

SECONDS = 2.0

START = """
import time, torch
from torch import nn
from mpi4py import MPI
import hpczero

rank = MPI.COMM_WORLD.rank
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.steps = 0
    def forward(self, x):
        self.steps += 1
        for index, block in enumerate(self.blocks):
            if (rank, self.steps, index) == (1, 3, 2):
                print("stuck at", time.time(), flush=True)
                stuck()
            x = block(x)
        return x.square().mean()

def engine_of(stage, **more):
    return hpczero.Engine(Net(), {"zero_optimization": {"stage": stage}, **more})

def train(engine, steps=5):
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 8)))
        engine.step()
"""

STUCK = {
    "asleep": "def stuck(): time.sleep(1000)\n",
    "in a loop": "def stuck():\n    while True: pass\n",
    "holding the lock": (
        "import ctypes\n"
        "def stuck(): ctypes.PyDLL(None).sleep(1000)  # with the interpreter's lock\n"
    ),
}


def hang(ranks: int, body: str) -> Job:
    return mpiexec(ranks, "-c", START + body, env={"HPCZERO_TIMEOUT": str(SECONDS)})


@pytest.mark.parametrize(
    ("how", "stage"),
    [
        pytest.param(h, s, marks=[] if (h, s) == ("asleep", 3) else pytest.mark.slow)
        for h in STUCK
        for s in (0, 3)
    ],
)
def test_a_stuck_rank_is_named_with_its_stack(how: str, stage: int) -> None:
    job = hang(3, STUCK[how] + f"train(engine_of({stage}))")
    ended, since = time.time(), re.search(r"stuck at (\S+)", job.stdout)
    assert job.returncode != 0
    assert since is not None
    assert (
        ended - float(since[1]) < SECONDS + 2 + 2
    )  # named within 2 s; the launcher takes its time
    assert job.stdout.count("ends the job, which hangs") == 1
    assert "longer than HPCZERO_TIMEOUT" in job.stdout
    assert "the odd one is rank 1" in job.stdout
    if how == "holding the lock":
        assert "1     ?" in job.stdout
        assert "doesn't answer: it holds the interpreter's lock" in job.stdout
    else:
        assert "step 3, phase forward, bucket blocks.1 (from blocks.1.weight)" in job.stdout
        assert "in stuck" in job.stdout
        assert "computes" in job.stdout


@pytest.mark.slow
def test_accumulation_names_the_micro_step() -> None:
    body = STUCK["asleep"] + "train(engine_of(2, gradient_accumulation_steps=2))"
    job = hang(2, body)
    assert "step 2, micro-step 1, phase forward" in job.stdout


def test_a_rank_that_never_builds_an_engine() -> None:
    job = hang(2, "engine_of(3) if rank else time.sleep(1000)")
    assert job.returncode != 0
    assert "rank 1 waited 2 s (HPCZERO_TIMEOUT) for all 2 ranks to build" in job.stdout


@pytest.mark.slow
def test_a_rank_may_be_busy_after_the_end() -> None:
    """Rank 0 writes its results, and the others wait for it to leave."""
    job = hang(2, "train(engine_of(3), 2)\nif rank == 0: time.sleep(5)\nprint('well')")
    assert (job.returncode, job.stdout.count("well")) == (0, 2), job.stdout


@pytest.mark.slow
def test_what_was_under_way_when_ranks_disagreed_is_not_stuck() -> None:
    """Rank 1 waits in a reduction to which rank 0 never comes; both have a new engine since."""
    job = hang(
        2,
        "def stuck(): pass\n"
        "engine = engine_of(1)\n"
        "try:\n"
        "    train(engine, 2) if rank else engine.full_state_dict()\n"
        "except hpczero.Disagreement:\n"
        "    engine = engine_of(1)\n"
        "    until = engine.world.mean(time.time()) + 5\n"
        "    while engine.world.mean(time.time()) < until: train(engine, 1)\n"
        "    print('well')",
    )
    assert (job.returncode, job.stdout.count("well")) == (0, 2), job.stdout


def test_slow_is_not_stuck() -> None:
    job = hang(2, "def stuck(): time.sleep(1)\ntrain(engine_of(3))\nprint('well', rank)")
    assert job.returncode == 0
    assert job.stdout.count("well") == 2


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan"])
def test_the_timeout_is_checked(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCZERO_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"HPCZERO_TIMEOUT: .* found '{text}'"):
        timeout()


def test_the_odd_ones() -> None:
    here, there = Report(waits=True, collectives=["1"]), Report(waits=True, collectives=["2"])
    assert _odd([here, there, here]) == [1]
    assert _odd([here, Report(doing="computes"), there, Report()]) == [1, 3]
