"""Adam and LAMB in torch operations: the twin, bit for bit, of every compiled kernel.

Uses only mul, add, sub, div and sqrt, each rounding once: `add(alpha=)`, `addcmul` and `lerp` fuse
multiply and add on some builds and would make bits depend on the machine. So the result depends
neither on how the vector is cut nor on threads or instruction set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from hpczero.gpu.norm import sum_of_squares

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
    tile_size: int = TILE,
) -> None:
    """Update flat `master` and moments in place from a gradient of any dtype.

    The new master is rounded into `weights`, which may be `master` itself. Costs two tiles.
    """
    size = min(tile_size, master.numel())
    scratch = (torch.empty(size, dtype=master.dtype), torch.empty(size, dtype=master.dtype))
    for tile in _tiles(0, master.numel(), tile_size):
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
    _average(g, moment1, moment2, c.beta1, c.beta2, t)
    _root_(t.copy_(moment2))
    t.div_(math.sqrt(1 - c.beta2**c.step)).add_(c.eps)
    torch.div(moment1, t, out=t)
    t.mul_(c.lr / (1 - c.beta1**c.step))
    master.sub_(t)


def _root_(t: torch.Tensor) -> None:
    """Take square roots in place, rounded once: torch's, by MKL, are an ulp off for one in five."""
    root = t.numpy()
    np.sqrt(root, out=root)


@dataclass(frozen=True, slots=True)
class LambStep:
    """Hold the constants of one LAMB step (step counts from 1)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction: bool
    eps_inside_sqrt: bool
    step: int
    scale: float = 1.0
    """Factor on the gradient: clipping and loss scale in one."""

    @property
    def size(self) -> float:
        """Return the factor on the update, beside the trust ratio: lr and bias correction."""
        if not self.bias_correction:
            return self.lr
        return self.lr * math.sqrt(1 - self.beta2**self.step) / (1 - self.beta1**self.step)


def lamb_moments_(
    master: torch.Tensor,
    grad: torch.Tensor,
    moment1: torch.Tensor,
    moment2: torch.Tensor,
    constants: LambStep,
    tile_size: int = TILE,
) -> tuple[float, float]:
    """Update flat moments in place; return the sums of squares of the weights and of their update.

    The sums are float64, in fixed blocks that `tile_size` doesn't change. Costs two tiles.
    """
    c = constants
    update = torch.empty(min(TILE, master.numel()), dtype=master.dtype)
    scratch = torch.empty(min(tile_size, master.numel()), dtype=master.dtype)
    weights_squared = update_squared = 0.0
    for block in _tiles(0, master.numel(), TILE):
        for tile in _tiles(block.start, block.stop, tile_size):
            u = update[tile.start - block.start : tile.stop - block.start]
            t = scratch[: u.numel()]
            u.copy_(grad[tile])
            if c.scale != 1.0:
                u.mul_(c.scale)
            _average(u, moment1[tile], moment2[tile], c.beta1, c.beta2, t)
            _lamb_update(master[tile], moment1[tile], moment2[tile], c, u, t)
        weights_squared += sum_of_squares(master[block])
        update_squared += sum_of_squares(update[: block.stop - block.start])
    return weights_squared, update_squared


def lamb_(
    weights: torch.Tensor,
    master: torch.Tensor,
    moment1: torch.Tensor,
    moment2: torch.Tensor,
    constants: LambStep,
    ratio: float,
    tile_size: int = TILE,
) -> None:
    """Update flat `master` in place with moments that are already updated, and a trust ratio.

    The new master is rounded into `weights`, which may be `master` itself. Costs two tiles.
    """
    size = min(tile_size, master.numel())
    scratch = (torch.empty(size, dtype=master.dtype), torch.empty(size, dtype=master.dtype))
    for tile in _tiles(0, master.numel(), tile_size):
        u, t = (part[: tile.stop - tile.start] for part in scratch)
        _lamb_update(master[tile], moment1[tile], moment2[tile], constants, u, t)
        u.mul_(constants.size * ratio)
        master[tile].sub_(u)
        if weights.data_ptr() != master.data_ptr():
            weights[tile].copy_(master[tile])


def trust_ratio(
    weights_squared: float, update_squared: float, lowest: float, highest: float
) -> float:
    """Return LAMB's factor from the squared norms: 1 where one is zero, else the clamped ratio."""
    if weights_squared == 0 or update_squared == 0:
        return 1.0
    ratio = math.sqrt(weights_squared) / math.sqrt(update_squared)
    return ratio if math.isnan(ratio) else min(max(ratio, lowest), highest)


def _tiles(start: int, stop: int, size: int) -> Iterator[slice]:
    return (slice(a, min(a + size, stop)) for a in range(start, stop, size))


def _average(
    grad: torch.Tensor,
    moment1: torch.Tensor,
    moment2: torch.Tensor,
    beta1: float,
    beta2: float,
    t: torch.Tensor,
) -> None:
    torch.mul(grad, 1 - beta1, out=t)
    moment1.mul_(beta1).add_(t)
    torch.mul(grad, grad, out=t)
    t.mul_(1 - beta2)
    moment2.mul_(beta2).add_(t)


def _lamb_update(
    master: torch.Tensor,
    moment1: torch.Tensor,
    moment2: torch.Tensor,
    c: LambStep,
    u: torch.Tensor,
    t: torch.Tensor,
) -> None:
    if c.eps_inside_sqrt:
        torch.add(moment2, c.eps, out=t)
        _root_(t)
    else:
        _root_(t.copy_(moment2))
        t.add_(c.eps)
    torch.div(moment1, t, out=u)
    if c.weight_decay != 0.0:
        torch.mul(master, c.weight_decay, out=t)
        u.add_(t)
