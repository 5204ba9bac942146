"""The engine: model, plan and world together; its methods are the table of contents."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any

import torch
from torch import nn

from hpczero.comm import watch
from hpczero.comm.collectives import Count
from hpczero.comm.courier import ranks_text
from hpczero.comm.wire import Cargo
from hpczero.comm.world import Comm, World
from hpczero.config import Config
from hpczero.errors import Disagreement
from hpczero.partition.arena import Arena, Ledger
from hpczero.partition.bucket import Bucket
from hpczero.partition.grouping import ROOT, group, parameter_names
from hpczero.partition.hooks import Member, Runtime, Unit
from hpczero.partition.optimizer import ShardedAdam, clip_scale
from hpczero.partition.precision import Precision
from hpczero.partition.tensor import OWNERS
from hpczero.plan import Plan
from hpczero.sizing import BucketShape, wire_bytes

_RECORD = struct.Struct("dq16s")


class Engine:
    """Train a module whose model states are partitioned over MPI ranks.

    Created by all ranks of `comm` (default: COMM_WORLD) together with the same model; rank 0's
    weights win. Every method that moves data says which ranks must call it. Memory per rank is
    `sizing.memory_formula`, traffic per step `sizing.traffic_multiples`.

    Example:
        engine = hpczero.Engine(model, {"zero_optimization": {"stage": 3}})
        for tokens, targets in batches:
            engine.backward(engine(tokens, targets))
            engine.step()

    Raises:
        ConfigError: the config has problems (all are listed).
        Disagreement: the ranks have different models or configs.
        NotImplementedError: a parameter is not on the CPU.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config | Mapping[str, Any] | str | PathLike[str],
        comm: Comm | None = None,
    ) -> None:
        config = Config.load(config)
        self.world = World.of(comm)
        self.config = config.resolve(self.world.size)
        self.module = model
        self.device = _device(model)
        self.plan = Plan.stage(self.config.zero_optimization.stage)
        self.grad_norm = 0.0
        """Global gradient norm of the last step, before clipping; the same on all ranks."""
        self.micro_steps = 0
        self.global_steps = 0
        self._backwards = 0
        self._precision = Precision(
            torch.bfloat16 if self.config.bf16.enabled else None, self.config.accumulation
        )
        self._check_agreement()
        self._precision.cast(model)
        self._ledger = Ledger()
        self._ledger.add("buffers", wire_bytes(self.world.size))
        self._traffic: dict[tuple[str, str], Count] = {}
        self._names = parameter_names(model)
        self._units = self._build_units()
        buckets = [bucket for unit in self._units for bucket in unit.buckets]
        prefetch = self.config.zero_optimization.stage3_prefetch_bucket_size
        self._runtime = Runtime(
            model, self._units, self.world, None if prefetch == "auto" else prefetch
        )
        self._optimizer = ShardedAdam(self.config.optimizer, buckets)
        self.world.traffic.take()  # what building cost belongs to no step
        self._ledger.mark()
        self._ledger.mark()
        watch.here(step=1)

    # Training #

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; at stage 3 all ranks call alike."""
        with self._runtime.forward():
            return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """Run the backward of `loss` divided by the accumulation, and return that scaled loss.

        All ranks call. Reduces gradients in every call where they are sharded, else in those of the
        micro-step that ends the step; posts reductions while backward still runs.
        """
        scaled = loss / self.config.accumulation
        self._runtime.begin_backward(self._reduces)
        scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        self._runtime.end_backward()
        self._backwards += 1
        return scaled.detach()

    def step(self) -> None:
        """End a micro-step; the last one of an accumulation updates the weights.

        All ranks call. Costs, in an update, one exchange of a few bytes and, where parameters are
        replicated and states are not, the all-gather of the new weights.

        Raises:
            RuntimeError: no `engine.backward` since the last update, or a bare `loss.backward()`.
            Disagreement: the ranks ran different modules or numbers of micro-steps.
        """
        self._check_backward()
        self.micro_steps += 1
        if self.micro_steps % self.config.accumulation:
            return
        # 1. All gradients are reduced, late ones too.
        self._runtime.reducer.finish()
        norm, late = self._exchange()
        if any(late):
            self._runtime.reducer.reduce_late(late)
            norm, _ = self._exchange()
        # 2. The update of what this rank owns.
        self.grad_norm = norm
        self._optimizer.step(clip_scale(norm, self.config.gradient_clipping))
        # 3. New weights reach whoever keeps a copy.
        publishing = [bucket.publish() for bucket in self._runtime.buckets if bucket.trainable]
        for future in publishing:
            if future is not None:
                future.result()
        self._end_step()

    @property
    def lr(self) -> float:
        """Return the learning rate of the next update."""
        return self._optimizer.lr

    @property
    def rank(self) -> int:
        """Return this process's rank."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.world.size

    # Looking at the state #

    @property
    def parameters_count(self) -> int:
        """Return the number of elements of all parameters, tied ones counted once."""
        return sum(bucket.layout.numel for bucket in self._runtime.buckets)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the float32 masters and persistent buffers by name on rank 0, {} elsewhere.

        All ranks call. Costs one collective per bucket, and on rank 0 the float32 model.
        """
        state: dict[str, torch.Tensor] = {}
        where = {
            id(parameter): (bucket, index)
            for bucket in self._runtime.buckets
            for index, parameter in enumerate(bucket.params)
        }
        values: dict[int, torch.Tensor] = {}
        for bucket in self._runtime.buckets:
            full = bucket.master_full(lambda numel, dtype: torch.empty(numel, dtype=dtype))
            if full is not None:
                for slot, parameter in zip(bucket.layout.slots, bucket.params, strict=True):
                    master = full[slot.start : slot.stop].view(slot.shape)
                    values[id(parameter)] = _widened(master)
        if self.rank != 0:
            return {}
        assert values.keys() == where.keys()
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
        staging, and the padding of all kinds.
        """
        last = self._ledger.last()
        return {**last, "tier": {"device": dict(last)}}

    def traffic(self) -> dict[str, Any]:
        """Return calls, bytes, multiples of the model and bytes sent in the last step.

        Also by purpose and by collective. `bytes` are logical (full vectors, an all-reduce twice),
        `sent` are those that MPI moved, per rank.
        """
        model = sum(b.layout.numel * b.dtype.itemsize for b in self._runtime.buckets)

        def line(counts: list[Count]) -> dict[str, float]:
            total = sum(counts, Count(0, 0, 0))
            return {**total._asdict(), "multiples": total.bytes / model if model else 0.0}

        def by(index: int, keys: Sequence[str]) -> dict[str, dict[str, float]]:
            found = sorted({key[index] for key in self._traffic} - set(keys))
            return {
                name: line([n for key, n in self._traffic.items() if key[index] == name])
                for name in [*keys, *found]
            }

        return {
            **line(list(self._traffic.values())),
            "by_collective": by(0, ["all_gather", "reduce_scatter", "all_reduce", "broadcast"]),
            "by_purpose": by(1, ["parameters", "gradients", "buffers", "exchange"]),
        }

    def bucket_shapes(self) -> list[BucketShape]:
        """Return the integers that the formulas of `sizing` need."""
        return [
            BucketShape(
                bucket.name,
                bucket.layout.numel,
                bucket.layout.padded,
                bucket.trainable,
                "" if unit.name == ROOT else unit.name,
                bucket.dtype.itemsize,
            )
            for unit in self._units
            for bucket in unit.buckets
        ]

    # Phases #

    @property
    def _reduces(self) -> bool:
        ends_step = (self.micro_steps + 1) % self.config.accumulation == 0
        return self.plan.grads.scope != "none" or ends_step

    def _build_units(self) -> list[Unit]:
        units: dict[str, Unit] = {ROOT: Unit(ROOT, self.module)}
        arena = Arena(self._ledger)
        modules = {id(module): name for name, module in self.module.named_modules()}
        for part in group(self.module):
            name = ROOT if part.module is self.module else modules[id(part.module)]
            unit = units.setdefault(name, Unit(name, part.module))
            bucket = Bucket(part, self.plan, self._precision, self.world, self._ledger, arena)
            unit.buckets.append(bucket)
        return list(units.values())

    def _check_agreement(self) -> None:
        """Compare model and config over the ranks before anything is built."""
        mine = [f"config: {self.config.model_dump_json()}"]
        mine += [
            f"parameter {name!r}: {tuple(p.shape)}, {p.dtype}, requires_grad={p.requires_grad}"
            for name, p in self.module.named_parameters()
        ]
        mine += [
            f"buffer {n!r}: {tuple(b.shape)}, {b.dtype}" for n, b in self.module.named_buffers()
        ]
        digest = hashlib.blake2b("\n".join(mine).encode()).digest()
        cargo = Cargo("exchange", "model", 0)
        digests = self.world.gathers.exchange(cargo, digest).result()
        if len(set(digests)) > 1:
            self._raise_difference("model or config", mine)

    def _check_backward(self) -> None:
        stray = self._runtime.stray
        if stray is not None:
            raise RuntimeError(
                f"the gradient of parameter {stray!r} came outside engine.backward: call "
                "engine.backward(loss) in place of loss.backward(), so that gradients are reduced "
                "over the ranks"
            )
        held = [bucket.name for bucket in self._runtime.buckets if bucket.held]
        if held:
            raise RuntimeError(
                f"engine.step() inside GatheredParameters of {held[0]!r}: leaving the block would "
                "overwrite the update; end the block first"
            )
        ends_step = (self.micro_steps + 1) % self.config.accumulation == 0
        if ends_step and self._backwards == 0:
            raise RuntimeError(
                f"engine.step() at micro-step {self.micro_steps + 1} without an engine.backward() "
                "since the last update: there is no gradient to step with"
            )

    def _exchange(self) -> tuple[float, list[bool]]:
        """Compare what the ranks did, and return the gradient norm and which buckets are late.

        The one exchange of a step (design: norms, signatures of gathers, late gradients).
        """
        uses = hashlib.blake2b("\n".join(self._runtime.uses).encode(), digest_size=16).digest()
        record = _RECORD.pack(self._optimizer.norm_squared(), self.micro_steps, uses)
        late = bytes(self._runtime.reducer.late())
        cargo = Cargo("exchange", "step", 0)
        records = self.world.reductions.exchange(cargo, record + late).result()
        fields = [_RECORD.unpack_from(other) for other in records]
        if len({micro_steps for _, micro_steps, _ in fields}) > 1:
            self._raise_difference("micro-steps", [f"micro-step {self.micro_steps}"])
        if len({digest for _, _, digest in fields}) > 1:
            self._raise_difference("modules that ran", self._runtime.uses)
        total = 0.0
        for norm_squared, _, _ in fields:
            total += norm_squared
        flags = [any(column) for column in zip(*(r[_RECORD.size :] for r in records), strict=True)]
        return total**0.5, flags

    def _raise_difference(self, what: str, mine: Sequence[str]) -> None:
        """Name the first line in which ranks differ; all ranks come here together."""
        everyone = self.world.reductions.exchange_objects(what, list(mine)).result()
        length = max(len(lines) for lines in everyone)
        for index in range(length):
            at = [lines[index] if index < len(lines) else "nothing more" for lines in everyone]
            if len(set(at)) > 1:
                break
        groups: dict[str, list[int]] = {}
        for rank, line in enumerate(at):
            groups.setdefault(line, []).append(rank)
        found = "\n".join(f"  {ranks_text(ranks)}: {line}" for line, ranks in groups.items())
        raise Disagreement(
            f"the ranks differ in their {what} (step {self.global_steps + 1}, entry {index + 1}):\n"
            f"{found}\nall ranks must build the same model and run the same modules in one order"
        )

    def _end_step(self) -> None:
        self.global_steps += 1
        self._backwards = 0
        self._runtime.end_step()
        self._ledger.mark()
        self._traffic = self.world.traffic.take()
        watch.here(step=self.global_steps + 1)


