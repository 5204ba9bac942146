"""The engine: model, plan and world together; its methods are the table of contents."""

from __future__ import annotations

import contextlib
import logging
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpczero import schedules, sizing
from hpczero.comm import watch
from hpczero.comm.collectives import Count, tabulate
from hpczero.comm.wire import Cargo
from hpczero.comm.world import Comm, World
from hpczero.config import Config
from hpczero.errors import Overflow
from hpczero.optimizers import Groups, Source, from_config
from hpczero.partition import agreement
from hpczero.partition.arena import Arena, Ledger
from hpczero.partition.bucket import Bucket
from hpczero.partition.grouping import ROOT, group
from hpczero.partition.hooks import Runtime, Unit
from hpczero.partition.initial import Fill, Initial
from hpczero.partition.offload import Offload
from hpczero.partition.optimizer import ShardedOptimizer, clip_scale
from hpczero.partition.precision import Precision, multiplies_fast
from hpczero.plan import Scope
from hpczero.sizing import BucketShape, wire_bytes

if TYPE_CHECKING:
    from hpczero.checkpoints.checkpointer import Checkpointer

_RECORD = struct.Struct("dq16sB")

log = logging.getLogger("hpczero")

Schedule = LRScheduler | Callable[[Optimizer], LRScheduler]


