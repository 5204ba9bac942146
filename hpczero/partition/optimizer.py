"""The update of the shards: any elementwise optimizer, or LAMB, on what this rank owns."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hpczero.comm.world import World
from hpczero.gpu.adam import kernel_name
from hpczero.gpu.reference import TILE, AdamStep
from hpczero.infinity.tier import Part
from hpczero.partition import states
from hpczero.partition.bucket import Bucket
from hpczero.partition.lamb import Lamb, lamb_step
from hpczero.partition.layout import ALIGN
from hpczero.partition.segments import (
    Segment,
    assign,
    batches,
    by_parameter,
    by_size,
    cut,
    replace,
)
from hpczero.partition.update import Update, Updater, part_size

CLIP_EPSILON = 1e-6
"""As torch.nn.utils.clip_grad_norm_; enters once, on the global norm."""

OURS = (torch.optim.Adam, torch.optim.AdamW, Lamb)
"""Optimizers whose update is our own kernel, with the same constants and states."""

Factory = Callable[[list[dict[str, Any]]], Optimizer]


class ShardedOptimizer:
    """Run a torch optimizer on the intervals that this rank updates.

    Args:
        optimizer: an instance over the model's parameters, whose groups are kept and rewritten to
            segments, or a factory from groups.
        groups: the parameters, with their hyperparameters, if `optimizer` is a factory.
        buckets: all of the model, in layout order.
        world: the ranks.
        sub_group_size: elements updated at a time, rounded down to a multiple of 64 but at least
            64; None is a bucket's whole interval. Bounds the gradient that torch's optimizers get
            in the dtype of the masters, and changes no bit of the result. Ours work in tiles of
            65536 anyway.

    Raises:
        ValueError: the optimizer has state, misses a parameter or has foreign ones, or its update
            is neither elementwise nor LAMB's.
    """

    def __init__(
        self,
        optimizer: Optimizer | Factory,
        groups: Sequence[Mapping[str, Any]] | None,
        buckets: Sequence[Bucket],
        world: World,
        sub_group_size: int | None = None,
    ) -> None:
        self._world = world
        self._buckets = [bucket for bucket in buckets if bucket.trainable]
        self.steps = 0
        """Updates done, overflowed ones not counted."""
        if isinstance(optimizer, Optimizer):
            used = [state for state in optimizer.state.values() if state.get("step", 1) != 0]
            if used:
                raise ValueError(
                    f"expected a {type(optimizer).__name__} without state, found state of "
                    f"{len(used)} parameters: give it to hpczero before its first step"
                )
            groups = optimizer.param_groups
        assert groups is not None
        made = list(cut(self._buckets, assign(self._buckets, groups)))
        masters = [
            [segment.master for group, segment in made if group == index]
            for index in range(len(groups))
        ]
        if isinstance(optimizer, Optimizer):
            refuse_unless_elementwise(type(optimizer), optimizer.defaults)
            eager = bool(optimizer.state)
            for group, params in zip(optimizer.param_groups, masters, strict=True):
                group["params"] = params
            self.inner = optimizer
            if eager:  # Adagrad, say, makes its states when it is made
                twin = _like(type(optimizer), optimizer.defaults, optimizer.param_groups)
                optimizer.state = twin.state
        else:
            self.inner = optimizer(
                [{**group, "params": params} for group, params in zip(groups, masters, strict=True)]
            )
            refuse_unless_elementwise(type(self.inner), self.inner.defaults)
        self._ours = type(self.inner) in OURS and not any(
            group.get(flag) for group in self.inner.param_groups for flag in ("amsgrad", "maximize")
        )
        self._limit = max(ALIGN, sub_group_size // ALIGN * ALIGN) if sub_group_size else None
        self._segments = self._refine([segment for _, segment in made])
        self._by_master = {id(segment.master): segment for segment in self._segments}
        self._refuse_unless_streamed()
        self._accounted = dict.fromkeys(self._buckets, 0)
        """Bytes of the states that torch's optimizer has made."""
        self._account()
        self._updater = Updater()
        if self._ours:
            for segment in self._segments:
                self.inner.state[segment.master] = {
                    "step": torch.zeros(()),
                    "exp_avg": segment.of(segment.bucket.state("exp_avg")),
                    "exp_avg_sq": segment.of(segment.bucket.state("exp_avg_sq")),
                }
            # Weak: a scheduler of the user's may keep the optimizer for longer than the engine is.
            settle, adopt = weakref.WeakMethod(self._settle), weakref.WeakMethod(self._adopt)
            self.inner.register_state_dict_pre_hook(lambda _: _call(settle))
            self.inner.register_load_state_dict_pre_hook(lambda *_: _call(settle))
            self.inner.register_load_state_dict_post_hook(lambda _: _call(adopt))

    def _refine(self, segments: Sequence[Segment]) -> list[Segment]:
        """Cut segments as the kind of optimizer needs it; our Adam needs nothing."""
        if type(self.inner) is Lamb:
            parts = {id(segment.master): by_parameter(segment) for segment in segments}
        elif self._limit is not None and not self._ours:
            parts = {id(segment.master): by_size(segment, self._limit) for segment in segments}
        else:
            return list(segments)
        replace(self.inner, parts)
        return [part for segment in segments for part in parts[id(segment.master)]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the live parameter groups."""
        return self.inner.param_groups

    @property
    def kernel(self) -> str:
        """Return what updates the weights: "C++ (AVX-512)", say, or "torch"."""
        return kernel_name() if self._ours and not isinstance(self.inner, Lamb) else "torch"

    def norm_squared(self) -> float:
        """Return this rank's part of the squared gradient norm: its shards', in fixed blocks.

        Shards and blocks are the same at every stage, so the sum over ranks in rank order is too.
        Not finite exactly where a gradient isn't.
        """
        total = 0.0
        for bucket in self._buckets:
            total += bucket.squares()
        return total

    def first_not_finite(self) -> tuple[int, str] | None:
        """Return place and name of the first parameter with inf or nan in this rank's shards."""
        for index, bucket in enumerate(self._buckets):
            found = bucket.first_not_finite()
            if found is not None:
                return index, found
        return None

    @property
    def streams(self) -> bool:
        """Tell whether an update goes on after `step`: some of what it needs is elsewhere."""
        return not all(bucket.resident for bucket in self._buckets)

    @property
    def staged(self) -> bool:
        """Tell whether updates leave the weights alone until they are taken over."""
        return any(bucket.staged for bucket in self._buckets)

    def join(self) -> None:
        """Wait until the last update is complete.

        Raises:
            OSError: a file can't be read or written.
        """
        with self._world.timeline.wait("update", "update"):
            self._updater.join()

    def step(self, scale: float) -> None:
        """Update all owned weights with the reduced gradients times `scale`.

        All ranks call: LAMB costs an exchange, other optimizers no communication. Where it
        `streams`, it goes on in a thread; each bucket says when it is `updated`.
        """
        self.steps += 1
        for bucket in self._buckets:
            bucket.count_update()
        if self._ours:
            tile_size = min(TILE, self._limit or TILE)
            owned = [
                (self._by_master[id(master)], group)
                for group in self.inner.param_groups
                for master in group["params"]
            ]
            if isinstance(self.inner, Lamb):
                lamb_step(self.inner, owned, self._buckets, self._world, scale, tile_size)
            else:
                self._adam(owned, scale, tile_size)
            self.inner.step()  # nothing has a gradient: only its hooks and schedulers' marks act
            return
        known = len(self.inner.state)
        for batch in batches(self._segments, self._limit or math.inf):
            bucket = batch[0].bucket
            for segment in batch:
                segment.master.grad = segment.of(bucket.gradient).to(
                    segment.master.dtype, copy=True
                )
                if scale != 1.0:
                    segment.master.grad.mul_(scale)
            self.inner.step()
            for segment in batch:
                segment.master.grad = None
                if bucket.weights.data_ptr() != bucket.master.data_ptr():
                    segment.of(bucket.weights).copy_(segment.master.detach())
        if known != len(self.inner.state):  # torch makes states at the first step
            self._account()

    def _settle(self) -> None:
        """See before `state_dict` and `load_state_dict` that all states are here and complete."""
        in_files = [bucket.name for bucket in self._buckets if bucket.states_on == "file"]
        if in_files:
            raise RuntimeError(
                f"expected states in memory, found those of {len(in_files)} buckets in files "
                f"({in_files[0]!r} first): engine.full_optimizer_state() returns them, "
                "engine.save_checkpoint() and load_checkpoint() keep them"
            )
        self.join()

    def _adopt(self) -> None:
        """Move what `load_state_dict` has brought to where updates look for it."""
        for segment in self._segments:
            state = self.inner.state[segment.master]
            for kind in ("exp_avg", "exp_avg_sq"):
                kept = segment.of(segment.bucket.state(kind))
                kept.copy_(state[kind]) if kind in state else kept.zero_()
                state[kind] = kept
            state.setdefault("step", torch.zeros(()))

    def full_state(self) -> dict[str, dict[str, Any]]:
        """Return each parameter's state, whole, on rank 0, {} elsewhere; all ranks call.

        Costs one collective per bucket and kind of state, and one for the names of all.
        """
        mine = [(self.owned_states(bucket), self.describe(bucket)) for bucket in self._buckets]
        names = [
            ({k: part.tensor.dtype for k, part in owned.items()}, told) for owned, told in mine
        ]
        everyone = self._world.gathers.exchange_objects("optimizer_state", names).result()
        result: dict[str, dict[str, Any]] = {}
        for index, bucket in enumerate(self._buckets):
            dtypes: dict[str, torch.dtype] = {}
            told: dict[str, states.Saved] = {}
            for other in everyone:
                dtypes |= other[index][0]
                told |= other[index][1]
            owned = mine[index][0]
            for kind, dtype in dtypes.items():
                if kind in owned:
                    values = owned[kind].values(0, bucket.layout.shard)
                else:
                    values = torch.zeros(bucket.layout.shard, dtype=dtype)
                full = bucket.collect(values, "optimizer_state")
                for name, value in bucket.named(full):
                    if kind in told.get(name, ((kind,), {}))[0]:
                        result.setdefault(name, {})[kind] = value.clone()
            shared = next(iter(told.values()), ((), {}))[1]
            for slot in bucket.layout.slots if bucket.is_root_rank else ():
                # An empty parameter lies in no segment: it has what its neighbours have.
                scalars = told[slot.name][1] if slot.name in told else shared
                result.setdefault(slot.name, {}).update(scalars)
        return result

    def owned_states(self, bucket: Bucket) -> dict[str, Part]:
        """Return the elementwise states over this rank's shard of a bucket, by kind."""
        return bucket.own_states or states.owned(self.inner, self._segments, bucket)

    def describe(self, bucket: Bucket) -> dict[str, states.Saved]:
        """Return kinds and other states of the parameters in this rank's shard of a bucket."""
        return states.describe(self.inner, self._segments, bucket)

    def restore(
        self,
        saved: Mapping[str, states.Saved],
        read: Callable[[str, str, int, int], torch.Tensor],
    ) -> None:
        """Take over saved states of the intervals that this rank updates.

        Args:
            saved: by parameter name; others keep the states that they have.
            read: returns elements [start, stop) of a kind of a parameter.
        """
        # All are cut before any is read: what can't be read must leave a whole optimizer behind.
        self._segments = states.cut(self.inner, self._segments, saved)
        self._by_master = {id(segment.master): segment for segment in self._segments}
        for bucket in self._buckets:
            segments = [segment for segment in self._segments if segment.bucket is bucket]
            with bucket.states_here():
                states.fill(self.inner, segments, saved, read)
        self._account()

    def _adam(
        self, owned: Sequence[tuple[Segment, Mapping[str, Any]]], scale: float, tile_size: int
    ) -> None:
        """Update all segments, walking over the buckets in the order of the layout."""
        inside: dict[int, list[tuple[Segment, AdamStep]]] = {}
        for segment, group in owned:
            state = self.inner.state[segment.master]
            state["step"] += 1
            constants = AdamStep(
                lr=float(group["lr"]),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                decoupled=type(self.inner) is torch.optim.AdamW
                or bool(group.get("decoupled_weight_decay")),
                step=int(state["step"].item()),
                scale=scale,
            )
            inside.setdefault(id(segment.bucket), []).append((segment, constants))
        tasks = [(bucket, bucket.task()) for bucket in self._buckets]
        update = Update(tasks, inside, tile_size, part_size(self._limit))
        if not (self.streams or self.staged):
            update.run()
            return
        for bucket in self._buckets:
            if bucket.staged:
                bucket.flip()
            else:
                bucket.updated = Future()
        self._updater.begin(update)

    def _refuse_unless_streamed(self) -> None:
        elsewhere = any(bucket.states_on == "file" for bucket in self._buckets)
        moves = elsewhere or self.streams or self.staged
        if moves and (not self._ours or isinstance(self.inner, Lamb)):
            raise ValueError(
                "expected Adam or AdamW, which update in parts and in a thread of their own, found "
                f"{type(self.inner).__name__}: use one of them, or keep its states in memory and "
                "its updates undelayed"
            )

    def _account(self) -> None:
        """Account what torch's optimizer has made; ours lies in the buckets, which do so."""
        if self._ours:
            return
        found = dict.fromkeys(self._buckets, 0)
        for segment in self._segments:
            state = self.inner.state.get(segment.master, {})
            found[segment.bucket] += sum(
                value.nbytes for value in state.values() if isinstance(value, torch.Tensor)
            )
        for bucket, nbytes in found.items():
            bucket.account_states(nbytes - self._accounted[bucket])
        self._accounted = found


def clip_scale(norm: float, limit: float) -> float:
    """Return the factor that brings a gradient of this norm to at most `limit` (0: no clipping)."""
    if limit == 0:
        return 1.0
    scale = limit / (norm + CLIP_EPSILON)
    return scale if not scale >= 1.0 else 1.0  # NaN passes, as in torch


def _like(kind: type[Optimizer], defaults: Mapping[str, Any], params: list[Any]) -> Optimizer:
    accepted = inspect.signature(kind.__init__).parameters
    settings = {name: value for name, value in defaults.items() if name in accepted}
    return kind(params, **settings)


def refuse_unless_elementwise(kind: type[Optimizer], defaults: Mapping[str, Any]) -> None:
    """Try an optimizer on a matrix and on its two flat halves: it must do the same.

    Raises:
        ValueError: it doesn't (norms of whole tensors, rows and columns), or can't be tried.
    """
    if kind in OURS:
        return
    generator = torch.Generator().manual_seed(0)
    whole = nn.Parameter(torch.randn(4, 6, generator=generator))
    halves = [nn.Parameter(half.clone()) for half in torch.split(whole.detach().flatten(), 12)]
    cure = "on shards only elementwise updates (SGD, Adam, RMSprop, ...) give the right result"
    try:
        optimizers = _like(kind, defaults, [whole]), _like(kind, defaults, halves)
        for _ in range(3):
            grad = torch.randn(4, 6, generator=generator)
            whole.grad = grad
            for half, part in zip(halves, torch.split(grad.flatten(), 12), strict=True):
                half.grad = part.clone()
            for optimizer in optimizers:
                optimizer.step()
    except Exception as error:
        raise ValueError(
            f"expected an optimizer that works on flat tensors, but {kind.__name__} raised "
            f"{type(error).__name__}: {error}; {cure}"
        ) from error
    flat = torch.cat([half.detach() for half in halves])
    if not torch.allclose(whole.detach().flatten(), flat, rtol=1e-4, atol=1e-6):
        raise ValueError(
            f"expected an elementwise optimizer, but {kind.__name__} updates a matrix otherwise "
            f"than its two flat halves; {cure}"
        )


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    found = method()
    if found is not None:
        found()