class GatheredParameters:
    """Make the whole weights of partitioned parameters available inside a `with` block.

    All ranks enter and leave together. Costs an all-gather and two copies of the buckets in which
    the parameters lie. With `modifier_rank` the changes that this rank made to them are broadcast
    and kept, and masters change only where bits of the weights did; with None changes are
    discarded. Parameters that no engine partitions are left alone.

    Args:
        params: parameters, or a module for all of its parameters.
        modifier_rank: the rank whose changes are kept.
        enabled: False does nothing.
    """

    def __init__(
        self,
        params: nn.Module | nn.Parameter | Sequence[nn.Parameter],
        modifier_rank: int | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, nn.Module):
            params = list(params.parameters())
        elif isinstance(params, nn.Parameter):
            params = [params]
        self._members: dict[int, list[nn.Parameter]] = {}
        self._runtimes: dict[int, tuple[Bucket, Runtime]] = {}
        self._modifier_rank = modifier_rank
        for parameter in params if enabled else []:
            member: Member | None = OWNERS.get(parameter)  # type: ignore[no-untyped-call]
            if member is not None:
                self._members.setdefault(id(member.bucket), []).append(parameter)
                self._runtimes[id(member.bucket)] = (member.bucket, member.runtime)
        self._before: dict[int, torch.Tensor] = {}

    def __enter__(self) -> None:
        """Gather."""
        for key, (bucket, runtime) in self._runtimes.items():
            bucket.held += 1
            runtime.use(bucket)
            self._before[key] = bucket.full.clone()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Keep the modifier's changes, or discard all, and release."""
        for key, (bucket, runtime) in self._runtimes.items():
            before = self._before.pop(key)
            if error is None and self._modifier_rank is not None:
                runtime.broadcast_full(bucket, self._modifier_rank, before, self._members[key])
            else:
                bucket.full.copy_(before)
            bucket.held -= 1
            if not runtime.running:
                runtime.release_all()


def _device(model: nn.Module) -> torch.device:
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
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
