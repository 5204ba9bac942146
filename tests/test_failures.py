"""A rank that fails, leaves or does something else ends the whole training job, with its name."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launch import Job, alive, mpiexec

SECONDS = 5  # from an event to the end of all ranks

# What all jobs share: three blocks, of which a rank may skip some or run some without gradients.
START = """
import os, re, signal, sys, threading, time
import torch
from torch import nn
from mpi4py import MPI
import hpczero

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
notes = os.environ["NOTES"]
open(f"{notes}/{os.getpid()}", "x").close()

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.skipped, self.cut = set(), set()

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            if index in self.skipped:
                continue
            with torch.set_grad_enabled(torch.is_grad_enabled() and index not in self.cut):
                x = torch.tanh(block(x))
        return x.square().mean()

def net(width=8):
    torch.manual_seed(0)
    return Net(width)

def engine_of(stage, accumulation=1, prefetch="auto", comm=None, model=None, lr=1e-2, **limits):
    config = {
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "stage3_prefetch_bucket_size": prefetch, **limits},
        "optimizer": {"type": "Adam", "params": {"lr": lr}},
    }
    return hpczero.Engine(model or net(), config, comm)

def batch(number, owner=rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(size * number + owner))

def train(engine, micro_steps):
    for number in range(micro_steps):
        engine.backward(engine(batch(number)))
        engine.step()

def weights(engine):
    return [bucket.weights.clone() for bucket in engine._runtime.buckets]

def event():
    with open(f"{notes}/event", "x") as file:
        file.write(str(time.time()))
"""


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    """Run START and a body on N ranks, and see that none outlives the event by much."""

    def run(n: int, body: str, seconds: float = 60) -> Job:
        done = mpiexec(n, "-c", START + body, timeout=seconds, env={"NOTES": str(tmp_path)})
        notes = {path.name: path.read_text() for path in tmp_path.iterdir()}
        event = float(notes.pop("event", "inf"))
        assert len(notes) == n, done.stdout
        while any(alive(int(pid)) for pid in notes):
            assert time.time() < event + SECONDS, f"ranks outlive the launcher\n{done.stdout}"
            time.sleep(0.02)
        print(f"all gone {time.time() - event:.2f} s after the event\n{done.stdout}")
        assert time.time() < event + SECONDS
        return done

    return run


def assert_failed(job: Job, header: str, last: str) -> None:
    """See that one rank told its story, that it ends with `last`, and that no rank spoke after."""
    assert job.returncode != 0
    assert job.stdout.count("hpczero: rank ") == 1
    assert job.stdout.count("Traceback (most recent call last):") <= 1
    story = job.stdout[job.stdout.index("hpczero: rank ") :]
    assert header in story.splitlines()[0]
    assert " on host " in story.splitlines()[0]
    assert last in story
    after = story[story.rindex(last) + len(last) :]  # the launcher may have the last word
    assert "hpczero" not in after


# Ranks that do different things #

CASES = """
def skip(engine, first=0):
    engine.module.skipped = {first} if rank == size - 1 else set()
    train(engine, 3)

def cut(engine):
    engine.module.cut = {0} if rank == size - 1 else set()
    train(engine, 3)

def extra_backward(engine):
    if rank == size - 1:
        engine.backward(engine(batch(0)))
    train(engine, 3)

def save_alone(engine):
    if rank == 0:
        engine.full_state_dict()
    train(engine, 3)

def grads_alone(engine):
    engine.backward(engine(batch(0)))
    if rank == 0:
        engine.full_grads()
    engine.step()

def mean_alone(engine):
    if rank == size - 1:
        engine.world.mean(1.0)
    train(engine, 3)

def evaluate_alone(engine):
    if rank == 0:
        with torch.no_grad():
            engine(batch(0))
    train(engine, 3)

