"""DeepSpeed's schedules of the learning rate, as torch schedulers.

[Note: update n] A schedule's `last_epoch` is the number of updates done, as with any torch
scheduler: 0 after construction, n - 1 when update n runs. DeepSpeed 0.19.8 counts the same updates
from -1 (`last_batch_iteration`). So update 1 has the rate of the iteration -1, which is the lowest;
where a warm-up starts at rate 0, the updates 1 and 2 change no weight (iterations -1 and 0). That
is DeepSpeed's, to the bit. `warmup_counts_from_one`, a key of ours, mends it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_type_hints

import torch
from pydantic import Field, ValidationError, create_model
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hpczero.errors import ConfigError
from hpczero.schema import Integer, NotNegative, Number, Positive, Section, explain, guess

Rates = NotNegative | list[NotNegative]
"""One for all parameter groups, or one for each."""
Momenta = Rates
Warmup = Literal["log", "linear"]
Count = Annotated[Integer, Field(ge=0)]


class Schedule(LRScheduler):
    """Set all groups' rates from the number of updates done; saves that number only.

    So on resume the config's parameters hold, as in DeepSpeed.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates done, in DeepSpeed's terms."""
        return {"last_batch_iteration": self.last_epoch - 1}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on after the updates that had been done, and set the groups' rates accordingly."""
        self.last_epoch = state_dict["last_batch_iteration"]
        self._initial_step()  # without torch's check that the optimizer stepped first
        self._step_count = self.last_epoch + 1

    def _per_group(self, value: float | Sequence[float] | None, key: str) -> list[Any]:
        groups = self.optimizer.param_groups
        if value is None:
            return list(self.base_lrs)
        if not isinstance(value, Sequence):
            return [value] * len(groups)
        if len(value) != len(groups):
            raise ConfigError(
                [f"{key}: expected a value per parameter group ({len(groups)}), found {len(value)}"]
            )
        return list(value)


class _Warmup(Schedule):
    """Share the warm-up of three schedules."""

    def __init__(self, optimizer: Optimizer, steps: int, kind: Warmup, from_one: bool) -> None:
        self._steps = max(2, steps)
        self._kind = kind
        self._from_one = from_one
        super().__init__(optimizer)

    @property
    def _fraction(self) -> float | None:
        """Return how far the warm-up is, None once it is over."""
        index = max(0, self.last_epoch + 1 if self._from_one else self.last_epoch - 1)
        if index >= self._steps:
            return None
        if self._kind == "linear":
            return index / self._steps
        return 1.0 / math.log(self._steps) * math.log(index + 1)

    @property
    def _index(self) -> int:
        """Return the iteration that a decay counts with."""
        return self.last_epoch if self._from_one else self.last_epoch - 1


