"""LAMB: Adam whose step each parameter scales by the ratio of two norms of whole tensors.

[Note: LAMB on shards]
The norms of a parameter need all its elements, of which a rank has some. So a step goes over the
weights twice: first all moments, with the sums of squares of this rank's own shard; then, after
one exchange in which the ranks' sums are added in rank order, the weights. The update is worked
out in both passes, so that it is never kept. At stage 0, where each rank updates everything, the
sums come from its own shard all the same: so the ratios are those of the other stages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hpczero.comm.wire import Cargo
from hpczero.comm.world import World
from hpczero.gpu.reference import LambStep, lamb_, lamb_moments_, trust_ratio
from hpczero.partition.bucket import Bucket
from hpczero.partition.segments import Segment


class Lamb(Optimizer):
    """Update weights by LAMB (arXiv 1904.00962, algorithm 2), as DeepSpeed 0.19.8's FusedLamb does.

    With Adam's moments m and v, each parameter takes a step along
    `u = m / (sqrt(v) + eps) + weight_decay * w`, as long as the learning rate times the trust ratio
    `|w| / |u|`, which is clamped and is 1 where a norm is zero. As in DeepSpeed 0.19.8 the bias
    correction `sqrt(1 - beta2^t) / (1 - beta1^t)` is a factor on the learning rate; the paper
    corrects m and v inside u. Under an Engine the norms are of whole parameters, at the price of
    one small exchange per step. Costs two moments per parameter.

    Args:
        params: parameters, or groups of them with their own settings.
        lr: learning rate.
        bias_correction: whether to correct for moments that start at zero.
        betas: decay rates of m and v.
        eps: added to the root of v, or to v under it with `eps_inside_sqrt`.
        weight_decay: part of the update, so that the trust ratio sees it.
        max_grad_norm: only 0: clip by the Engine's `gradient_clipping`, or before the step.
        max_coeff: largest trust ratio.
        min_coeff: smallest trust ratio.
        amsgrad: only False.

    Raises:
        ValueError: a setting is out of its range, or asks for what isn't there.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "amsgrad": amsgrad,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own.

        Raises:
            ValueError: a setting is out of its range.
        """
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return what `closure` returns.

        Raises:
            RuntimeError: a gradient is sparse, or a parameter neither float32 nor float64.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(
        self, parameter: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]
    ) -> None:
        if grad.is_sparse or parameter.dtype not in (torch.float32, torch.float64):
            raise RuntimeError(
                f"Lamb: expected float32 or float64 with a dense gradient, found {parameter.dtype} "
                f"with a {grad.layout} one, for a parameter of shape {tuple(parameter.shape)}: "
                "hpczero.Engine keeps float32 masters of 16-bit parameters"
            )
        weights = parameter.detach().reshape(-1)
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(weights).view(parameter.shape)
            state["exp_avg_sq"] = torch.zeros_like(weights).view(parameter.shape)
        state["step"] += 1
        constants = step_of(group, state, 1.0)
        moments = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
        squares = lamb_moments_(weights, grad.reshape(-1), *moments, constants)
        ratio = trust_ratio(*squares, group["min_coeff"], group["max_coeff"])
        lamb_(weights, weights, *moments, constants, ratio)
        if weights.data_ptr() != parameter.data_ptr():  # not contiguous: it was a copy
            parameter.copy_(weights.view(parameter.shape))


def _check(group: Mapping[str, Any]) -> None:
    lowest, highest = group["min_coeff"], group["max_coeff"]
    expected = {
        "lr": ("at least 0", group["lr"] >= 0),
        "betas": ("two numbers from 0 to below 1", all(0 <= beta < 1 for beta in group["betas"])),
        "eps": ("at least 0", group["eps"] >= 0),
        "weight_decay": ("at least 0", group["weight_decay"] >= 0),
        "max_grad_norm": ("0: clip before the step", group["max_grad_norm"] == 0),
        "min_coeff": (f"more than 0 and at most max_coeff, {highest}", 0 < lowest <= highest),
        "amsgrad": ("False: LAMB has no such variant", not group["amsgrad"]),
        "maximize": ("False: negate the loss", not group.get("maximize")),
    }
    for key, (wish, good) in expected.items():
        if not good:
            raise ValueError(f"Lamb: {key}: expected {wish}; found {group[key]}")


def step_of(group: Mapping[str, Any], state: Mapping[str, Any], scale: float) -> LambStep:
    """Return the constants of the step that `state` has counted already."""
    return LambStep(
        lr=float(group["lr"]),
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        bias_correction=bool(group["bias_correction"]),
        eps_inside_sqrt=bool(group["eps_inside_sqrt"]),
        step=int(state["step"].item()),
        scale=scale,
    )


def lamb_step(
    optimizer: Lamb,
    owned: Sequence[tuple[Segment, Mapping[str, Any]]],
    buckets: Sequence[Bucket],
    world: World,
    scale: float,
    tile_size: int,
) -> None:
    """Update segments, each within one parameter, by their groups' settings; all ranks call.

    See [Note: LAMB on shards]. Costs the exchange of two float64 per trainable parameter of the
    model, and four tiles.
    """
    params = [parameter for bucket in buckets for parameter in bucket.params]
    if not params:
        return
    numbers = {id(parameter): number for number, parameter in enumerate(params)}
    starts = {id(bucket): [slot.start for slot in bucket.layout.slots] for bucket in buckets}
    squares = torch.zeros(len(params), 2, dtype=torch.float64)
    updates = []
    # 1. Moments, and the sums over this rank's shard.
    for segment, group in owned:
        bucket, state = segment.bucket, optimizer.state[segment.master]
        start = bucket.span[0] + segment.start
        index = bisect_right(starts[id(bucket)], start) - 1
        edges = (bucket.layout.slots[index].stop, *bucket.layout.interval(world.rank))
        stop, lo, hi = (min(max(edge - start, 0), segment.master.numel()) for edge in edges)
        lo, hi = min(lo, stop), min(hi, stop)
        state["step"] += 1
        constants = step_of(group, state, scale)
        own = slice(lo, hi)
        number = numbers[id(bucket.params[index])]
        for piece in (slice(0, lo), own, slice(hi, stop)):
            sums = lamb_moments_(
                segment.of(bucket.master)[piece],
                segment.of(bucket.gradient)[piece],
                state["exp_avg"][piece],
                state["exp_avg_sq"][piece],
                constants,
                tile_size,
            )
            if piece is own:
                squares[number] = torch.tensor(sums, dtype=torch.float64)
        updates.append((segment, group, constants, number, stop))
    # 2. The sums over all ranks.
    cargo = Cargo("exchange", "norms of LAMB", 0)
    with world.timeline.wait("exchange", "norms"):
        records = world.reductions.exchange(cargo, squares.numpy().tobytes()).result()
    squares.zero_()
    for record in records:
        squares += torch.frombuffer(bytearray(record), dtype=torch.float64).view(-1, 2)
    # 3. Weights.
    for segment, group, constants, number, stop in updates:
        bucket, state = segment.bucket, optimizer.state[segment.master]
        weights_squared, update_squared = squares[number].tolist()
        lamb_(
            segment.of(bucket.weights)[:stop],
            segment.of(bucket.master)[:stop],
            state["exp_avg"][:stop],
            state["exp_avg_sq"][:stop],
            constants,
            trust_ratio(weights_squared, update_squared, group["min_coeff"], group["max_coeff"]),
            tile_size,
        )
