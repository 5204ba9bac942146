"""Plain torch on one process: what every stage on every number of ranks must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import nn

import hpczero

LR = 1e-2
STEPS = 3

MakeModel = Callable[[], nn.Module]
Loss = Callable[[Any, int], torch.Tensor]  # (engine or module, number of the micro-batch)


class Result(NamedTuple):
    losses: list[float]  # mean over ranks, one per micro-step
    state: dict[str, torch.Tensor]  # rank 0 only
    norms: list[float]  # one per step
    engine: Any


def config(
    stage: int,
    dtype: str = "fp32",
    accumulation: int = 1,
    clip: float = 0.0,
    prefetch: int | str = "auto",
    kind: str = "AdamW",
) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage, "stage3_prefetch_bucket_size": prefetch},
        "bf16": {"enabled": dtype == "bf16"},
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": {
            "type": kind,
            "params": {"lr": LR, "weight_decay": 0.01 if kind == "AdamW" else 0.0},
        },
    }


def train(
    make: MakeModel,
    loss: Loss,
    settings: dict[str, Any],
    comm: MPI.Intracomm | None = None,
    steps: int = STEPS,
) -> Result:
    """Train with the Engine; micro-batch i of a step goes to rank i % N."""
    torch.manual_seed(0)
    engine = hpczero.Engine(make(), settings, comm)
    accumulation = settings["gradient_accumulation_steps"]
    losses, norms = [], []
    for step in range(steps):
        for micro in range(accumulation):
            number = (step * accumulation + micro) * engine.world_size + engine.rank
            value = loss(engine, number)
            engine.backward(value)
            engine.step()
            losses.append(engine.world.mean(value.item()))
        norms.append(engine.grad_norm)
    return Result(losses, engine.full_state_dict(), norms, engine)


def plain(
    make: MakeModel,
    loss: Loss,
    settings: dict[str, Any],
    ranks: int,
    steps: int = STEPS,
) -> Result:
    """Train on one process in fp32 master weights; parameters without gradient step with zero."""
    torch.manual_seed(0)
    model = make()
    half = settings["bf16"]["enabled"]
    if half:
        model = model.bfloat16()
    params = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float().requires_grad_() for p in params] if half else params
    kind = getattr(torch.optim, settings["optimizer"]["type"])
    optimizer = kind(masters, **settings["optimizer"]["params"])
    accumulation, clip = settings["gradient_accumulation_steps"], settings["gradient_clipping"]
    losses, norms = [], []
    for step in range(steps):
        sums = [torch.zeros_like(master) for master in masters]
        for micro in range(accumulation):
            means = [torch.zeros_like(master) for master in masters]
            total = 0.0
            for rank in range(ranks):
                value = loss(model, (step * accumulation + micro) * ranks + rank)
                total += value.item()
                (value / accumulation).backward()
                for mean, param in zip(means, params, strict=True):
                    if param.grad is not None:
                        mean += param.grad.to(mean.dtype)
                        param.grad = None
            losses.append(total / ranks)
            for accumulated, mean in zip(sums, means, strict=True):
                mean /= ranks
                accumulated += mean.bfloat16().float() if half and accumulation == 1 else mean
        for master, accumulated in zip(masters, sums, strict=True):
            master.grad = accumulated
        norms.append(
            torch.nn.utils.clip_grad_norm_(masters, clip or float("inf")).item() if masters else 0.0
        )
        optimizer.step()
        optimizer.zero_grad()
        if half:
            for master, param in zip(masters, params, strict=True):
                param.data.copy_(master.data)
    state = {name: value.detach().float() for name, value in model.state_dict().items()}
    if half:
        names = {id(p): n for n, p in model.named_parameters()}
        for master, param in zip(masters, params, strict=True):
            state[names[id(param)]] = master.detach()
    return Result(losses, state, norms, None)


def assert_same_bits(results: Sequence[Result]) -> None:
    """Compare losses, norms and weights of several runs bit for bit."""
    first = results[0]
    for other in results[1:]:
        assert other.losses == first.losses
        assert other.norms == first.norms
        assert other.state.keys() == first.state.keys()
        for name, value in first.state.items():
            assert torch.equal(other.state[name], value), name


def assert_close(result: Result, reference: Result, half: bool = False) -> None:
    """Compare a run with the plain one to rounding (bf16: to bf16's rounding)."""
    tolerance = 3e-2 if half else 2e-5
    torch.testing.assert_close(
        torch.tensor(result.losses), torch.tensor(reference.losses), rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(
        torch.tensor(result.norms), torch.tensor(reference.norms), rtol=tolerance, atol=tolerance
    )
    for name, value in result.state.items():
        other = reference.state[name].to(value.dtype)
        if half:  # Adam turns a tiny gradient's rounding into whole steps: compare on the whole
            distance = (value.float() - other.float()).abs().mean() if value.numel() else 0.0
            assert distance < LR, name
        else:
            torch.testing.assert_close(value, other, rtol=1e-3, atol=1e-4, msg=f"{name} differs")