def differ(what, stage, accumulation=1, prefetch="auto", warm=2, limits={}, **more):
    name = f"{what.__name__} {stage=} {accumulation=} {prefetch=} {warm=} {limits=} {more}"
    engine = engine_of(stage, accumulation, prefetch, world.Dup(), **limits)
    train(engine, warm * accumulation)
    before = weights(engine)
    try:
        what(engine, **more)
    except hpczero.Disagreement as error:
        text = str(error)
    else:
        raise AssertionError(f"nobody noticed {name}")
    assert len(set(world.allgather(text))) == 1, (name, text)
    assert all(map(torch.equal, weights(engine), before)), (name, text)
    assert f"rank {size - 1}:" in text or "rank 0:" in text, (name, text)
    return text
"""


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_different_branches_at_stage_3_are_named(n: int, job: Callable[..., Job]) -> None:
    body = """
for prefetch in (0, "auto"):
    for warm in (0, 1, 2):
        for first in range(3):
            text = differ(skip, 3, 1, prefetch, warm, first=first)
            assert f"rank {size - 1}: " in text and f"blocks.{first}" in text, text
        assert "blocks.0" in differ(cut, 3, 1, prefetch, warm)
"""
    assert job(n, CASES + body).returncode == 0


@pytest.mark.slow
def test_different_branches_are_named_where_weights_stay(job: Callable[..., Job]) -> None:
    body = """
kept = {"stage3_max_reuse_distance": 10**9}
stay = {"stage3_param_persistence_threshold": 10**9}
for warm in (0, 2):
    assert "blocks.1" in differ(skip, 3, warm=warm, limits=kept, first=1)
    assert "blocks.1" in differ(skip, 3, warm=warm, limits=stay, first=1)
    assert "blocks.0" in differ(cut, 3, warm=warm, limits=kept)
"""
    assert job(2, CASES + body).returncode == 0


@pytest.mark.slow
def test_engines_that_take_turns_in_another_order_are_named(job: Callable[..., Job]) -> None:
    body = """
for stage in (1, 3):
    comm = world.Dup()
    engines = [engine_of(stage, 1, "auto", comm) for _ in range(2)]
    for engine in engines:
        train(engine, 1)
    before = [weights(engine) for engine in engines]
    try:
        for engine in engines if rank == 0 else reversed(engines):
            train(engine, 1)
    except hpczero.Disagreement as error:
        assert "rank 0: engine 1 of" in str(error) and "rank 1: engine 2 of" in str(error), error
    else:
        raise AssertionError("nobody noticed")
    for engine, kept in zip(engines, before):
        assert all(map(torch.equal, weights(engine), kept))
"""
    assert job(2, CASES + body).returncode == 0


@pytest.mark.parametrize("stages", [(0, 3), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_different_micro_steps_are_named(stages: tuple[int, int], job: Callable[..., Job]) -> None:
    body = """
for stage in STAGES:
    for accumulation in (1, 2):
        cases = [mean_alone, extra_backward]
        if accumulation == 1:
            cases.append(grads_alone)
        if stage > 0:
            cases.append(save_alone)
        if stage == 3:
            cases.append(evaluate_alone)
        if stage < 2 and accumulation > 1:  # gradients only add up, until the step
            cases.remove(extra_backward)
        for case in cases:
            differ(case, stage, accumulation)
"""
    assert job(2, CASES + body.replace("STAGES", str(stages))).returncode == 0


@pytest.mark.slow
def test_different_branches_at_stages_0_to_2_are_zero_gradients(job: Callable[..., Job]) -> None:
    done = job(
        2,
        """
