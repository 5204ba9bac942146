"""Time a training step at each stage beside a plain torch loop that doesn't communicate.

    mpiexec -n 2 python benchmarks/step.py --model small --dtype fp32 --out step.json

The floor is the same model, data and precision on every rank, with torch's fused AdamW and without
any communication. Floor and stages take turns, so that a noisy machine troubles all alike; what
counts is the ratio of medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import cpu

import hpczero
from hpczero import data
from hpczero.comm.world import World
from hpczero.gpt import GPT, PRESETS
from hpczero.train import share_cores

LR = 1e-4
WARMUP = 2

Step = Callable[[torch.Tensor, torch.Tensor], float]


def plain(model: GPT, half: bool) -> Step:
    """Return a step of plain torch, with float32 masters where compute is bf16."""
    if half:
        model = model.bfloat16()
    params = list(model.parameters())
    masters = [p.detach().float().requires_grad_() for p in params] if half else params
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=True)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = model(tokens, targets)
        loss.backward()
        if half:
            for master, param in zip(masters, params, strict=True):
                assert param.grad is not None
                master.grad = param.grad.float()
                param.grad = None
        optimizer.step()
        optimizer.zero_grad()
        if half:
            for master, param in zip(masters, params, strict=True):
                param.data.copy_(master.data)
        return float(loss.item())

    return step


def sharded(model: GPT, half: bool, stage: int) -> Step:
    """Return a step of the Engine."""
    engine = hpczero.Engine(
        model,
        {
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": half},
            "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        },
    )

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    return step


def main() -> None:
    """Run the benchmark; all ranks call."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=PRESETS, default="small")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    world = World.of()
    share_cores(world)
    shape, half = PRESETS[args.model], args.dtype == "bf16"
    batches = data.Batches(data.load(None, world), seq=shape.seq, batch=args.batch, seed=0)
    contenders = {"plain torch, no communication": plain(GPT(shape, 0), half)}
    for stage in args.stages:
        contenders[f"stage {stage}"] = sharded(GPT(shape, 0), half, stage)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(WARMUP + args.steps):
        batch = batches.micro_batch(number * world.size + world.rank)
        for name, step in contenders.items():
            world.mean(0.0)  # all start together
            start = time.perf_counter()
            loss = step(*batch)
            world.mean(0.0)  # and end with the slowest
            seconds[name].append(time.perf_counter() - start)
            losses[name].append(world.mean(loss))
    floor = statistics.median(seconds["plain torch, no communication"][WARMUP:])
    rows = {
        name: {
            "median": statistics.median(samples[WARMUP:]),
            "min": min(samples[WARMUP:]),
            "max": max(samples[WARMUP:]),
            "over_floor": statistics.median(samples[WARMUP:]) / floor,
            "samples": samples,
            "losses": losses[name],
        }
        for name, samples in seconds.items()
    }
    result = {
        "benchmark": "step",
        "model": args.model,
        "parameters": sum(p.numel() for p in GPT(shape, 0).parameters()),
        "dtype": args.dtype,
        "ranks": world.size,
        "threads_per_rank": torch.get_num_threads(),
        "micro_batch": args.batch,
        "machine": {"cpu": cpu(), "host": platform.machine()},
        "versions": {
            "torch": torch.__version__,
            "hpczero": hpczero.__version__,
            "mpi": world.library,
        },
        "rows": rows,
    }
    if world.rank == 0:
        for name, row in rows.items():
            print(
                f"{name:32} {row['median']:.3f} s  {row['over_floor']:.2f} x floor  "
                f"({row['min']:.3f} .. {row['max']:.3f})"
            )
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