class WarmupLR(_Warmup):
    """Raise the rate from `warmup_min_lr` to `warmup_max_lr`, and stay there.

    Update n has min + (max - min) * g, where i = max(n - 2, 0), N = max(2, warmup_num_steps) and
    g = log(i + 1) / log(N), or i / N if linear, while i < N, then 1. With
    `warmup_counts_from_one`, i = n: update 1 has 1 / N of the way, update N all of it.

    Args:
        optimizer: whose groups get the rates.
        warmup_min_lr: one rate, or one per group.
        warmup_max_lr: the same; None is the group's own lr.
        warmup_num_steps: N.
        warmup_type: how the rate grows.
        last_batch_iteration: -1; a checkpoint says where to go on.
        warmup_counts_from_one: ours: waste no update at the lowest rate.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: Positive = 1000,
        warmup_type: Warmup = "log",
        last_batch_iteration: Literal[-1] = -1,
        warmup_counts_from_one: bool = False,
    ) -> None:
        self._bounds = (warmup_min_lr, warmup_max_lr)
        super().__init__(optimizer, warmup_num_steps, warmup_type, warmup_counts_from_one)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return each group's rate for the next update."""
        lows = self._per_group(self._bounds[0], "warmup_min_lr")
        highs = self._per_group(self._bounds[1], "warmup_max_lr")
        fraction = self._fraction
        share = self._after() if fraction is None else fraction
        return [low + (high - low) * share for low, high in zip(lows, highs, strict=True)]

    def _after(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Raise the rate as WarmupLR does, then let it fall linearly to `warmup_min_lr`.

    After the warm-up g = max(0, (total_num_steps - i) / max(1, total_num_steps - N)), where
    i = n - 2 in update n; with `warmup_counts_from_one`, i = n - 1, and g is at most 1.

    Args:
        optimizer: whose groups get the rates.
        total_num_steps: updates in the whole run.
        warmup_min_lr: one rate, or one per group.
        warmup_max_lr: the same; 0.001 unless given, whatever the optimizer's lr is (DeepSpeed's
            default); "auto" is the group's own lr.
        warmup_num_steps: N.
        warmup_type: how the rate grows.
        last_batch_iteration: -1; a checkpoint says where to go on.
        warmup_counts_from_one: ours: waste no update at the lowest rate.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: Positive,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = 0.001,
        warmup_num_steps: Positive = 1000,
        warmup_type: Warmup = "log",
        last_batch_iteration: Literal[-1] = -1,
        warmup_counts_from_one: bool = False,
    ) -> None:
        self._total = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
            warmup_counts_from_one,
        )

    def _after(self) -> float:
        left = float(self._total - self._index) / float(max(1.0, self._total - self._steps))
        return min(1.0, max(0.0, left))


class WarmupCosineLR(_Warmup):
    """Raise the rate to the group's own lr, then let it fall along a cosine.

    Update n has lr * (m + (1 - m) * g) with WarmupLR's g and m = warmup_min_ratio while it lasts
    (update 1 has 0, whatever m is), then lr * (c + (1 - c) * (1 + cos(pi * p)) / 2), where
    c = cos_min_ratio and p = min(1, (i - N + 1) / max(1, total_num_steps - N)), i = n - 2. With
    `warmup_counts_from_one`, i = n - 1, and update 1 is part of the warm-up.

    Args:
        optimizer: whose groups get the rates.
        total_num_steps: updates in the whole run.
        warmup_min_ratio: share of the rate with which the warm-up starts.
        warmup_num_steps: N.
        cos_min_ratio: share of the rate at the end.
        warmup_type: how the rate grows.
        last_batch_iteration: -1; a checkpoint says where to go on.
        warmup_counts_from_one: ours: waste no update at the lowest rate.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: Positive,
        warmup_min_ratio: NotNegative = 0.0,
        warmup_num_steps: Positive = 1000,
        cos_min_ratio: NotNegative = 0.0001,
        warmup_type: Warmup = "log",
        last_batch_iteration: Literal[-1] = -1,
        warmup_counts_from_one: bool = False,
    ) -> None:
        self._total = total_num_steps
        self._ratios = (warmup_min_ratio, cos_min_ratio)
        super().__init__(optimizer, warmup_num_steps, warmup_type, warmup_counts_from_one)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return each group's rate for the next update."""
        return [lr * self._ratio() for lr in self.base_lrs]

    def _ratio(self) -> float:
        start, end = self._ratios
        if self._index < 0:
            return 0.0
        fraction = self._fraction
        if fraction is not None:
            return start + fraction * (1.0 - start)
        progress = (self._index - self._steps + 1) / max(1, self._total - self._steps)
        cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
        return max(0.0, end + (1.0 - end) * cosine)


