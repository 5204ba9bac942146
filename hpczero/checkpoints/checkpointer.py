"""Save and load the parts of an engine, in this thread or in one of its own."""

from __future__ import annotations

import atexit
import concurrent.futures
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
from torch import nn

from hpczero.checkpoints import folder as folders
from hpczero.checkpoints import randomness
from hpczero.checkpoints.index import path_of
from hpczero.checkpoints.load import Loading, Weights, persistent_buffers, tied
from hpczero.checkpoints.manifest import BUFFERS, WEIGHTS, Layout, Manifest, Place, Run
from hpczero.checkpoints.plain import decode, encode
from hpczero.checkpoints.rankfile import Stream, checksum
from hpczero.checkpoints.reader import Checkpoint
from hpczero.checkpoints.save import Snapshot, agree, not_saved, save
from hpczero.checkpoints.source import Source
from hpczero.comm import watch
from hpczero.comm.world import World
from hpczero.errors import CheckpointError
from hpczero.infinity.hdf5 import name_of
from hpczero.infinity.tier import Part
from hpczero.partition.bucket import Bucket
from hpczero.partition.optimizer import ShardedOptimizer

_WRITING: set[Checkpointer] = set()


@atexit.register  # after h5py's, so before it: h5py must not shut down while a thread still writes
def _finish() -> None:
    writing = [one._writing for one in list(_WRITING) if one._writing is not None]
    concurrent.futures.wait(writing)
    for error in (future.exception() for future in writing):
        if error is not None:
            watch.fail_with(error, error.__traceback__, "failed")


class Loaded(NamedTuple):
    """Hold what a checkpoint says beside its tensors, which are in place already."""

    folder: Path
    counters: dict[str, Any]
    scheduler: dict[str, Any] | None
    client_state: dict[str, Any]
    skipped: list[str]
    """What didn't match, with strict=False."""


