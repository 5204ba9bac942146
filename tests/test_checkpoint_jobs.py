"""Jobs that save, end, and go on as other processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launch import Job, mpiexec

from hpczero.checkpoints import folder as folders
from hpczero.checkpoints.reader import Checkpoint

# Going on #

RUN = """
import json, sys, torch
from mpi4py import MPI
from torch import nn
from torch.utils.data import TensorDataset
import hpczero

folder, stage, dtype, start, notes = sys.argv[1:]
start = int(start)
torch.manual_seed(3)
numbers = torch.randn(44, 12)
model = nn.Sequential(
    nn.Linear(12, 17), nn.Tanh(), nn.Dropout(0.3), nn.Linear(17, 17), nn.Tanh(), nn.Dropout(0.3),
    nn.Linear(17, 1),
)
config = {
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": int(stage)},
    "bf16": {"enabled": dtype == "bf16"},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 22}},
}
engine, _, loader, _ = hpczero.initialize(
    model=model, config=config, training_data=TensorDataset(numbers, numbers[:, :1])
)
if start:
    # What a new process has: other random numbers and other weights.
    torch.manual_seed(1000 + engine.rank)
    path, state = engine.load_checkpoint(folder)
    assert engine.global_steps == start and state == {"start": start}, (path, state)
losses = []

def train():
    for x, y in loader:
        x = x.bfloat16() if dtype == "bf16" else x
        loss = (engine(x).float() - y).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(engine.world.mean(loss.item()))
        if start == 0 and engine.global_steps == 10 and engine.micro_steps == 20:
            engine.save_checkpoint(folder, client_state={"start": 10})
        if engine.global_steps == 20:
            return

while engine.global_steps < 20:
    train()
weights = engine.full_state_dict()
if engine.rank == 0:
    text = {name: value.flatten().tolist() for name, value in weights.items()}
    with open(notes, "w") as file:
        json.dump([losses, text, engine.global_samples, engine.lr], file)
"""


def run(folder: Path, stage: int, dtype: str, ranks: int, start: int) -> Any:
    notes = folder / f"from{start}.json"
    words = [str(folder), str(stage), dtype, str(start), str(notes)]
    done = mpiexec(ranks, "-c", RUN, *words)
    assert done.returncode == 0, done.stdout
    return json.loads(notes.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "dtype"),
    [(stage, dtype) for stage in range(4) for dtype in ("fp32", "bf16")],
)
def test_20_steps_are_10_steps_and_another_10(stage: int, dtype: str, tmp_path: Path) -> None:
    """With dropout, accumulation, a schedule, and a shuffled loader in the middle of an epoch."""
    ranks = 2 + stage % 2
    through = run(tmp_path, stage, dtype, ranks, 0)
    then = run(tmp_path, stage, dtype, ranks, 10)
    assert len(through[0]) == 40 and len(set(through[0])) > 30
    assert then[0] == through[0][20:]
    assert then[1:] == through[1:]


# At the end of a job #

JOB = """
import os, sys, resource, torch
from mpi4py import MPI
import hpczero
rank = MPI.COMM_WORLD.rank
engine = hpczero.Engine(torch.nn.Linear(300, 300), {})
engine.backward(engine(torch.ones(2, 300)).square().mean())
engine.step()
if rank == @bad:
    resource.setrlimit(resource.RLIMIT_FSIZE, (@limit, -1))
engine.save_checkpoint(sys.argv[1], asynchronous=True)
@end
"""


def job(ranks: int, tmp_path: Path, bad: int, limit: int, end: str = "") -> Job:
    text = JOB.replace("@bad", str(bad)).replace("@limit", str(limit)).replace("@end", end)
    return mpiexec(ranks, "-c", text, str(tmp_path))


ENDS = {"falls off the end": "", "sys.exit()": "sys.exit()"}


@pytest.mark.parametrize(
    ("end", "ranks"),
    [
        ("falls off the end", 3),
        pytest.param("falls off the end", 1, marks=pytest.mark.slow),
        pytest.param("sys.exit()", 3, marks=pytest.mark.slow),
        pytest.param("sys.exit()", 1, marks=pytest.mark.slow),
    ],
)
def test_the_last_save_fails(end: str, ranks: int, tmp_path: Path) -> None:
    done = job(ranks, tmp_path, ranks - 1, 5000, ENDS[end])
    assert done.returncode != 0
    said = [line for line in done.stdout.splitlines() if "errors.CheckpointError: " in line]
    assert len(said) == 1, done.stdout
    assert (
        f"'global_step1' was not saved; what was saved before is intact: rank {ranks - 1}"
        in said[0]
    )
    assert "File too large" in said[0]
    assert folders.tags(tmp_path) == [] and not (tmp_path / "latest").exists()


@pytest.mark.parametrize(
    "end", ["falls off the end", pytest.param("sys.exit()", marks=pytest.mark.slow)]
)
def test_the_last_save_is_finished(end: str, tmp_path: Path) -> None:
    done = job(2, tmp_path, -1, 0, ENDS[end])
    assert done.returncode == 0, done.stdout
    assert done.stdout == ""
    with Checkpoint(tmp_path / "global_step1") as checkpoint:
        assert len([*checkpoint.verify()]) > 4