class OneCycle(Schedule):
    """Raise the rate and lower it again in one cycle, then let it decay; Adam's beta1 mirrors it.

    In update n, with t = n - 1 and a cycle of F + S = cycle_first_step_size +
    cycle_second_step_size: min + (max - min) * s, where s = t / F up to F, then
    (F + S - t) / S, each in steps of 1 / stair count if that isn't 0; once t > F + S,
    min / (1 + decay_lr_rate * (t - F - S) / decay_step_size). Where the groups have betas and
    cycle_momentum is true, they become (max_mom - (max_mom - min_mom) * s, 0.99), in update 1
    (min_mom, 0.99), and after the cycle max_mom * (1 + decay_mom_rate * ...): as DeepSpeed has
    it, beta2 is 0.99, and momentum grows where the rate decays.

    Args:
        optimizer: whose groups get the rates.
        cycle_min_lr: one rate, or one per group.
        cycle_max_lr: the same.
        decay_lr_rate: speed of the decay.
        cycle_first_step_size: F.
        cycle_second_step_size: S; None is F.
        cycle_first_stair_count: stairs on the way up, 0 for a ramp.
        cycle_second_stair_count: on the way down; None is the same number.
        decay_step_size: updates in a unit of decay; 0 doesn't decay.
        cycle_momentum: set the betas too.
        cycle_min_mom: smallest beta1, one or one per group.
        cycle_max_mom: largest beta1.
        decay_mom_rate: speed of the momentum's change after the cycle.
        last_batch_iteration: -1; a checkpoint says where to go on.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: Number = 0.0,
        cycle_first_step_size: Annotated[Number, Field(gt=0)] = 2000,
        cycle_second_step_size: NotNegative | None = None,
        cycle_first_stair_count: Count = 0,
        cycle_second_stair_count: Count | None = None,
        decay_step_size: NotNegative = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Momenta = 0.8,
        cycle_max_mom: Momenta = 0.9,
        decay_mom_rate: Number = 0.0,
        last_batch_iteration: Literal[-1] = -1,
    ) -> None:
        first = float(cycle_first_step_size)
        second = first if cycle_second_step_size is None else float(cycle_second_step_size)
        up = cycle_first_stair_count
        down = up if cycle_second_stair_count is None else cycle_second_stair_count
        self._sizes = (first, second)
        self._stairs = (up, down)
        self._lrs = (cycle_min_lr, cycle_max_lr)
        self._moms = (cycle_min_mom, cycle_max_mom)
        self._cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        self._decay = (decay_step_size, decay_lr_rate, decay_mom_rate)
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        """Set rates and betas for the next update."""
        super().step(epoch)
        if self._cycle_momentum:
            for group, beta1 in zip(self.optimizer.param_groups, self._beta1(), strict=True):
                group["betas"] = (beta1, 0.99)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return each group's rate for the next update."""
        lows = self._per_group(self._lrs[0], "cycle_min_lr")
        highs = self._per_group(self._lrs[1], "cycle_max_lr")
        if self._cycling:
            scale = self._scale()
            return [low + (high - low) * scale for low, high in zip(lows, highs, strict=True)]
        size, rate, _ = self._decay
        return [low / self._factor(size, rate) for low in lows]

    @property
    def _cycling(self) -> bool:
        return self.last_epoch - 1 < sum(self._sizes)

    def _beta1(self) -> list[float]:
        lows = self._per_group(self._moms[0], "cycle_min_mom")
        highs = self._per_group(self._moms[1], "cycle_max_mom")
        if self.last_epoch == 0:
            return lows
        if self._cycling:
            scale = self._scale()
            return [high - (high - low) * scale for low, high in zip(lows, highs, strict=True)]
        size, _, rate = self._decay
        return [high * self._factor(size, rate) for high in highs]

    def _factor(self, size: float, rate: float) -> float:
        if math.isclose(size, 0) or math.isclose(rate, 0):
            return 1.0
        return 1 + rate * ((self.last_epoch - sum(self._sizes)) / size)

    def _scale(self) -> float:
        """Return how high in the cycle the next update is."""
        first, second = self._sizes
        total = first + second
        ratio = first / total
        # In DeepSpeed's order of operations, for the same bits.
        x = 1.0 + self.last_epoch / total - math.floor(1 + self.last_epoch / total)
        rising = x <= ratio
        stairs = self._stairs[0 if rising else 1]
        if stairs == 0:
            return x / ratio if rising else (x - 1) / (ratio - 1)
        at = self.last_epoch % total
        position = at * stairs / first if at <= first else (total - at) * stairs / second
        return math.floor(position) / stairs


