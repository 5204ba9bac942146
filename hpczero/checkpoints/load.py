"""Load a source into an engine's parts: names decide, the number of ranks doesn't."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import torch
from torch import nn

from hpczero.checkpoints import randomness
from hpczero.checkpoints.manifest import WEIGHTS
from hpczero.checkpoints.plain import decode
from hpczero.checkpoints.reader import Checkpoint
from hpczero.checkpoints.source import Source, pieces
from hpczero.errors import CheckpointError
from hpczero.partition.bucket import Bucket
from hpczero.partition.optimizer import ShardedOptimizer


class Weights:
    """Match the weights of any source with a model, then read what belongs to this rank.

    Nothing here communicates. A tied parameter goes by any of its names, here and in the source;
    a source that keeps several must keep equal values: those are compared, piece by piece.

    Args:
        source: whose weights are read.
        module: the model; its persistent buffers are loaded too.
        buckets: all of the model.

    Raises:
        CheckpointError, ValueError, OSError: the source is damaged.
    """

    problems: list[str]
    """What is missing, unexpected or doesn't fit, a line each; `read` leaves it as it is."""

    def __init__(self, source: Source, module: nn.Module, buckets: Sequence[Bucket]) -> None:
        self._source = source
        self._buckets = buckets
        self._buffers = persistent_buffers(module)
        self._saved = dict.fromkeys(source.names(WEIGHTS))
        self._fitting: set[str] = set()
        aliases = tied(module)
        others: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            others.setdefault(name, []).append(alias)
        self.names = {
            slot.name: self._find(slot.name, others.get(slot.name, []))
            for bucket in buckets
            for slot in bucket.layout.slots
        }
        """The source's name of each parameter, or the own one where it has none."""
        self.problems = [
            *(
                problem
                for bucket in buckets
                for slot in bucket.layout.slots
                for problem in self._compare(
                    "parameter", slot.name, self.names[slot.name], slot.shape, bucket.dtype
                )
            ),
            *(
                problem
                for name, buffer in self._buffers.items()
                for problem in self._compare("buffer", name, name, buffer.shape, buffer.dtype)
            ),
            *self._compare_others(aliases),
        ]

    def require_all(self, origin: Path, problems: Sequence[str]) -> None:
        """Refuse a source with problems.

        Raises:
            CheckpointError: lists them all.
        """
        if not problems:
            return
        count = f"{len(problems)} entr{'ies' if len(problems) > 1 else 'y'}"
        raise CheckpointError(
            f"{origin}: {count} don't match the model:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
            + "\nstrict=False leaves these as they are and loads the others"
        )

    def fits(self, name: str) -> bool:
        """Tell whether a parameter or buffer is in the source as the model has it."""
        return name in self._fitting

    def read(self) -> None:
        """Bring this rank's part of the parameters, and all buffers."""
        for bucket in self._buckets:
            bucket.fill(self._read)
        for name, buffer in self._buffers.items():
            if self.fits(name):
                values = self._source.read(WEIGHTS, name, 0, buffer.numel())
                with torch.no_grad():
                    buffer.copy_(values.view(buffer.shape))

    def _read(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        if not self.fits(name):
            return None
        return self._source.read(WEIGHTS, self.names[name], start, stop)

    def _find(self, name: str, aliases: Sequence[str]) -> str:
        saved_as = self._source.tied()
        known = (each for each in (name, *aliases) if each in self._saved)
        return next(known, saved_as.get(name, name))

    def _compare(
        self, what: str, name: str, saved: str, shape: Sequence[int], dtype: torch.dtype
    ) -> Iterator[str]:
        if saved not in self._saved:
            yield f"missing: {what} {name!r} {tuple(shape)}"
            return
        found, stored = self._source.shape(WEIGHTS, saved), self._source.dtype(WEIGHTS, saved)
        if found != tuple(shape):
            yield f"other shape: {what} {name!r} is {tuple(shape)} here, {found} there"
        elif stored.is_floating_point != dtype.is_floating_point:
            yield f"other type: {what} {name!r} is of {dtype} here, of {stored} there"
        else:
            self._fitting.add(name)

    def _compare_others(self, aliases: Mapping[str, str]) -> Iterator[str]:
        """Yield what the source has beyond the model, equal values under other names aside."""
        used = {*self.names.values(), *self._buffers}
        for saved in self._saved:
            if saved in used:
                continue
            name = aliases.get(saved)
            if name is None:
                yield f"unexpected: {saved!r} {self._source.shape(WEIGHTS, saved)}"
            elif self.fits(name) and not _equal(self._source, saved, self.names[name]):
                yield f"unexpected: {saved!r} is tied to {name!r} here, but other numbers there"


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
        self._optimizer = optimizer
        self._weights = Weights(checkpoint, module, buckets)
        self.skipped = [*self._weights.problems, *self._compare_optimizer()]
        if strict:
            self._weights.require_all(checkpoint.folder, self.skipped)

    def read(self, rank: int) -> None:
        """Bring this rank's part of weights, buffers and optimizer states, and its random state."""
        self._weights.read()
        if self._optimizer is not None and self._optimizer_fits:
            self._restore(self._optimizer)
        manifest = self.checkpoint.manifest
        states = {}
        if rank < manifest.world:
            file = self.checkpoint.file(rank)
            names = [name for name in file.entries if name.startswith(randomness.PREFIX)]
            states = {name: file.read(name) for name in names}
        if states:
            randomness.restore(states)
        else:
            randomness.start(manifest.seed, rank, manifest.counters["global_steps"])

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

    def _restore(self, optimizer: ShardedOptimizer) -> None:
        manifest = self.checkpoint.manifest
        states = {
            name: (
                tuple(k for k in manifest.parameters[saved].kinds if k != WEIGHTS),
                decode(manifest.parameters[saved].scalars),
            )
            for name, saved in self._weights.names.items()
            if self._weights.fits(name) and self._trained(saved)
        }
        optimizer.restore(states, self._state)
        for group, settings in zip(
            optimizer.param_groups, decode(manifest.optimizer["groups"]), strict=True
        ):
            group.update(settings)

    def _state(self, kind: str, name: str, start: int, stop: int) -> torch.Tensor:
        return self.checkpoint.read(kind, self._weights.names[name], start, stop)

    def _trained(self, saved: str) -> bool:
        place = self.checkpoint.manifest.parameters.get(saved)
        return place is not None and place.trainable


def persistent_buffers(module: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the buffers that belong to a module's state, each under its first name."""
    found: dict[str, torch.Tensor] = {}
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def tied(module: nn.Module) -> dict[str, str]:
    """Return the other names of parameters that have several, and the first name of each."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        name: first[id(parameter)]
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if name != first[id(parameter)]
    }


def _equal(source: Source, a: str, b: str) -> bool:
    if source.shape(WEIGHTS, a) != source.shape(WEIGHTS, b):
        return False
    dtypes = {source.dtype(WEIGHTS, name) for name in (a, b)}
    pairs = zip_longest(pieces(source, WEIGHTS, a, None), pieces(source, WEIGHTS, b, None))
    return len(dtypes) == 1 and all(torch.equal(x, y) for x, y in pairs)