def reference():
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for number in range(3):
        for owner in range(size):
            model.skipped = {1} if owner == 1 else set()
            (model(batch(number, owner)) / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()

expected = {} if rank else reference()
for stage in (0, 1, 2):
    engine = engine_of(stage)
    engine.module.skipped = {1} if rank == 1 else set()
    train(engine, 3)
    for name, value in engine.full_state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
""",
    )
    assert done.returncode == 0


def test_different_models_and_configs_are_named(job: Callable[..., Job]) -> None:
    done = job(
        3,
        r"""
def frozen():
    model = net()
    model.blocks[1].bias.requires_grad_(False)
    return model

def buffered():
    model = net()
    model.register_buffer("extra", torch.zeros(3))
    return model

odd = rank == 2
for build, found in [
    (lambda: engine_of(1, model=net(9 if odd else 8)), r"'blocks.0.weight': \(9, 9\)"),
    (lambda: engine_of(3, model=frozen() if odd else net()), "'blocks.1.bias'"),
    (lambda: engine_of(0, model=buffered() if odd else net()), "'extra'"),
    (lambda: engine_of(0, model=nn.Sequential(net()) if odd else net()), "'0.blocks"),
    (lambda: engine_of(3 if odd else 2), "rank 2: config zero_optimization.stage: 3"),
    (lambda: engine_of(2, lr=1e-3 if odd else 1e-2), "rank 2: config optimizer.params.lr: 0.001"),
    (lambda: engine_of(2, 2 if odd else 1), "rank 2: config gradient_accumulation_steps: 2"),
]:
    try:
        build()
    except hpczero.Disagreement as error:
        text = str(error)
    else:
        raise AssertionError(f"nobody noticed {found}")
    assert "rank 2: " in text and "ranks 0, 1: " in text, text
    assert re.search(found, text), text
train(engine_of(3), 2)  # nothing was broken
engine_of(1 if odd else 0)
""",
    )
    assert_failed(done, "rank 0 of 3", "hpczero.errors.Disagreement: the ranks")


# Ranks that leave #

LEAVE = {
    "sys.exit(0)": "train(engine, 2); event(); sys.exit(0)",
    "in the middle": "loss = engine(batch(0)); event(); raise SystemExit",
}


def leave(how: str, stage: int, accumulation: int, before: str = "") -> str:
    return f"""
def main():
    engine = engine_of({stage}, {accumulation})
    {before or "pass"}
    if rank == 1:
        {how}
        return
    train(engine, 50)

main()
if rank == 1:
    event()
"""


@pytest.mark.parametrize(
    ("stage", "accumulation"),
    [
        pytest.param(s, a, marks=[] if (s, a) == (3, 2) else pytest.mark.slow)
        for s in range(4)
        for a in (1, 2)
    ],
)
def test_rank_that_ends_early_is_named(
    stage: int, accumulation: int, job: Callable[..., Job]
) -> None:
    n = 2 + stage % 2
    done = job(n, leave("train(engine, 3)", stage, accumulation))
    assert_failed(done, f" of {n}", "do all ranks get the same number of batches")
    # Rank 0, unless the machine kept it from speaking for REPORTER_SECONDS.
    assert "hpczero: rank 1 of" not in done.stdout
    assert "Disagreement: the ranks disagree" in done.stdout
    assert "rank 1: has left" in done.stdout


@pytest.mark.parametrize(
    "how", [h if h == "in the middle" else pytest.param(h, marks=pytest.mark.slow) for h in LEAVE]
)
def test_rank_that_exits_with_0_is_named(how: str, job: Callable[..., Job]) -> None:
    done = job(2, leave(LEAVE[how], 3, 1))
    assert done.returncode != 0
    assert "rank 1: has left" in done.stdout


@pytest.mark.slow
def test_rank_that_leaves_one_of_several_worlds_is_named(job: Callable[..., Job]) -> None:
    other = "other = engine_of(0, comm=world.Dup())"
    done = job(2, leave("train(engine, 3)", 1, 1, before=other))
    assert done.returncode != 0
    assert "rank 1: has left" in done.stdout


# Ranks that fail #

FAIL = {
    "forward": """
def forward(x):
    event()
    raise ValueError("this is it")
engine.module.blocks[1].forward = forward
""",
    "forward hook": """
def hook(*args):
    event()
    raise ValueError("this is it")
engine.module.blocks[2].register_forward_hook(hook)
""",
    "backward hook": """
def hook(*args):
    event()
    raise ValueError("this is it")
engine.module.blocks[1].register_full_backward_hook(hook)
""",
    "gradient hook": """
def hook(*args):
    event()
    raise ValueError("this is it")
engine.module.blocks[1].weight.register_hook(hook)
""",
    "loader thread": """
def load():
    time.sleep(0.2)
    event()
    raise ValueError("this is it")
threading.Thread(target=load, name="loader").start()
""",
    "between": """
event()
raise ValueError("this is it")
""",
}


def on_rank_1(body: str, stage: int) -> str:
    indented = "\n".join(f"    {line}" for line in body.strip().splitlines())
    start = f"engine = engine_of({stage})\ntrain(engine, 2)\nif rank == 1:\n"
    return f"{start}{indented}\ntrain(engine, 10**6)"


@pytest.mark.parametrize(
    ("where", "stage", "n"),
    [
        ("forward", 3, 2),
        pytest.param("forward hook", 1, 2, marks=pytest.mark.slow),
        pytest.param("backward hook", 3, 3, marks=pytest.mark.slow),
        pytest.param("gradient hook", 2, 2, marks=pytest.mark.slow),
        ("loader thread", 3, 2),
        pytest.param("between", 0, 2, marks=pytest.mark.slow),
    ],
)
def test_exception_on_one_rank_ends_all(
    where: str, stage: int, n: int, job: Callable[..., Job]
) -> None:
    done = job(n, on_rank_1(FAIL[where], stage))
    assert_failed(done, f"rank 1 of {n}", "ValueError: this is it")
    assert "at step " in done.stdout
    assert where == "loader thread" or "at step 3" in done.stdout


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_an_extra_step_between_micro_steps_ends_all(stage: int, job: Callable[..., Job]) -> None:
    done = job(
        2,
        f"""
engine = engine_of({stage}, 2)
train(engine, 1)
if rank == 1:
    event()
    engine.step()
train(engine, 50)
""",
    )
    assert_failed(done, "rank 1 of 2", "engine.step() at micro-step 2 without an engine.backward()")


def test_failing_exit_of_one_rank_ends_all(job: Callable[..., Job]) -> None:
    done = job(2, on_rank_1("event()\nsys.exit(3)", 3))
    assert_failed(done, "left with exit code 3 at step 3", "exit code 3")


@pytest.mark.slow
def test_killed_rank_ends_all(job: Callable[..., Job]) -> None:
    done = job(3, on_rank_1("event()\nos.kill(os.getpid(), signal.SIGKILL)", 3))
    assert done.returncode != 0
    assert "Traceback" not in done.stdout


# Good ends #

FINE = {
    "several engines": """
for comm in (None, world.Dup(), world.Split(rank // 2), MPI.COMM_SELF):
    for stage in range(4):
        train(engine_of(stage, comm=comm), 2)
engine_of(3)  # never trained
comm = world.Split(0 if rank == 0 else MPI.UNDEFINED)  # a world that the others don't know
if rank == 0:
    train(engine_of(3, comm=comm), 2)
engines = [engine_of(stage, comm=comm) for stage in (0, 3) for comm in (None, world.Dup())]
for _ in range(2):
    for engine in engines:
        train(engine, 1)
if rank == 1:
    time.sleep(3)
elif rank == 2:
    sys.exit(0)
""",
    "never an engine": "time.sleep(rank)",
    "a caught disagreement": """
engine = engine_of(1)
try:
    train(engine, 2) if rank else engine.full_state_dict()
except hpczero.Disagreement:
    train(engine_of(1), 2)
rank or event()
""",
}


@pytest.mark.parametrize(
    "name",
    [n if n == "a caught disagreement" else pytest.param(n, marks=pytest.mark.slow) for n in FINE],
)
def test_good_job_ends_well(name: str, job: Callable[..., Job]) -> None:
    done = job(3, FINE[name])
    assert done.returncode == 0
    assert "hpczero: rank" not in done.stdout
