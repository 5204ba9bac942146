"""Train a GPT on bytes or tokens: the loop of the main job.

    hpczero train                                        # one rank
    mpiexec -n 4 hpczero train                           # stage 3 in bf16 on four
    mpiexec -n 4 hpczero train --stage 1 --dtype fp32 --model small --accumulate 4
    srun -n 8 hpczero train --config ds.json --data corpus/
    srun -n 6 hpczero train --save-every 100 --keep-last 3 --resume auto
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
from hpczero.errors import CheckpointError
from hpczero.gpt import GPT, GPTConfig
from hpczero.report import Journal, PeakPss, Step, draw, summarise

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in the run's."""


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
    save_every: int | None = None
    """Steps between checkpoints, which go to out/checkpoints; the last step is saved too."""
    keep_last: int | None = None
    """Checkpoints that stay."""
    resume: Path | None = None
    """A checkpoint, or a folder of checkpoints whose `latest` is taken."""
    trace: bool = False
    """Whether to write trace.json, a timeline of all ranks."""
    must_resume: bool = True
    """Whether it is an error that `resume` has no checkpoint yet."""


def train(settings: Settings, world: World) -> None:
    """Train, writing metrics.jsonl, summary.json, loss.png and checkpoints; all ranks call.

    Raises:
        DataError: the data is missing, empty or too short; on all ranks alike.
        CheckpointError: a checkpoint can't be saved, or not be resumed from; on all ranks alike.
    """
    share_cores(world)
    batch = settings.config.train_micro_batch_size_per_gpu
    accumulation = settings.config.accumulation
    assert batch is not None
    tokens = data.load(settings.data, world, settings.vocabulary)
    batches = data.Batches(tokens, seq=settings.model.seq, batch=batch, seed=settings.seed)
    with torch.device("meta"):  # the weights of all blocks are never in one memory
        model = GPT(replace(settings.model, vocabulary=tokens.vocabulary))
    engine = Engine(model, settings.config, initialise=model.initialiser(settings.seed))
    start_step = _resume(engine, settings)
    step_tokens = batch * settings.model.seq * accumulation * world.size

    world.timeline.restart(settings.trace)
    pss = PeakPss()
    with Journal(
        settings.out, settings.steps, settings.progress, active=world.rank == 0, done=start_step
    ) as journal:
        for step in range(start_step, settings.steps):
            start, before = time.perf_counter(), world.timeline.totals()
            lr, skipped, first = engine.lr, engine.skipped_steps, engine.global_samples
            total = 0.0
            for micro in range(accumulation):
                number = micro * world.size + world.rank
                loss = engine(*batches.batch_from(first + number * batch))
                pss.sample(step - start_step)
                engine.backward(loss)
                pss.sample(step - start_step)
                engine.step()
                pss.sample(step - start_step)
                total += loss.item()
            mean = world.mean(total / accumulation)
            times, seconds = world.timeline.since(before), time.perf_counter() - start
            journal.write(
                Step(
                    step=step + 1,
                    loss=mean,
                    lr=lr,
                    grad_norm=engine.grad_norm,
                    skipped=engine.skipped_steps > skipped,
                    step_seconds=seconds,
                    tokens_per_second=step_tokens / seconds,
                    waited=times.waited,
                    carried=times.carried,
                )
            )
            if settings.save_every and (
                (step + 1) % settings.save_every == 0 or step + 1 == settings.steps
            ):
                engine.save_checkpoint(
                    settings.out / CHECKPOINTS, asynchronous=True, keep_last=settings.keep_last
                )
    if start_step >= settings.steps:
        if world.rank == 0:
            print(f"step {start_step} is done already, of {settings.steps}: give more --steps")
        return
    engine.wait_for_checkpoint()
    if settings.trace:
        world.write_timeline(settings.out / "trace.json")
    summarise(engine, settings.out, journal.history, pss, settings.steps - start_step)
    if world.rank == 0:
        draw(settings.out / "loss.png", journal.history)


def _resume(engine: Engine, settings: Settings) -> int:
    """Load what is asked for, and return the steps that are done."""
    path = settings.resume
    if path is None:
        return 0
    single = (path / "manifest.json").is_file()
    if not (single or (path / "latest").is_file()):
        if settings.must_resume:
            raise CheckpointError(f"--resume: expected a checkpoint in {path}, found none")
        return 0  # `--resume auto` on a run that has saved nothing yet
    root, tag = (path.parent, path.name) if single else (path, None)
    folder, _ = engine.load_checkpoint(root, tag)
    if engine.rank == 0 and settings.progress:
        print(f"resumed {folder} after step {engine.global_steps}", flush=True)
    return engine.global_steps


def share_cores(world: World) -> None:
    """Give each rank of a node its share of the cores, unless OMP_NUM_THREADS says how many."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_size))
