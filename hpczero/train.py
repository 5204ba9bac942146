"""Train a GPT on bytes or tokens: the loop of the main job.

    hpczero train                                        # one rank
    mpiexec -n 4 hpczero train                           # stage 3 in bf16 on four
    mpiexec -n 4 hpczero train --stage 1 --dtype fp32 --model small --accumulate 4
    srun -n 8 hpczero train --config ds.json --data corpus/
    srun -n 8 hpczero train --data train.bin             # nanoGPT's tokens; or train.h5:tokens

Everything that a training script of yours needs is in `train` below.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hpczero import data
from hpczero.comm.world import World
from hpczero.config import Config
from hpczero.engine import Engine
from hpczero.gpt import GPT, GPTConfig
from hpczero.report import Journal, PeakPss, Step, draw, summarise


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Say what to train, how, and where to write."""

    model: GPTConfig
    config: Config
    """With its batch arithmetic resolved."""
    steps: int
    seed: int
    data: Path | None
    vocabulary: int | None
    """Tokens that the model knows; None asks the data."""
    out: Path
    progress: bool


def train(settings: Settings, world: World) -> None:
    """Train, writing metrics.jsonl, summary.json and loss.png; all ranks call.

    Raises:
        DataError: the data is missing, empty or too short; on all ranks alike.
    """
    share_cores(world)
    batch = settings.config.train_micro_batch_size_per_gpu
    accumulation = settings.config.accumulation
    assert batch is not None
    tokens = data.load(settings.data, world, settings.vocabulary)
    batches = data.Batches(tokens, seq=settings.model.seq, batch=batch, seed=settings.seed)
    model = GPT(replace(settings.model, vocabulary=tokens.vocabulary), settings.seed)
    engine = Engine(model, settings.config)
    step_tokens = batch * settings.model.seq * accumulation * world.size

    pss = PeakPss()
    steps: list[Step] = []
    with Journal(
        settings.out, settings.steps, settings.progress, active=world.rank == 0
    ) as journal:
        for step in range(settings.steps):
            start = time.perf_counter()
            lr, skipped = engine.lr, engine.skipped_steps
            total = 0.0
            for micro in range(accumulation):
                number = (step * accumulation + micro) * world.size + world.rank
                loss = engine(*batches.micro_batch(number))
                pss.sample(step)
                engine.backward(loss)
                pss.sample(step)
                engine.step()
                pss.sample(step)
                total += loss.item()
            mean = world.mean(total / accumulation)
            seconds = time.perf_counter() - start
            steps.append(
                Step(
                    step=step + 1,
                    loss=mean,
                    lr=lr,
                    grad_norm=engine.grad_norm,
                    skipped=engine.skipped_steps > skipped,
                    step_seconds=seconds,
                    tokens_per_second=step_tokens / seconds,
                )
            )
            journal.write(steps[-1])
    summarise(engine, settings.out, steps, pss)
    if world.rank == 0:
        draw(settings.out / "loss.png", steps)


def share_cores(world: World) -> None:
    """Give each rank of a node its share of the cores, unless OMP_NUM_THREADS says how many."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_size))
