"""When units are gathered and released: the hooks on the user's modules."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hpczero.comm import watch
from hpczero.comm.wire import Cargo
from hpczero.comm.world import World
from hpczero.config import ZeroOptimization
from hpczero.partition.agreement import digest
from hpczero.partition.bucket import Bucket
from hpczero.partition.foresight import FURTHER, LEAST_NUMEL, MEASURED, Gauge, further
from hpczero.partition.grouping import ROOT
from hpczero.partition.layout import persistent
from hpczero.partition.reducer import Reducer
from hpczero.partition.schedule import Schedule
from hpczero.partition.tensor import OWNERS
from hpczero.sizing import PREFETCHED

MOST_USES = 100_000
"""Uses of gathered weights that are kept by name; a step has fewer."""


@dataclass(eq=False, slots=True)
class Unit:
    """Hold a module and the buckets that are gathered for it."""

    name: str
    module: nn.Module
    buckets: list[Bucket] = field(default_factory=list)
    runs: int = 0
    """Forward calls since the last step, recomputation not counted."""
    visits: int = 0
    """How many of them the current backward has reached."""

    @property
    def label(self) -> str:
        """Return the unit's name and its first parameter, for people."""
        if not self.buckets:
            return self.name
        return f"{self.name} (from {self.buckets[0].layout.slots[0].name})"

    @property
    def numel(self) -> int:
        """Return the elements that a gather brings."""
        return sum(bucket.layout.padded for bucket in self.buckets)


class Member:
    """Know where a parameter belongs; the Owner that a released parameter asks.

    Knows it weakly: the modules' hooks keep bucket and runtime. OWNERS and the parameters' hooks,
    through which Python's collector doesn't see, would keep them and the parameters for ever.
    """

    def __init__(self, name: str, bucket: Bucket, runtime: Runtime) -> None:
        self.name = name
        self._bucket, self._runtime = weakref.ref(bucket), weakref.ref(runtime)

    @property
    def bucket(self) -> Bucket:
        """Return the parameter's bucket."""
        bucket = self._bucket()
        assert bucket is not None
        return bucket

    @property
    def runtime(self) -> Runtime:
        """Return what drives the parameter's model."""
        runtime = self._runtime()
        assert runtime is not None
        return runtime

    def touch(self) -> bool:
        """Gather the parameter if the model is running; tell whether its weights are here now."""
        if not (self.bucket.gathered or self.runtime.running):
            return False
        self.runtime.use(self.bucket)
        return True


class _SavedView(NamedTuple):
    """Stand in autograd's memory for a view of a bucket: looking at it gathers the bucket."""

    bucket: Bucket
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype


class Runtime:
    """Drive the buckets of a model through forward and backward.

    The hooks call down only: unit -> bucket -> courier. Everything posted is a function of the
    order in which hooks fire and of `zero`, never of time, so that all ranks post alike.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], world: World, zero: ZeroOptimization
    ) -> None:
        self.model = model
        self.units = list(units)
        self.buckets = [bucket for unit in units for bucket in unit.buckets]
        self._unit_of = {id(bucket): unit for unit in units for bucket in unit.buckets}
        self._root = next(unit for unit in units if unit.name == ROOT)
        self._world = world
        self.reducer = Reducer(self.buckets, lambda bucket: self._unit_of[id(bucket)].runs == 0)
        self._prefetch_numel = _given(zero.stage3_prefetch_bucket_size, None)
        self._most_live = _given(zero.stage3_max_live_parameters, None)
        self._reuse_distance = _given(zero.stage3_max_reuse_distance, 0)
        self._forward: Schedule[Unit] = Schedule()
        self._backward: Schedule[Unit] = Schedule()
        self._active: list[Unit] = []
        self._current: Unit | None = None
        self._in_backward = False
        self._backward_follows = False
        """Whether the current forward makes a graph."""
        self._used: dict[Bucket, bool] = {}
        """Gathered buckets, oldest first; False: foreseen, not used yet."""
        self._kept: dict[Bucket, None] = {}
        """Those of them that stay for a later use, oldest first."""
        self._lingering: list[Bucket] = []
        self.uses: list[str] = []
        """What was gathered for use since the last step: all ranks must show the same."""
        self.stray: str | None = None
        """A parameter whose gradient came outside `engine.backward`."""
        stay = persistent(
            [bucket.layout for bucket in self.buckets],
            _given(zero.stage3_param_persistence_threshold, 0),
            _given(zero.stage3_model_persistence_threshold, None),
        )
        for bucket, stays in zip(self.buckets, stay, strict=True):
            bucket.persistent = stays and not bucket.gathered
        others = sorted(_transient(unit) for unit in self.units if unit is not self._root)
        self._wholes = [sum(others[-(PREFETCHED + more) :]) for more in range(FURTHER + 1)]
        """Elements whole at a time, at most, beside the root and what stays: by further units."""
        self.further = 0
        """Units whole at a time beyond those that `sizing` counts: see [Note: how far ahead]."""
        self._steps = 0
        self._gauge: Gauge | None = None
        self._measures = (
            self._prefetch_numel is None
            and world.size > 1
            and any(bucket.frees for bucket in self.buckets)
            and max(others, default=0) >= LEAST_NUMEL
        )
        self._storages = {
            bucket.full.untyped_storage()._cdata: bucket for bucket in self.buckets if bucket.frees
        }
        self._install()

    def _install(self) -> None:
        for unit in self.units:
            unit.module.register_forward_pre_hook(self._pre_forward_hook(unit), prepend=True)
            unit.module.register_forward_hook(self._post_forward_hook(unit))
            for bucket in unit.buckets:
                for index, (slot, parameter) in enumerate(
                    zip(bucket.layout.slots, bucket.params, strict=True)
                ):
                    OWNERS[parameter] = member = Member(slot.name, bucket, self)
                    if bucket.trainable:
                        hook = self._grad_hook(member, index)
                        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def running(self) -> bool:
        """Tell whether the model's forward or a backward is under way."""
        return bool(self._active) or torch._C._current_graph_task_id() != -1

    # Hooks #

    def _pre_forward_hook(self, unit: Unit) -> Callable[..., None]:
        def pre_forward(module: nn.Module, args: Any) -> None:
            if torch._C._current_graph_task_id() != -1:  # recomputation: part of backward
                self._enter_backward(unit)
                return
            if unit is self._root and not self._active:
                self._forward.begin()
                self._backward_follows = torch.is_grad_enabled()
                if module.training and torch.is_grad_enabled():
                    self._broadcast_buffers()
            unit.runs += 1
            self._active.append(unit)
            self._enter(unit, self._forward, "forward")

        return pre_forward

    def _post_forward_hook(self, unit: Unit) -> Callable[..., None]:
        def post_forward(module: nn.Module, args: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() == -1:
                while self._active and self._active.pop() is not unit:
                    pass  # a unit that ended by a caught exception
                self._leave_forward()
            outputs = [
                leaf
                for leaf in tree_leaves(output)
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            ]
            if outputs:
                torch.autograd.graph.register_multi_grad_hook(
                    outputs, lambda grad: self._pre_backward(unit), mode="any"
                )

        return post_forward

    def _grad_hook(self, member: Member, index: int) -> Callable[..., None]:
        def take_grad(parameter: torch.Tensor) -> None:
            member.runtime._take_grad(member, index)

        return take_grad

    def _take_grad(self, member: Member, index: int) -> None:
        if not self._in_backward:
            self.stray = member.name
            return
        bucket = member.bucket
        if bucket.take_grad(index):
            self._keep_or_release(bucket, self._backward.ahead())
            self.reducer.close(bucket)

    # Forward #

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Run a forward whose saved views of sharded weights are kept by name, not by memory."""
        self._active.clear()
        if not self._storages:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> Any:
        bucket = self._storages.get(tensor.untyped_storage()._cdata)
        if bucket is None:
            return tensor.detach()  # the tensor itself would be a reference cycle
        return _SavedView(
            bucket, tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype
        )

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _SavedView):
            assert isinstance(saved, torch.Tensor)
            return saved
        # Inside a node that may read several buckets: gather, but release only between nodes.
        self.use(saved.bucket)
        full = saved.bucket.full.view(saved.dtype)  # the user may have saved its raw bits
        return full.as_strided(saved.size, saved.stride, saved.offset)

    def _leave_forward(self) -> None:
        """Release what was used and isn't needed by a running unit or soon."""
        following = next(self._forward.ahead(), None)
        for bucket, used in list(self._used.items()):
            unit = self._unit_of[id(bucket)]
            wanted = unit in self._active or (unit is following and bool(self._active))
            if not wanted and (used or not self._active):
                backward = self._backward.next_pass() if self._backward_follows else ()
                self._keep_or_release(bucket, chain(self._forward.ahead(), backward))

    # Backward #

    def begin_backward(self, reduces: bool) -> None:
        """Prepare for gradients; `reduces` False only accumulates them on this rank.

        Raises:
            RuntimeError: the last backward was broken off.
        """
        self.check_whole()
        self._active.clear()
        if self._gauge is not None:
            self._gauge.leave()
        if self.reducer.reduced:
            # By now the last backward's are done where compute hides them at all; else slots
            # would pile up.
            self._meet("backward")
            self.reducer.wait()
        self._in_backward = True
        self._current = None
        self._backward.begin()
        for unit in self.units:
            unit.visits = 0
        self.reducer.begin(reduces)

    def check_whole(self) -> None:
        """Refuse to go on with a part of a backward's gradients.

        Raises:
            RuntimeError: the last backward was broken off.
        """
        if self._in_backward:
            raise RuntimeError(
                "the last engine.backward() was broken off by an exception, and some of its "
                "gradients are reduced already: build a new Engine, and load a checkpoint"
            )

    def end_backward(self) -> None:
        """Post what is left of the gradients, and release everything."""
        self._in_backward = False
        if self._gauge is not None:
            self._gauge.leave()
        self.reducer.flush()
        self.release_all()

    def finish(self, purpose: str) -> None:
        """Wait until all gradients are reduced; all ranks for the same purpose."""
        self._meet(purpose)
        self.reducer.finish()

    def _meet(self, purpose: str) -> None:
        """Meet all ranks among the gathers before waiting for their reductions.

        A rank that waits for something else there (a gather of a module that others skip, a
        state_dict) can't reduce: without the meeting each side would wait in another queue.
        """
        with self._world.timeline.wait("other ranks", f"all ranks for {purpose}"):
            self._world.gathers.meet(purpose).result()

    def _pre_backward(self, unit: Unit) -> None:
        unit.visits += 1
        self._enter_backward(unit)

    def _enter_backward(self, unit: Unit) -> None:
        """Move on to a unit. Called between autograd nodes only: nothing reads weights now."""
        left = self._current
        if unit is not left and unit is not self._root:
            self._current = unit
            for bucket, used in list(self._used.items()):
                if used and self._unit_of[id(bucket)] not in (unit, self._root):
                    self._keep_or_release(bucket, self._backward.ahead())
            if left is not None and left.visits >= left.runs and self._in_backward:
                for bucket in left.buckets:
                    if bucket.trainable:
                        self.reducer.close(bucket)
        self._enter(unit, self._backward, "backward")

    # Gather and release #

    def _enter(self, unit: Unit, schedule: Schedule[Unit], phase: str) -> None:
        watch.here(bucket=unit.label)
        if self._gauge is not None:
            self._gauge.leave()
        schedule.visit(unit)
        self._make_room(unit)
        for bucket in unit.buckets:
            self._gather(bucket)
        self._prefetch(schedule, unit)
        for bucket in unit.buckets:
            self.use(bucket, phase)
        if self._gauge is not None:
            numel = 0 if unit is self._root else _transient(unit)
            self._gauge.enter(phase, unit.name, numel)

    def _keep_or_release(self, bucket: Bucket, ahead: Iterable[Unit]) -> None:
        """Release a bucket unless one of the next units needs it, within the reuse distance."""
        distance = 0 if self._room() >= 0 else self._reuse_distance
        for unit in ahead:
            if distance >= self._reuse_distance:
                break
            if bucket in unit.buckets:
                self._kept.setdefault(bucket)
                return
            distance += unit.numel
        self._release(bucket)

    def _room(self) -> float:
        """Return how many elements may be gathered beside those that are."""
        if self._most_live is None:
            return float("inf")
        return self._most_live - sum(bucket.layout.padded for bucket in self._used)

    def _make_room(self, unit: Unit) -> None:
        """Release what is kept where a unit needs the room, first what backward needs last."""
        missing = sum(bucket.layout.padded for bucket in unit.buckets if not bucket.gathered)
        for bucket in list(self._kept):
            if self._room() >= missing:
                return
            if bucket not in unit.buckets:
                self._release(bucket)

    def _prefetch(self, schedule: Schedule[Unit], entered: Unit) -> None:
        foreseen = sum(
            bucket.layout.padded
            for bucket, used in self._used.items()
            if not used and bucket not in entered.buckets
        )
        most = self._prefetch_numel
        if most is None:  # a small unit in use leaves room to begin a large one early
            most = self._wholes[self.further]
            most -= 0 if entered is self._root else _transient(entered)
        room = min(most - foreseen, self._room())
        for unit in schedule.ahead():
            missing = [bucket for bucket in unit.buckets if not bucket.gathered]
            room -= sum(bucket.layout.padded for bucket in missing)
            if room < 0:
                return
            for bucket in missing:
                self._gather(bucket)

    def _gather(self, bucket: Bucket) -> None:
        if not bucket.gathered:
            bucket.gather()
            self._used[bucket] = False
            if self._gauge is not None:
                self._gauge.gather(bucket.layout.padded)

    def use(self, bucket: Bucket, phase: str = "use") -> None:
        """Bring a bucket's weights here and wait for them."""
        self._gather(bucket)
        bucket.wait()
        kept = bucket in self._kept
        self._kept.pop(bucket, None)
        if kept or (bucket in self._used and not self._used[bucket]):
            self._used[bucket] = True
            if len(self.uses) >= MOST_USES:  # a program that never steps
                self.uses[:] = [f"{MOST_USES} uses {digest(self.uses).hex()}"]
            self.uses.append(f"{bucket.name} in {phase}")

    def _release(self, bucket: Bucket) -> None:
        bucket.release()
        if bucket.gathered:
            return
        self._used.pop(bucket, None)
        self._kept.pop(bucket, None)
        if not bucket.free():
            self._lingering.append(bucket)
        self._lingering = [bucket for bucket in self._lingering if not bucket.free()]

    def broadcast_full(self, bucket: Bucket, root: int, params: Sequence[nn.Parameter]) -> None:
        """Give all ranks the weights that `root` changed, restricted to the given parameters."""
        bucket.keep_changes_of(params)
        payload = bucket.full.numel() * bucket.full.element_size()
        cargo = Cargo("parameters", bucket.name, payload)
        self._world.gathers.broadcast(cargo, bucket.full, root).result()
        bucket.keep_changes_of(params)  # of a block around this one, only its own rank's stay
        bucket.adopt()

    def release_all(self) -> None:
        """Release all buckets, foreseen ones too."""
        for bucket in list(self._used):
            self._release(bucket)

    def end_step(self) -> None:
        """Forget what belongs to this step; all ranks call."""
        self._steps += 1
        if self._measures:
            self._measure()
        self.uses.clear()
        self.reducer.end_step()
        self.outdate()
        for unit in self.units:
            unit.runs = 0

    def _measure(self) -> None:
        """Begin to measure, or do what rank 0 concludes: all ranks must post alike."""
        if self._steps == MEASURED.start:
            self._gauge = Gauge(self._world.timeline)
        elif self._steps == MEASURED.stop and self._gauge is not None:
            gauge, self._gauge, self._measures = self._gauge, None, False
            mine = further(gauge.passes, gauge.seconds_per_element, self._wholes)
            told = self._world.gathers.exchange_objects("prefetch", mine)
            with self._world.timeline.wait("other ranks", "prefetch"):
                self.further = told.result()[0]

    def outdate(self, frozen: bool = False) -> None:
        """Forget gathered weights, which have changed in the shards (frozen ones, if asked)."""
        self.release_all()  # a forward after the backward may have left some
        for bucket in self.buckets:
            if bucket.outdate(frozen):
                del self._used[bucket]
                self._kept.pop(bucket, None)

    # Buffers #

    def _broadcast_buffers(self) -> None:
        """Give rank 0's buffers to all ranks: one message per dtype."""
        buffers: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in self.model.buffers():
            buffers.setdefault(buffer.dtype, []).append(buffer)
        for same in buffers.values():
            flat = torch.cat([buffer.detach().reshape(-1) for buffer in same])
            self._world.broadcast(flat, "buffers")
            start = 0
            with torch.no_grad():
                for buffer in same:
                    values = flat[start : start + buffer.numel()].view_as(buffer)
                    if self._world.rank != 0:
                        buffer.copy_(values)
                    start += buffer.numel()


def _transient(unit: Unit) -> int:
    """Return the elements of a unit that come and go."""
    return sum(bucket.layout.padded for bucket in unit.buckets if not bucket.persistent)


Limit = TypeVar("Limit", int, int | None)


def _given(size: int | Literal["auto"], otherwise: Limit) -> int | Limit:
    return otherwise if size == "auto" else size
