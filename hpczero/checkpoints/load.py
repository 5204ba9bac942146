"""Load a checkpoint into an engine's parts: names decide, the number of ranks doesn't."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from hpczero.checkpoints import randomness
from hpczero.checkpoints.manifest import WEIGHTS
from hpczero.checkpoints.plain import decode
from hpczero.checkpoints.reader import Checkpoint
from hpczero.errors import CheckpointError
from hpczero.partition.bucket import Bucket
from hpczero.partition.optimizer import ShardedOptimizer


class Loading:
    """Match a checkpoint with a model, then read what belongs to this rank.

    Nothing here communicates.

    Raises:
        CheckpointError: from the constructor, with everything that doesn't match, if `strict`;
            from `read`, if the files aren't as they were saved.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        module: nn.Module,
        buckets: Sequence[Bucket],
        optimizer: ShardedOptimizer | None,
        strict: bool,
    ) -> None:
        self.checkpoint = checkpoint
        self._buckets = buckets
        self._optimizer = optimizer
        self._names = self._match_names()
        self._buffers = persistent_buffers(module)
        problems = [*self._compare_weights(), *self._compare_buffers(), *self._compare_optimizer()]
        if problems and strict:
            count = f"{len(problems)} entr{'ies' if len(problems) > 1 else 'y'}"
            raise CheckpointError(
                f"{checkpoint.folder}: {count} don't match the model:\n"
                + "\n".join(f"  - {problem}" for problem in problems)
                + "\nstrict=False leaves these as they are and loads the others"
            )
        self.skipped = problems

    def read(self, rank: int) -> None:
        """Bring this rank's part of weights, buffers and optimizer states, and its random state."""
        for bucket in self._buckets:
            bucket.fill(self._weights)
        for name, buffer in self._buffers.items():
            if name in self._loaded_buffers:
                values = self.checkpoint.read(WEIGHTS, name).view(buffer.shape)
                with torch.no_grad():
                    buffer.copy_(values)
        if self._optimizer is not None and self._optimizer_fits:
            self._restore(self._optimizer)
        manifest = self.checkpoint.manifest
        if rank < manifest.world:
            file = self.checkpoint.file(rank)
            states = [name for name in file.entries if name.startswith(randomness.PREFIX)]
            randomness.restore({name: file.read(name) for name in states})
        else:
            randomness.start(manifest.seed, rank, manifest.counters["global_steps"])

    # Matching #

    def _match_names(self) -> dict[str, str]:
        """Return the checkpoint's name of each parameter here; tied ones may go by another."""
        saved, tied = self.checkpoint.manifest.parameters, self.checkpoint.manifest.tied
        here = [slot.name for bucket in self._buckets for slot in bucket.layout.slots]
        return {name: name if name in saved else tied.get(name, name) for name in here}

    def _compare_weights(self) -> list[str]:
        saved = dict(self.checkpoint.manifest.parameters)
        self._fitting: set[str] = set()
        problems = []
        for bucket in self._buckets:
            for slot in bucket.layout.slots:
                place = saved.pop(self._names[slot.name], None)
                if place is None:
                    problems.append(f"missing: parameter {slot.name!r} {tuple(slot.shape)}")
                elif place.shape != tuple(slot.shape):
                    problems.append(
                        f"other shape: parameter {slot.name!r} is {tuple(slot.shape)} here, "
                        f"{place.shape} in the checkpoint"
                    )
                else:
                    self._fitting.add(slot.name)
        return problems + [
            f"unexpected: parameter {name!r} {place.shape}" for name, place in saved.items()
        ]

    def _compare_buffers(self) -> list[str]:
        saved = set(self.checkpoint.manifest.buffers)
        self._loaded_buffers: set[str] = set()
        problems = []
        for name, buffer in self._buffers.items():
            if name not in saved:
                problems.append(f"missing: buffer {name!r} {tuple(buffer.shape)}")
                continue
            shape = self.checkpoint.shape(WEIGHTS, name)
            if shape != tuple(buffer.shape):
                problems.append(
                    f"other shape: buffer {name!r} is {tuple(buffer.shape)} here, {shape} in the "
                    "checkpoint"
                )
            else:
                self._loaded_buffers.add(name)
        return problems + [
            f"unexpected: buffer {name!r}" for name in sorted(saved - {*self._buffers})
        ]

    def _compare_optimizer(self) -> list[str]:
        self._optimizer_fits = False
        if self._optimizer is None:
            return []
        saved = self.checkpoint.manifest.optimizer
        cure = "load_optimizer_states=False loads the weights alone"
        mine = type(self._optimizer.inner).__name__
        if {mine, saved["type"]} not in ({mine}, {"Adam", "AdamW"}):
            return [f"optimizer: {mine} here, {saved['type']} in the checkpoint: {cure}"]
        groups = len(self._optimizer.param_groups)
        if groups != len(saved["groups"]):
            return [
                f"optimizer: {groups} parameter groups here, {len(saved['groups'])} in the "
                f"checkpoint: {cure}"
            ]
        self._optimizer_fits = True
        return []

    # Reading #

    def _weights(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        if name not in self._fitting:
            return None
        return self.checkpoint.read(WEIGHTS, self._names[name], start, stop)

    def _restore(self, optimizer: ShardedOptimizer) -> None:
        manifest = self.checkpoint.manifest
        states = {
            name: (
                tuple(k for k in manifest.parameters[saved].kinds if k != WEIGHTS),
                decode(manifest.parameters[saved].scalars),
            )
            for name, saved in self._names.items()
            if name in self._fitting and manifest.parameters[saved].trainable
        }
        optimizer.restore(states, self._state)
        for group, settings in zip(
            optimizer.param_groups, decode(manifest.optimizer["groups"]), strict=True
        ):
            group.update(settings)

    def _state(self, kind: str, name: str, start: int, stop: int) -> torch.Tensor:
        return self.checkpoint.read(kind, self._names[name], start, stop)


def persistent_buffers(module: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the buffers that belong to a module's state, each under its first name."""
    found: dict[str, torch.Tensor] = {}
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found
