"""Adam in torch operations: the twin, bit for bit, of every compiled kernel.

Uses only mul, add, sub, div and sqrt, each rounding once: `add(alpha=)`, `addcmul` and `lerp` fuse
multiply and add on some builds and would make bits depend on the machine. So the result depends
neither on how the vector is cut nor on threads or instruction set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

TILE = 65536
"""Elements updated at a time, so that intermediate results stay in the cache."""


@dataclass(frozen=True, slots=True)
class AdamStep:
    """Hold the constants of one Adam or AdamW step (step counts from 1)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    """AdamW: decay the weights; else Adam: add the decay to the gradient."""
    step: int
    scale: float = 1.0
    """Factor on the gradient: clipping and loss scale in one."""


def adam_(
    weights: torch.Tensor,
    master: torch.Tensor,
    grad: torch.Tensor,
    moment1: torch.Tensor,
    moment2: torch.Tensor,
    constants: AdamStep,
) -> None:
    """Update flat `master` and moments in place from a gradient of any dtype.

    The new master is rounded into `weights`, which may be `master` itself. Costs two tiles.
    """
    size = min(TILE, master.numel())
    scratch = (torch.empty(size, dtype=master.dtype), torch.empty(size, dtype=master.dtype))
    for start in range(0, master.numel(), TILE):
        tile = slice(start, min(start + TILE, master.numel()))
        _adam_tile(master[tile], grad[tile], moment1[tile], moment2[tile], constants, scratch)
        if weights.data_ptr() != master.data_ptr():
            weights[tile].copy_(master[tile])


def _adam_tile(
    master: torch.Tensor,
    grad: torch.Tensor,
    moment1: torch.Tensor,
    moment2: torch.Tensor,
    c: AdamStep,
    scratch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    g, t = scratch[0][: master.numel()], scratch[1][: master.numel()]
    g.copy_(grad)
    if c.scale != 1.0:
        g.mul_(c.scale)
    if c.weight_decay != 0.0:
        if c.decoupled:
            master.mul_(1 - c.lr * c.weight_decay)
        else:
            torch.mul(master, c.weight_decay, out=t)
            g.add_(t)
    torch.mul(g, 1 - c.beta1, out=t)
    moment1.mul_(c.beta1).add_(t)
    torch.mul(g, g, out=t)
    t.mul_(1 - c.beta2)
    moment2.mul_(c.beta2).add_(t)
    torch.sqrt(moment2, out=t)
    t.div_(math.sqrt(1 - c.beta2**c.step)).add_(c.eps)
    torch.div(moment1, t, out=t)
    t.mul_(c.lr / (1 - c.beta1**c.step))
    master.sub_(t)