class LRRangeTest(Schedule):
    """Raise the rate without end, to see from where on training diverges.

    Update n has min * (1 + step_rate * (n - 1) / step_size); with the staircase the quotient is
    rounded down.

    Args:
        optimizer: whose groups get the rates.
        lr_range_test_min_lr: min, one or one per group.
        lr_range_test_step_size: updates in a unit of growth.
        lr_range_test_step_rate: growth per unit.
        lr_range_test_staircase: grow in stairs.
        last_batch_iteration: -1; a checkpoint says where to go on.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: Positive = 2000,
        lr_range_test_step_rate: Number = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: Literal[-1] = -1,
    ) -> None:
        self._min_lr = lr_range_test_min_lr
        self._size = lr_range_test_step_size
        self._rate = lr_range_test_step_rate
        self._staircase = lr_range_test_staircase
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return each group's rate for the next update."""
        interval = float(self.last_epoch) / self._size
        if self._staircase:
            interval = math.floor(interval)
        growth = 1 + self._rate * interval
        return [low * growth for low in self._per_group(self._min_lr, "lr_range_test_min_lr")]


SCHEDULES: Mapping[str, type[Schedule]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def build(type: str, params: Mapping[str, Any], optimizer: Optimizer) -> LRScheduler:  # noqa: A002
    """Return a schedule of DeepSpeed's or torch's, by its name there.

    Raises:
        ConfigError: all problems of the name and the parameters.
    """
    found = problems(type, params)
    if found:
        raise ConfigError(found)
    kind = SCHEDULES.get(type)
    try:
        if kind is not None:
            return kind(optimizer, **_values(type, params))
        scheduler: LRScheduler = _torch_schedules()[type](optimizer, **params)
    except ConfigError as error:
        raise ConfigError([f"scheduler.params.{line}" for line in error.problems]) from None
    except Exception as error:  # torch's own checks raise all sorts
        raise ConfigError([f"scheduler.params: torch's {type}: {error}"]) from error
    return scheduler


def problems(type: str, params: Mapping[str, Any]) -> list[str]:  # noqa: A002
    """Return what is wrong with a schedule's name and parameters, without building it."""
    if type in SCHEDULES:
        try:
            _values(type, params)
        except ValidationError as error:
            return explain(error, _section(type), "scheduler.params.")
        return []
    theirs = _torch_schedules()
    if type not in theirs:
        return [f"scheduler.type: unknown schedule {type!r}: {guess(type, [*SCHEDULES, *theirs])}"]
    accepted = dict(inspect.signature(theirs[type]).parameters)
    del accepted["optimizer"]
    unknown = [
        f"unknown key 'scheduler.params.{key}': {guess(key, accepted)}"
        for key in params
        if key not in accepted
    ]
    return unknown + [
        f"scheduler.params.{key}: missing"
        for key, parameter in accepted.items()
        if parameter.default is parameter.empty and key not in params
    ]


def _values(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked parameters that were given."""
    values = dict(_section(name).model_validate(dict(params)))
    values = {key: value for key, value in values.items() if params.get(key) is not None}
    if params.get("warmup_max_lr") == "auto":
        values["warmup_max_lr"] = None  # what transformers puts there is the optimizer's lr
    return values


@functools.cache
def _section(name: str) -> type[Section]:
    """Return the parameters of a schedule's constructor as a section."""
    constructor = SCHEDULES[name].__init__
    hints = get_type_hints(constructor, include_extras=True)
    fields: dict[str, Any] = {
        key: (hints[key], ... if parameter.default is parameter.empty else parameter.default)
        for key, parameter in inspect.signature(constructor).parameters.items()
        if key not in ("self", "optimizer")
    }
    section: type[Section] = create_model(name, __base__=Section, **fields)
    return section


@functools.cache
def _torch_schedules() -> dict[str, type[LRScheduler]]:
    """Return torch's schedules; one whose step() needs a metric can't run by itself."""
    return {
        name: kind
        for name, kind in vars(torch.optim.lr_scheduler).items()
        if isinstance(kind, type)
        and issubclass(kind, LRScheduler)
        and kind not in (LRScheduler, ReduceLROnPlateau)
        and not name.startswith("_")
    }