class Engine:
    """Train a module whose model states are partitioned over MPI ranks.

    Created by all ranks of `comm` (default: COMM_WORLD) together with the same model; rank 0's
    weights win. Every method that moves data says which ranks must call it. Memory per rank is
    `sizing.memory_formula`, traffic per step `sizing.traffic_multiples`. Parameters on the meta
    device are made bucket by bucket, so that a model is never whole anywhere: `initialise(name,
    values)` fills each, in the order of the model, where its values are needed first.

    Example:
        engine = hpczero.Engine(model, {"zero_optimization": {"stage": 3}})
        for tokens, targets in batches:
            engine.backward(engine(tokens, targets))
            engine.step()

    Raises:
        ConfigError: the config has problems (all are listed).
        ValueError: parameters are to be sharded over nodes that have no memory of their own.
        Disagreement: the ranks have different models or configs.
        NotImplementedError: a parameter is not on the CPU.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config | Mapping[str, Any] | str | PathLike[str],
        comm: Comm | None = None,
        *,
        optimizer: Source | None = None,
        model_parameters: Groups | None = None,
        lr_scheduler: Schedule | None = None,
        initialise: Fill | None = None,
    ) -> None:
        config = Config.load(config)
        self.world = World.of(comm)
        self.config = config.resolve(self.world.size)
        self.module = model
        self.device = _device(model)
        self._memory = self.world.node_memory if self.config.node_memory else None
        self._ledger = Ledger()
        self.grad_norm = 0.0
        """Global gradient norm of the last step, before clipping; the same on all ranks."""
        self.micro_steps = 0
        self.global_steps = 0
        """Steps ended, skipped ones too."""
        self.skipped_steps = 0
        """Steps skipped as a gradient wasn't finite: in fp16, or if bf16 is asked to check."""
        self.global_samples = 0
        """Samples of all steps over all ranks; 0 where the config doesn't say the batch."""
        self.training_dataloader: Any = None
        """The loader whose position checkpoints keep, if it has `state_dict`."""
        self._backwards = 0
        self._backward_due = True
        """Whether there is no backward in this micro-step yet."""
        self._precision = Precision.of(self.config)
        self._scaler = self._precision.scaler
        compute = self._precision.compute
        if self.rank == 0 and compute is not None and not multiplies_fast(compute):
            log.warning(
                f"this CPU has no instructions by which torch multiplies {compute}: a step may "
                "take 5 to 100 times as long as in fp32"
            )
        settings = agreement.settings(self.config.model_dump())
        agreement.compare(self.world, "model or config", [*settings, *agreement.describe(model)])
        self.world.engines += 1  # by all ranks together
        self._number = self.world.engines
        self._offload = Offload(self.config, model, self.world, self._ledger)
        self.plan = self._offload.plan(self._scope())
        initial = Initial(model, initialise)
        source, groups = from_config(self.config, model, optimizer, model_parameters)
        self._precision.cast(model)
        self._receives = self._memory is None or self.world.nodes > 1
        self._ledger.add("buffers", wire_bytes(self.world.size, self._receives))
        self._traffic: dict[tuple[str, str], Count] = {}
        initial.place(model)
        self._units = self._build_units(initial)
        buckets = [bucket for unit in self._units for bucket in unit.buckets]
        zero = self.config.zero_optimization
        self._runtime = Runtime(model, self._units, self.world, zero)
        chunk = None if zero.sub_group_size == "auto" else zero.sub_group_size
        self._optimizer = ShardedOptimizer(source, groups, buckets, self.world, chunk)
        self._offload.begin_counting()
        self.optimizer = self._optimizer.inner
        """The torch optimizer over this rank's segments; its groups' lr acts on the next step."""
        self.lr_scheduler = self._schedule(lr_scheduler)
        """Advanced by every step that isn't skipped."""
        self._syncs = True
        self._checkpointer: Checkpointer | None = None
        self._save_failed = False
        self.world.traffic.take()  # what building cost belongs to no step
        self._ledger.mark()
        self._ledger.mark()
        watch.here(step=1)

    # Training #

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; at stage 3 all ranks call alike."""
        if self.config.accumulation > 1:
            watch.here(micro_step=self.micro_steps % self.config.accumulation + 1)
        watch.here(phase="forward")
        with self._runtime.forward(), self._span("forward"):
            result = self.module(*args, **kwargs)
        watch.here(phase="after forward", bucket=None)
        return result

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Run the backward of `loss` divided by the accumulation, and return that scaled loss.

        All ranks call. Reduces gradients in every call where they are sharded, else in those of the
        micro-step that ends the step; posts reductions while backward still runs.
        `scale_wrt_gas=False` doesn't divide.

        Raises:
            RuntimeError: an exception broke the last backward off: a part of its gradients is here.
        """
        scaled = loss / self.config.accumulation if scale_wrt_gas else loss
        watch.here(phase="backward")
        if not self._optimizer.staged:
            self.synchronize()  # before gradients that it reads change
        self._runtime.begin_backward(self._reduces)
        with self._span("backward"):
            (scaled * self.loss_scale).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            self._runtime.end_backward()
        watch.here(phase="after backward", bucket=None)
        self._backwards += 1
        self._backward_due = False
        return scaled.detach()

    def step(self) -> None:
        """End a micro-step; the last one of an accumulation updates the weights.

        All ranks call. Costs, in an update, one exchange of a few bytes and, where parameters are
        replicated and states are not, the all-gather of the new weights.

        Raises:
            RuntimeError: no `engine.backward` in this micro-step, or a bare `loss.backward()`, or
                one that was broken off by an exception.
            Disagreement: the ranks ran different modules or numbers of micro-steps.
            CheckpointError: an asynchronous save failed; this step is complete all the same.
        """
        self._check_backward()
        self._backward_due = True
        self.micro_steps += 1
        if self.micro_steps % self.config.accumulation:
            return
        # 1. All gradients are reduced, late ones too.
        watch.here(phase="step")
        self._runtime.finish("step")
        norm, late = self._exchange()
        if any(late):
            self._runtime.reducer.reduce_late(late)
            norm, _ = self._exchange()
        # 2. The update of what this rank owns, unless a gradient isn't finite anywhere.
        scale = self.loss_scale
        self.grad_norm = norm / scale
        overflowed = self._overflowed(norm)
        self._finish_delayed()
        if overflowed:
            self._end_step()
            return
        clip = clip_scale(self.grad_norm, self.config.gradient_clipping)
        with self._span("optimizer"):
            self._optimizer.step(clip / scale)
        # 3. New weights reach whoever keeps a copy, unless they are delayed.
        if not self._optimizer.staged:
            self._publish()
        elif not self._delays:
            self._finish_delayed()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self._end_step()

    @property
    def lr(self) -> float:
        """Return the learning rate of the next update (of the first parameter group)."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def loss_scale(self) -> float:
        """Return the factor on the loss in backward: 1 unless compute is fp16."""
        return self._scaler.scale if self._scaler else 1.0

    @property
    def kernel(self) -> str:
        """Return what updates the weights: "C++ (AVX-512)", say, or "torch"."""
        return self._optimizer.kernel

    @property
    def further_units(self) -> int:
        """Return the units gathered ahead beyond what `sizing` counts, as measured; mostly 0."""
        return self._runtime.further

    @property
    def rank(self) -> int:
        """Return this process's rank."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.world.size

    # DeepSpeed's names #

    def train(self, mode: bool = True) -> Engine:
        """Set the module's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Set the module's evaluation mode."""
        return self.train(False)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only: backwards inside the block reduce nothing.

        Raises:
            RuntimeError: gradients are sharded (stages 2 and 3), so each backward must reduce.
        """
        if self.plan.grads.scope != "none":
            raise RuntimeError(
                "no_sync() needs whole gradients on every rank, but stages 2 and 3 shard them: use "
                "stage 0 or 1, or gradient_accumulation_steps"
            )
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True

    @property
    def global_rank(self) -> int:
        """Return this process's rank."""
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """Return this process's rank on its node."""
        return self.world.local_rank

    def is_gradient_accumulation_boundary(self) -> bool:
        """Tell whether the coming `step` updates the weights."""
        return (self.micro_steps + 1) % self.config.accumulation == 0

    def get_global_grad_norm(self) -> float:
        """Return the gradient norm of the last step, before clipping."""
        return self.grad_norm

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def train_batch_size(self) -> int | None:
        """Return the samples of a step over all ranks, None where the config doesn't say."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Return the samples of a micro-step on one rank, None where the config doesn't say."""
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-steps of a step."""
        return self.config.accumulation

    # Checkpoints #

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
        *,
        keep_last: int | None = None,
        layout: Literal["files", "shared"] = "files",
    ) -> Path:
        """Save everything that the run needs to go on, on any number of ranks; return its folder.

        All ranks call, between steps. Each rank writes what it owns. Costs no memory, but
        `asynchronous` a copy of this rank's part of the states; then a failure is raised by the
        next `step` or `save_checkpoint`, on all ranks, and at most one is written at a time.

        Args:
            save_dir: a folder that all ranks see.
            tag: the checkpoint's folder in it, by default `global_step{N}`.
            client_state: what JSON can hold; rank 0's is saved.
            asynchronous: write in a thread while training goes on.
            keep_last: afterwards remove all but the newest so many.
            layout: "files", one for each rank, or "shared", one that all write: for file systems
                that take many files badly. Needs an h5py that is built with MPI.

        Raises:
            RuntimeError: in the middle of an accumulation, or of GatheredParameters; or h5py is
                built without MPI, which a shared file takes.
            CheckpointError: on all ranks: any rank can't write, a `client_state` holds what JSON
                can't, or the tag is no plain folder name; what was saved before is intact.
            ValueError: `keep_last` is below 1, or there is no such layout.
        """
        self._check_between_steps("save_checkpoint")
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last: expected at least 1, found {keep_last}")
        if layout not in ("files", "shared"):
            raise ValueError(f"layout: expected 'files' or 'shared', found {layout!r}")
        self.world.gathers.meet(f"save_checkpoint {tag!r}, layout {layout!r}").result()
        facts = {
            "stage": self.config.zero_optimization.stage,
            "precision": self.config.compute,
            "client_state": dict(client_state or {}),
            "scheduler": self.lr_scheduler and self.lr_scheduler.state_dict(),
            "counters": self._counters(),
        }
        root = Path(save_dir)
        self._checkpoints().save(
            root, tag, facts, asynchronous=asynchronous, keep_last=keep_last, layout=layout
        )
        return root / tag

    def wait_for_checkpoint(self) -> None:
        """Wait until the last asynchronous save is whole; all ranks call. The job's end waits too.

        Raises:
            CheckpointError: it failed; on all ranks.
        """
        if self._checkpointer is not None:
            self._save_failed = False
            self._checkpointer.wait()

    def load_checkpoint(
        self,
        load_dir: str | PathLike[str],
        tag: str | None = None,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        strict: bool = True,
    ) -> tuple[Path | None, dict[str, Any]]:
        """Load what any number of ranks saved, at any stage and precision; all ranks call.

        Each rank reads what it keeps. Returns the checkpoint's folder and the client state, or
        (None, {}) with a warning where `load_dir` has no checkpoint and no tag is asked for.

        Args:
            load_dir: the folder of checkpoints.
            tag: which one, by default what `latest` names.
            load_optimizer_states: else the optimizer stays as it is.
            load_lr_scheduler_states: else the schedule stays as it is.
            strict: False loads what matches, and warns of what doesn't.

        Raises:
            RuntimeError: in the middle of an accumulation, or of GatheredParameters.
            CheckpointError: on all ranks: names, shapes or the optimizer don't match (all of it is
                listed), or a file is missing or damaged. Of a damaged one a part may be in place
                already: load another.
        """
        self._begin_loading("load_checkpoint")
        loaded = self._checkpoints().load(
            Path(load_dir), tag, with_optimizer=load_optimizer_states, strict=strict
        )
        if loaded is None:
            if self.rank == 0:
                log.warning(f"{load_dir}: no checkpoint here (no file 'latest'): nothing loaded")
            return None, {}
        self._warn_of(loaded.skipped, loaded.folder)
        self._set_counters(loaded.counters)
        if load_lr_scheduler_states and self.lr_scheduler is not None and loaded.scheduler:
            self.lr_scheduler.load_state_dict(loaded.scheduler)
        return loaded.folder, loaded.client_state

    def load_safetensors(self, path: str | PathLike[str], strict: bool = True) -> None:
        """Load weights and persistent buffers by name, straight into the shards; all ranks call.

        Each rank reads what it keeps: no rank ever has the whole model, unless the stage keeps it.
        Numbers take the dtypes here. The optimizer's states and all counts stay as they are.

        Args:
            path: a .safetensors file, or a folder of them as transformers writes it.
            strict: False loads what matches, and warns of what doesn't.

        Raises:
            RuntimeError: in the middle of an accumulation, or of GatheredParameters.
            CheckpointError: on all ranks: there is no such file or it is damaged, or names, shapes
                or kinds of numbers don't match (all of it is listed).
        """
        from hpczero.checkpoints.safetensors import SafetensorsFolder

        self._begin_loading("load_safetensors")
        origin = Path(path)
        skipped = self._checkpoints().load_weights(
            lambda: SafetensorsFolder(origin), origin, strict=strict
        )
        self._warn_of(skipped, origin)

    def _warn_of(self, skipped: Sequence[str], origin: Path) -> None:
        for line in skipped if self.rank == 0 else []:
            log.warning(f"{origin}: not loaded: {line}")

    def _checkpoints(self) -> Checkpointer:
        if self._checkpointer is None:
            from hpczero.checkpoints.checkpointer import Checkpointer  # h5py and others, when used

            self._checkpointer = Checkpointer(
                self.module, self._runtime.buckets, self._optimizer, self.world
            )
        return self._checkpointer

    def _begin_loading(self, what: str) -> None:
        self._check_between_steps(what)
        self.world.gathers.meet(what).result()
        self._runtime.outdate(frozen=True)

    def _check_between_steps(self, what: str) -> None:
        if self._backwards or self.micro_steps % self.config.accumulation:
            raise RuntimeError(
                f"engine.{what}() at micro-step {self.micro_steps % self.config.accumulation} of "
                f"{self.config.accumulation} with {self._backwards} backwards since the last "
                "update: gradients are no part of a checkpoint; call it after the engine.step() "
                "that updates"
            )
        self._check_not_held(what)
        self.synchronize()
        for bucket in self._runtime.buckets:
            bucket.await_news()
        self.world.gathers.meet(f"{what} after an update").result()  # nobody uses weights now
        self._finish_delayed()

    def _check_not_held(self, what: str, reason: str = "") -> None:
        held = [bucket.name for bucket in self._runtime.buckets if bucket.held]
        if held:
            raise RuntimeError(
                f"engine.{what}() inside GatheredParameters of {held[0]!r}: {reason}end the block "
                "first"
            )

    def _counters(self) -> dict[str, Any]:
        loader = self.training_dataloader
        return {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps,
            "updates": self._optimizer.steps,
            "loss_scale": self._scaler and self._scaler.state_dict(),
            "data": loader.state_dict() if hasattr(loader, "state_dict") else None,
        }

    def _set_counters(self, counters: Mapping[str, Any]) -> None:
        self.global_steps = counters["global_steps"]
        self.global_samples = counters["global_samples"]
        self.skipped_steps = counters["skipped_steps"]
        self.micro_steps = self.global_steps * self.config.accumulation
        self._optimizer.steps = counters["updates"]
        if self._scaler is not None and counters["loss_scale"]:
            self._scaler.load_state_dict(counters["loss_scale"])
        loader = self.training_dataloader
        if counters["data"] is not None and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(counters["data"])
        watch.here(step=self.global_steps + 1)

    # Looking at the state #

    def full_grads(self) -> dict[str, torch.Tensor]:
        """Return the reduced float32 gradients by name on rank 0, {} elsewhere.

        All ranks call, between `backward` and the `step` that updates. Costs one collective per
        bucket, and on rank 0 the float32 model.

        Raises:
            RuntimeError: there is no backward since the last update.
        """
        if self._backwards == 0:
            raise RuntimeError("full_grads() without an engine.backward() since the last update")
        self._runtime.finish("full_grads")
        grads: dict[str, torch.Tensor] = {}
        for bucket in self._runtime.buckets:
            if bucket.trainable:
                full = bucket.collect_gradient("full_grads")
                for name, values in bucket.named(full):
                    grads[name] = values.to(torch.float32, copy=True).div_(self.loss_scale)
        return grads

    def full_optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state by parameter name on rank 0, {} elsewhere.

        All ranks call. Tensors have the parameter's shape. Costs one collective per bucket and kind
        of state, and on rank 0 what it returns.
        """
        self.synchronize()
        return self._optimizer.full_state()

    @property
    def parameters_count(self) -> int:
        """Return the number of elements of all parameters, tied ones counted once."""
        return sum(bucket.layout.numel for bucket in self._runtime.buckets)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the float32 masters and persistent buffers by name on rank 0, {} elsewhere.

        All ranks call. Costs one collective per bucket, and on rank 0 the float32 model.
        """
        self.synchronize()
        self.world.gathers.meet("full_state_dict").result()  # nothing foreseen is on its way
        state: dict[str, torch.Tensor] = {}
        values: dict[int, torch.Tensor] = {}
        for bucket in self._runtime.buckets:
            full = bucket.collect_weights("state_dict")
            masters = [_widened(master) for _, master in bucket.named(full)]
            values.update(zip(map(id, bucket.params), masters, strict=False))
        if self.rank != 0:
            return {}
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            dot = f"{prefix}." if prefix else ""
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    state[dot + name] = values[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    state[dot + name] = buffer.detach().clone()
        return state

    def memory(self) -> dict[str, Any]:
        """Return this rank's bytes of params, grads, states and buffers, and the same by tier.

        High-water marks within the last step. `buffers` are gathered parameters, reduction slots,
        staging, what is on its way from or to a file, and the padding of all kinds.
        """
        tiers = self._ledger.last()
        total = {kind: sum(tier[kind] for tier in tiers.values()) for kind in tiers["device"]}
        return {**total, "tier": tiers}

    def io(self) -> dict[str, int]:
        """Return the bytes that this rank has moved between tiers since it was built.

        `read` from files and `written`; `to_host` and `from_host`, what would go between a device
        and the host: gradients, and weights (ZeRO-Offload, section 4.1). On CPU ranks both are one
        memory, and nothing is copied.
        """
        self.synchronize()
        file, host = (self._offload.moved[tier] for tier in ("file", "host"))
        return {**file._asdict(), "to_host": host.written, "from_host": host.read}

    def memory_formula(self) -> dict[str, Any]:
        """Return what `sizing.memory_formula` foretells for this engine, and the same by tier."""
        shapes, on = self.bucket_shapes(), self._offload.on
        setting = self.config.zero_optimization.stage, self.world.size, self.config.accumulation
        run = self.further_units, on, self._optimizer.staged
        tiers = sizing.memory_by_tier(shapes, *setting, *run)
        return {**sizing.memory_formula(shapes, *setting, *run), "tier": tiers}

    @property
    def memory_on(self) -> dict[str, str]:
        """Return the tier of params, grads and states: "device", "host" or "file"."""
        return dict(self._offload.on)

    def io_minimum(self) -> dict[str, int]:
        """Return what `sizing.io_minimum` foretells for a step with a backward per micro-step."""
        accumulation = self.config.accumulation
        backwards = accumulation if self.plan.grads.scope != "none" else 1
        shapes = self.bucket_shapes()
        return sizing.io_minimum(shapes, self.world.size, accumulation, backwards, self._offload.on)

    def traffic(self) -> dict[str, Any]:
        """Return calls, bytes, multiples of the model and bytes sent in the last step.

        Of all engines of the communicator since one of them ended a step. Also by purpose and by
        collective. `bytes` are logical (full vectors, an all-reduce twice), `sent` are those that
        MPI moved, per rank. New weights that cross under the next forward count in the next step.
        """
        model = sum(b.layout.numel * b.dtype.itemsize for b in self._runtime.buckets)
        return tabulate(self._traffic, model)

    def bucket_shapes(self) -> list[BucketShape]:
        """Return the integers that the formulas of `sizing` need."""
        asked = self.config.data_types.grad_accum_dtype is not None
        return [
            BucketShape(
                bucket.name,
                bucket.layout.numel,
                bucket.layout.padded,
                bucket.trainable,
                "" if unit.name == ROOT else unit.name,
                bucket.dtype.itemsize,
                bucket.persistent,
                bucket.grads.element_size() if asked and bucket.trainable else None,
                bucket.holders,
                bucket.gatherers,
                self._receives,
                bucket.trainable and bucket.states_on == "device",
            )
            for unit in self._units
            for bucket in unit.buckets
        ]

    # Phases #

    def _span(self, phase: str) -> contextlib.AbstractContextManager[None]:
        return self.world.timeline.span("program", phase, phase)

    @property
    def _reduces(self) -> bool:
        at_boundary = self._syncs and self.is_gradient_accumulation_boundary()
        return self.plan.grads.scope != "none" or at_boundary

    def _schedule(self, given: Schedule | None) -> Any:
        if given is None and self.config.scheduler is not None:
            scheduler = self.config.scheduler
            return schedules.build(scheduler.type, scheduler.params, self.optimizer)
        return given if given is None or hasattr(given, "step") else given(self.optimizer)

    def _build_units(self, initial: Initial) -> list[Unit]:
        units: dict[str, Unit] = {ROOT: Unit(ROOT, self.module)}
        self.world.reclaim_node_memory()
        reductions = self.world.reductions
        arena = Arena(self._ledger, self._memory, self.world.timeline, lambda: reductions.enters)
        zero = self.config.zero_optimization
        modules = {id(module): name for name, module in self.module.named_modules()}
        groups = group(self.module)
        for part, tiers in zip(groups, self._offload.tiers(groups), strict=True):
            name = ROOT if part.module is self.module else modules[id(part.module)]
            unit = units.setdefault(name, Unit(name, part.module))
            bucket = Bucket(
                part,
                self.plan,
                self._precision,
                self.world,
                self._ledger,
                arena,
                zero,
                tiers,
                initial,
                self._memory,
            )
            unit.buckets.append(bucket)
        return list(units.values())

    def _scope(self) -> Scope:
        """Return over which ranks stage 3 shards the parameters.

        Raises:
            ValueError: over nodes, which needs their memory, and there is none.
        """
        world = self.world
        if self.config.zero_optimization.partition_scope == "world" or world.nodes == 1:
            return "world"
        if world.nodes == world.size:
            return "none"  # over one rank is over none
        if world.node_memory is None:
            raise ValueError(
                "partition_scope 'node': expected node memory, found none "
                f"({world.no_node_memory}): use 'world'"
            )
        return "node"

    def _check_backward(self) -> None:
        self._runtime.check_whole()
        stray = self._runtime.stray
        if stray is not None:
            raise RuntimeError(
                f"the gradient of parameter {stray!r} came outside engine.backward: call "
                "engine.backward(loss) in place of loss.backward(), so that gradients are reduced "
                "over the ranks"
            )
        self._check_not_held("step", "leaving the block would overwrite the update; ")
        if not self._syncs:
            raise RuntimeError("engine.step() inside engine.no_sync(): end the block first")
        if self._backward_due:
            raise RuntimeError(
                f"engine.step() at micro-step {self.micro_steps + 1} without an engine.backward() "
                "since the last engine.step(): call both in each of the "
                f"{self.config.accumulation} micro-steps of an update, on all ranks"
            )

    def _exchange(self) -> tuple[float, list[bool]]:
        """Compare what the ranks did, and return the gradient norm and which buckets are late.

        The one exchange of a step (design: norms, signatures of gathers, late gradients).
        """
        # Engines that are alike are told apart only here: their buckets have equal signatures.
        uses = [*self._runtime.uses, f"engine {self._number} of those on this communicator"]
        record = _RECORD.pack(
            self._optimizer.norm_squared(),
            self.micro_steps,
            agreement.digest(uses),
            self._checkpointer is not None and self._checkpointer.failed,
        )
        late = bytes(self._runtime.reducer.late())
        cargo = Cargo("exchange", "step", 0)
        with self.world.timeline.wait("exchange", "exchange"):
            records = self.world.reductions.exchange(cargo, record + late).result()
        fields = [_RECORD.unpack_from(other) for other in records]
        where = f"step {self.global_steps + 1}, "
        if len({micro_steps for _, micro_steps, _, _ in fields}) > 1:
            mine = [f"micro-step {self.micro_steps}"]
            agreement.raise_difference(self.world, "micro-steps", mine, where)
        if len({used for _, _, used, _ in fields}) > 1:
            agreement.raise_difference(self.world, "modules that ran", uses, where)
        self._save_failed = any(failed for *_, failed in fields)
        total = 0.0
        for norm_squared, *_ in fields:
            total += norm_squared
        flags = [any(column) for column in zip(*(r[_RECORD.size :] for r in records), strict=True)]
        return total**0.5, flags

    @property
    def _delays(self) -> bool:
        """Tell whether the update of the step under way ends only with the next step."""
        delayed = self.config.zero_optimization.offload_optimizer.delayed_update
        return delayed.enabled and self.global_steps + 1 >= delayed.start_step

    def _finish_delayed(self) -> None:
        """Wait for a delayed update, and bring its weights to all; nobody uses weights now."""
        pending = [bucket for bucket in self._runtime.buckets if bucket.pending]
        if pending:
            self.synchronize()
            self._runtime.outdate()
            for bucket in pending:
                bucket.take_over()
            self._publish()

    def _publish(self) -> None:
        """Bring new weights to all, or let the next forward wait for each bucket that needs it."""
        buckets = [bucket for bucket in self._runtime.buckets if bucket.trainable]
        # Below stage 3 anybody may look at parameters as soon as `step` returns.
        scope = self.plan.params.scope
        if scope == "node" or (scope == "world" and self._optimizer.streams):
            self._runtime.outdate()
            for bucket in buckets:
                bucket.announce()
            return
        publishing = [bucket.publish() for bucket in buckets]
        if any(bucket.on_node for bucket in buckets):
            publishing.append(self.world.gathers.meet("new weights"))  # before anybody reads them
        try:
            with self.world.timeline.wait("new weights", "publish"):
                for future in publishing:
                    if future is not None:
                        future.result()
        finally:
            self._optimizer.join()  # where it has failed, that is the reason

    def synchronize(self) -> None:
        """Wait until the last step's update is complete; local. Every other method does so itself.

        Only updates of what is kept in files go on after `step`. What it has sent may still be on
        its way to other nodes; whoever uses it waits for it.

        Raises:
            OSError: a file can't be read or written; names it.
        """
        self._optimizer.join()

    def _overflowed(self, norm: float) -> bool:
        """Take note of the norm; tell whether this step must be skipped, on all ranks alike.

        Raises:
            Overflow: on all ranks, where the loss scale can't shrink any further.
        """
        if self._scaler is None:
            return False
        before, overflow = self._scaler.scale, not math.isfinite(norm)
        survives = self._scaler.update(overflow)
        if not overflow:
            return False
        self.skipped_steps += 1
        told = self.world.reductions.exchange_objects("culprit", self._optimizer.first_not_finite())
        with self.world.timeline.wait("exchange", "culprit"):
            culprits = told.result()
        _, rank, name = min(
            (found[0], rank, found[1]) for rank, found in enumerate(culprits) if found is not None
        )
        message = (
            f"step {self.global_steps + 1}: the gradient of {name!r} isn't finite (shard of rank "
            f"{rank}); skipped on all ranks"
        )
        if self._scaler.dynamic:
            message += f", loss scale {before:g} -> {self._scaler.scale:g}"
        if not survives:
            raise Overflow(f"{message}: it is at its minimum and can't shrink further")
        if self.rank == 0:
            log.warning(message)
        return True

    def _end_step(self) -> None:
        self.global_steps += 1
        self.global_samples += self.config.train_batch_size or 0
        self._backwards = 0
        self._runtime.end_step()
        self._ledger.mark()
        self._traffic = self.world.traffic.take()
        if not self._optimizer.streams:  # else what is used next isn't updated yet
            for bucket in self._runtime.buckets:
                bucket.publish_announced()  # counts as the next step's
        watch.here(step=self.global_steps + 1, phase="after step")
        if self._save_failed:
            self.wait_for_checkpoint()  # raises, on all ranks at the same step, which is complete


def _device(model: nn.Module) -> torch.device:
    for name, parameter in model.named_parameters():
        if parameter.device.type not in ("cpu", "meta"):
            raise NotImplementedError(
                f"expected all parameters on the CPU, found {name!r} on {parameter.device}: this "
                "version of hpczero trains on CPU ranks; call model.cpu() first"
            )
        if parameter.requires_grad and not parameter.is_floating_point():
            raise NotImplementedError(
                f"expected trainable parameters of a real floating dtype, found {name!r} of "
                f"{parameter.dtype}: set requires_grad_(False) on it"
            )
    return torch.device("cpu")


def _widened(master: torch.Tensor) -> torch.Tensor:
    narrow = master.is_floating_point() and master.element_size() < 4
    return master.to(torch.float32) if narrow else master.clone()