class Checkpointer:
    """Write and read checkpoints of a model, its optimizer and whatever counts steps.

    Created and called by all ranks together. Costs a Courier.
    """

    def __init__(
        self,
        module: nn.Module,
        buckets: Sequence[Bucket],
        optimizer: ShardedOptimizer,
        world: World,
    ) -> None:
        self._module, self._buckets, self._optimizer = module, buckets, optimizer
        self._world = world
        self._courier = world.checkpoints
        self._writing: Future[None] | None = None

    def save(
        self,
        root: Path,
        tag: str,
        facts: Mapping[str, Any],
        *,
        asynchronous: bool,
        keep_last: int | None,
        layout: Layout,
    ) -> None:
        """Save under a tag; all ranks call.

        Args:
            root: the folder of checkpoints.
            tag: a plain folder name.
            facts: stage, precision, client_state, scheduler and counters of the manifest.
            asynchronous: copy what this rank owns, and write it while training goes on; what is
                kept in files is not copied, but saved at once.
            keep_last: remove all but so many of the newest checkpoints.
            layout: a file of each rank, or one that all write.

        Raises:
            RuntimeError: h5py is built without MPI, which a shared file takes.
            CheckpointError: on all ranks, if any can't write, or a fact of any holds what JSON
                can't; of the last asynchronous save too.
        """
        if layout == "shared" and not h5py.get_config().mpi:
            raise RuntimeError(
                "layout='shared': expected an h5py that is built with MPI, found h5py "
                f"{h5py.__version__} without: build one with this job's MPI and its parallel HDF5 "
                "(HDF5_MPI=ON CC=mpicc HDF5_DIR=... pip install --no-binary=h5py "
                "--no-build-isolation h5py), or let each rank write its own file: layout='files'"
            )
        self._wait_for_all()

        def take() -> Snapshot:
            encoded = {key: encode(fact, key) for key, fact in facts.items()}
            taken = self._snapshot(tag, layout, encoded)
            return taken.copy() if asynchronous and taken.resident else taken

        snapshot = agree(self._courier, not_saved(tag), take)
        if not (asynchronous and snapshot.resident):
            with self._world.timeline.span("program", f"save {tag}", "io"):
                save(root, snapshot, self._courier, keep_last)
            return
        self._writing = Future()
        _WRITING.add(self)
        threading.Thread(
            target=self._write,
            args=(self._writing, root, snapshot, keep_last),
            name="hpczero-checkpoint",
            daemon=True,
        ).start()

    def load(
        self, root: Path, tag: str | None, *, with_optimizer: bool, strict: bool
    ) -> Loaded | None:
        """Load weights, optimizer states, buffers and random state; all ranks call.

        Returns None where the folder has no `latest` and no tag was asked for.

        Raises:
            CheckpointError: on all ranks, if any finds something missing, damaged or not matching,
                or another checkpoint than the others.
        """
        self._wait_for_all()
        what = "the checkpoint can't be loaded"
        optimizer = self._optimizer if with_optimizer else None
        loading = agree(self._courier, what, lambda: self._match(root, tag, optimizer, strict))
        self._compare(root, loading)
        if loading is None:
            return None
        with loading.checkpoint as checkpoint:
            agree(self._courier, what, lambda: loading.read(self._world.rank))
        self._publish()
        manifest = checkpoint.manifest
        return Loaded(
            checkpoint.folder,
            decode(manifest.counters),
            decode(manifest.scheduler),
            decode(manifest.client_state),
            loading.skipped,
        )

    def load_weights(
        self, open_source: Callable[[], Source], origin: Path, *, strict: bool
    ) -> list[str]:
        """Load weights and buffers from any source; all ranks call. Returns what didn't match.

        Raises:
            CheckpointError: on all ranks, if any finds something missing, damaged or not matching.
        """
        self._wait_for_all()

        def match() -> Weights:
            weights = Weights(open_source(), self._module, self._buckets)
            if strict:
                weights.require_all(origin, weights.problems)
            return weights

        what = "the weights can't be loaded"
        weights = agree(self._courier, what, match)
        agree(self._courier, what, weights.read)
        self._publish()
        return weights.problems

    @property
    def failed(self) -> bool:
        """Tell whether what was being written in a thread has failed."""
        writing = self._writing
        return writing is not None and writing.done() and writing.exception() is not None

    def wait(self) -> None:
        """Wait for what is being written.

        Raises:
            CheckpointError: it failed; on all ranks alike.
        """
        writing, self._writing = self._writing, None
        _WRITING.discard(self)
        if writing is not None:
            writing.result()

    def _wait_for_all(self) -> None:
        """Wait for what is being written, of other engines of this World too.

        They share a Courier, which must be called in one order on all ranks.
        """
        others = [one for one in list(_WRITING) if one._world is self._world and one is not self]
        concurrent.futures.wait([one._writing for one in others if one._writing is not None])
        self.wait()

    def _publish(self) -> None:
        """Bring what was read to all who keep a copy."""
        kept = [bucket for bucket in self._buckets if bucket.trainable or bucket.on_node]
        futures = [bucket.publish() for bucket in kept]
        for future in futures:
            if future is not None:
                future.result()

    def _match(
        self, root: Path, tag: str | None, optimizer: ShardedOptimizer | None, strict: bool
    ) -> Loading | None:
        folder = folders.find(root, tag)
        if folder is None:
            return None
        checkpoint = Checkpoint(folder)
        try:
            return Loading(checkpoint, self._module, self._buckets, optimizer, strict)
        except BaseException:
            checkpoint.close()
            raise

    def _compare(self, root: Path, loading: Loading | None) -> None:
        """See that all ranks have found the same checkpoint."""
        mine = None
        if loading is not None:
            seals = repr(loading.checkpoint.manifest.files)
            mine = (loading.checkpoint.folder.name, checksum(seals.encode()))
        seen = self._courier.exchange_objects("load_checkpoint", (str(root), mine)).result()
        where, first = seen[0]
        for rank, (_, other) in enumerate(seen):
            if other != first:
                texts = [each and f"{each[0]!r} ({each[1]})" for each in (first, other)]
                raise CheckpointError(
                    f"{where}: expected the same checkpoint on all ranks, found {texts[0]} on rank "
                    f"0, {texts[1]} on rank {rank}: is the folder shared by all nodes?"
                )

    def _write(
        self, future: Future[None], root: Path, snapshot: Snapshot, keep_last: int | None
    ) -> None:
        try:
            with self._world.timeline.span("checkpoints", f"save {snapshot.manifest.tag}", "io"):
                save(root, snapshot, self._courier, keep_last)
        except BaseException as error:
            future.set_exception(error)  # and stays among those whom the job's end hears of
        else:
            future.set_result(None)
            _WRITING.discard(self)

    # What is saved #

    def _snapshot(self, tag: str, layout: Layout, facts: Mapping[str, Any]) -> Snapshot:
        arrays: dict[str, torch.Tensor | Stream] = {}
        runs: dict[str, Run] = {}
        everywhere: dict[str, Place] = {}
        mine: dict[str, Place] = {}
        for bucket in self._buckets:
            states = self._optimizer.owned_states(bucket) if bucket.trainable else {}
            parts = {WEIGHTS: bucket.own_weights, **states}
            arrays |= {path_of(kind, bucket.name): _saved(part) for kind, part in parts.items()}
            dtypes = {kind: name_of(part.tensor.dtype) for kind, part in parts.items()}
            runs[bucket.name] = Run(bucket.layout.padded, dtypes)
            told = self._optimizer.describe(bucket) if bucket.trainable else {}
            for slot in bucket.layout.slots:
                place = Place(
                    bucket.name, slot.start, tuple(slot.shape), (WEIGHTS,), {}, bucket.trainable
                )
                everywhere[slot.name] = place
                if slot.name in told:
                    kinds, scalars = told[slot.name]
                    scalars = encode(scalars, f"optimizer state of {slot.name!r}")
                    place = place._replace(kinds=(WEIGHTS, *kinds), scalars=scalars)
                    mine[slot.name] = place
                if not slot.shape:
                    arrays |= self._scalar(bucket, place, slot.name, parts)
        buffers = persistent_buffers(self._module)
        if self._world.rank == 0:
            arrays |= {path_of(BUFFERS, name): buffer for name, buffer in buffers.items()}
        manifest = Manifest(
            tag=tag,
            layout=layout,
            world=self._world.size,
            buckets=runs,
            parameters=everywhere,
            buffers=list(buffers),
            tied=tied(self._module),
            optimizer=self._describe_optimizer(),
            seed=torch.initial_seed(),
            versions={
                "torch": torch.__version__,
                "numpy": np.__version__,
                "h5py": h5py.__version__,
                "hdf5": h5py.version.hdf5_version,
            },
            **facts,
        )
        return Snapshot(arrays={**arrays, **randomness.snapshot()}, places=mine, manifest=manifest)

    def _scalar(
        self, bucket: Bucket, place: Place, name: str, parts: Mapping[str, Part]
    ) -> dict[str, torch.Tensor]:
        """Return a parameter of shape () once more by itself: HDF5 has no virtual scalars."""
        at = place.start - bucket.own[0]
        if not 0 <= at < bucket.layout.shard:
            return {}
        return {
            path_of(f"scalars/{kind}", name): parts[kind].values(at, at + 1).view(())
            for kind in place.kinds
        }

    def _describe_optimizer(self) -> dict[str, Any]:
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        return {
            "type": type(self._optimizer.inner).__name__,
            "groups": encode(groups, "the optimizer's parameter groups"),
        }


def _saved(part: Part) -> torch.Tensor | Stream:
    """Return what is written for a part: its memory, or what reads it a block at a time."""
    if part.array.resident:
        return part.tensor
    return Stream(part.tensor.dtype, (part.stop - part.start,), part.values)
