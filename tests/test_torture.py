"""kill -9 at any moment: what `latest` names is whole, and the run goes on from it, bit for bit.

One seed is one scenario: ranks, stage, precision, how it saves, who is killed and when.
`python tests/test_torture.py 200` (`make torture`) tries many.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
from launch import alive, end_tree, environment, launcher, mpiexec

from hpczero.checkpoints import folder as folders
from hpczero.checkpoints.reader import Checkpoint

SECONDS = 120  # for a job on a busy machine

COMMON = """
import os, pathlib, random, sys, time
import torch
from mpi4py import MPI
from torch import nn
import hpczero
from hpczero.checkpoints import checkpointer

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
root, notes = sys.argv[1:3]

def engine_of(seed=0):
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(6, 11), nn.Tanh(), nn.Dropout(0.2), nn.Linear(11, 11), nn.Tanh(), nn.Linear(11, 1)
    )
    engine = hpczero.Engine(model, {
        "zero_optimization": {"stage": @stage},
        "bf16": {"enabled": @bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    })
    torch.manual_seed(100 + rank + seed)
    return engine

def step(engine):
    generator = torch.Generator().manual_seed(engine.global_steps * size + rank)
    x = torch.randn(4, 6, generator=generator).to(next(engine.module.parameters()).dtype)
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    engine.step()
    return engine.world.mean(loss.item()).hex()
"""

KILLED = """
phase = os.open(f"{notes}/phase{rank}", os.O_CREAT | os.O_WRONLY)
real = checkpointer.save

def save(*arguments):
    os.pwrite(phase, b"saving", 0)
    real(*arguments)
    os.pwrite(phase, b"------", 0)

checkpointer.save = save
pauses = random.Random(rank)

def slowed(function):
    def slow(*arguments):
        time.sleep(pauses.uniform(0, 0.02))
        result = function(*arguments)
        time.sleep(pauses.uniform(0, 0.02))
        return result
    return slow

if @slow:
    os.fsync = slowed(os.fsync)
    pathlib.Path.rename = slowed(pathlib.Path.rename)
    pathlib.Path.replace = slowed(pathlib.Path.replace)

engine = engine_of()
losses = open(f"{notes}/losses", "a", buffering=1) if rank == 0 else None
saved = open(f"{notes}/saved", "a", buffering=1) if rank == 0 else None
with open(f"{notes}/pid{rank}.new", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{notes}/pid{rank}.new", f"{notes}/pid{rank}")
before = 0
begun = time.monotonic()
while time.monotonic() < begun + 600:  # should nobody be left to kill it
    loss = step(engine)
    if rank == 0:
        losses.write(f"{engine.global_steps} {loss}\\n")
    if engine.global_steps % @every == 0:
        engine.save_checkpoint(root, @tag, None, @asynchronous, keep_last=2)
        # The one that is certainly whole: this one, or in a thread the one before.
        whole, before = before if @asynchronous else engine.global_steps, engine.global_steps
        if rank == 0:
            saved.write(f"{whole}\\n")
"""

RESUMED = """
def resumed(seed):
    engine = engine_of(seed)
    path, _ = engine.load_checkpoint(root)
    start = engine.global_steps
    if path is None:
        torch.manual_seed(100 + rank)
    return engine, start, [step(engine) for _ in range(4)]

engine, start, losses = resumed(1000)
engine.save_checkpoint(root, "after", keep_last=2)
world.Barrier()
rubbish = [n for n in os.listdir(root) if n.startswith((".saving-", ".replaced-"))]
assert not rubbish, rubbish
if size == @ranks:
    through = engine_of()
    expected = [step(through) for _ in range(start + 4)]
    assert losses == expected[start:], f"resumed at {start}: {losses}, not {expected[start:]}"
    with open(f"{notes}/losses") as file:
        told = dict(line.split() for line in file if line.endswith("\\n"))
    for number, loss in told.items():
        assert int(number) > len(expected) or expected[int(number) - 1] == loss, number
else:
    after = resumed(2000)
    assert after[1] == start + 4
    again = engine_of(3000)
    again.load_checkpoint(root, "after")
    assert [step(again) for _ in range(4)] == after[2]
"""


class Scenario(NamedTuple):
    """What a seed stands for."""

    ranks: int
    then: int
    """Ranks of the run that goes on."""
    stage: int
    bf16: bool
    asynchronous: bool
    same_tag: bool
    every: int
    slow: bool
    """Whether what the save asks of the file system takes its time."""
    aimed: bool
    """Whether the kill waits for a save."""
    everybody: bool
    """Whether all ranks are killed, or one."""
    delay: float

    @classmethod
    def of(cls, seed: int) -> Scenario:
        """Return the scenario of a seed."""
        dice = random.Random(seed)
        ranks = dice.choice([2, 3])
        return cls(
            ranks=ranks,
            then=ranks if dice.random() < 0.8 else 5 - ranks,
            stage=dice.randrange(4),
            bf16=dice.random() < 0.5,
            asynchronous=dice.random() < 0.5,
            same_tag=dice.random() < 0.3,
            every=dice.choice([1, 2, 5]),
            slow=seed % 2 == 0,
            aimed=seed % 4 == 0,
            everybody=dice.random() < 0.4,
            delay=dice.uniform(0, 1.5),
        )

    def script(self, body: str) -> str:
        """Return the text of a job."""
        values = {**self._asdict(), "tag": "'best'" if self.same_tag else "None"}
        text = COMMON + body
        for name in sorted(values, key=len, reverse=True):
            text = text.replace(f"@{name}", str(values[name]))
        return text


def play(seed: int, folder: Path) -> bool:
    """Play a scenario; tell whether the kill met a save."""
    scenario = Scenario.of(seed)
    root, notes = folder / "checkpoints", folder / "notes"
    notes.mkdir(parents=True)
    met = kill(seed, scenario, root, notes)
    path = folders.find(root, None)
    written = (notes / "saved").read_text().split("\n")[:-1]
    surely = int(written[-1]) if written else 0
    if path is None:
        assert surely == 0, f"step {surely} was saved, and nothing is there"
    else:
        with Checkpoint(path) as checkpoint:
            assert len([*checkpoint.verify()]) > scenario.ranks
            steps = checkpoint.manifest.counters["global_steps"]
        assert steps >= surely, f"step {surely} was saved, {steps} is there"
    job = scenario.script(RESUMED)
    done = mpiexec(scenario.then, "-c", job, str(root), str(notes), timeout=SECONDS)
    assert done.returncode == 0, done.stdout
    return met


def kill(seed: int, scenario: Scenario, root: Path, notes: Path) -> bool:
    """Start a run and kill it; tell whether it was saving."""
    dice = random.Random(-seed - 1)
    command = [launcher(), "-n", str(scenario.ranks), sys.executable, "-c"]
    command += [scenario.script(KILLED), str(root), str(notes)]
    with (notes / "output").open("w+") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment({}),
            start_new_session=True,
        )
        try:
            files = [notes / f"pid{rank}" for rank in range(scenario.ranks)]
            wait(lambda: all(file.exists() for file in files), "all ranks are there", notes)
            pids = [int(file.read_text()) for file in files]
            victims = pids if scenario.everybody else [dice.choice(pids)]
            phases = [notes / f"phase{pids.index(pid)}" for pid in victims]
            time.sleep(scenario.delay)
            aimed = scenario.aimed
            while aimed:
                wait(lambda: saving(phases), "a save", notes, pause=0)
                time.sleep(dice.uniform(0, 0.05))
                aimed = not saving(phases)  # it has ended meanwhile: aim at the next one
            assert process.poll() is None and all(map(alive, pids)), (notes / "output").read_text()
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            met = saving(phases)
            process.wait(SECONDS)
            assert process.returncode != 0
            wait(lambda: not any(map(alive, pids)), "the end of all ranks", notes)
        finally:
            end_tree(process.pid)
            process.wait()
    return met


def saving(phases: list[Path]) -> bool:
    return any(path.read_bytes() == b"saving" for path in phases)


def wait(condition: Callable[[], bool], what: str, notes: Path, pause: float = 0.01) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        output = notes / "output"
        assert time.monotonic() < deadline, f"no {what}: {output.read_text()}"
        time.sleep(pause)


def torture(seeds: Iterable[int], say: Callable[[str], None] = print) -> None:
    """Play scenarios, and see that some of the kills met a save."""
    met = []
    for count, seed in enumerate(seeds, 1):
        with tempfile.TemporaryDirectory(prefix="hpczero-torture-") as folder:
            begun = time.monotonic()
            try:
                met.append(play(seed, Path(folder)))
            except BaseException:
                say(f"seed {seed} fails: {Scenario.of(seed)}")
                raise
        seconds = time.monotonic() - begun
        say(f"{count}: seed {seed}, {seconds:.1f} s; {sum(met)} of {count} kills met a save")
    assert any(met)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_killed_runs_go_on() -> None:
    torture([0, 1, 6, *range(1000, 1018)])


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        torture(range(int(sys.argv[1])), lambda line: print(line, flush=True))
