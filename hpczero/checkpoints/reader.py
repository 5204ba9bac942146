"""Read tensors of a checkpoint by name, from whichever ranks' files hold them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from hpczero.checkpoints import index
from hpczero.checkpoints import manifest as manifests
from hpczero.checkpoints.index import path_of
from hpczero.checkpoints.manifest import BUFFERS, WEIGHTS, Manifest
from hpczero.checkpoints.rankfile import RankFile, checksum
from hpczero.errors import CheckpointError
from hpczero.infinity.hdf5 import dtype_of

OPEN_FILES = 128
"""How many ranks' files are open at a time: a process may have a thousand or so."""


class Checkpoint:
    """Read a checkpoint's tensors, every byte verified; a Source for all exits.

    Opens the ranks' files when something is read from them. A context manager.

    Raises:
        CheckpointError: the manifest is missing, damaged or foreign.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = manifests.load(folder)
        self._open: dict[int, RankFile] = {}
        self._last = 0

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1].close()

    def file(self, rank: int) -> RankFile:
        """Return a rank's file (or part of a shared one), its table and structures verified."""
        if rank != self._last and self._last in self._open:
            self._open[self._last].forget()  # else the last blocks of all files stay in memory
        self._last = rank
        if rank not in self._open:
            if len(self._open) == OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            self._open[rank] = RankFile(self.folder, *self.manifest.part(rank))
        return self._open[rank]

    def kinds(self) -> list[str]:
        """Return the kinds of tensors: "weights", and the optimizer's."""
        return self.manifest.kinds or [WEIGHTS]

    def names(self, kind: str) -> list[str]:
        """Return the parameters of which a kind is saved; buffers are among the weights."""
        buffers = self.manifest.buffers if kind == WEIGHTS else ()
        return [
            *(n for n, place in self.manifest.parameters.items() if kind in place.kinds),
            *buffers,
        ]

    def tied(self) -> dict[str, str]:
        """Return the other names of parameters that have several, and the name they are under."""
        return dict(self.manifest.tied)

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        if name in self.manifest.parameters:
            return self.manifest.parameters[name].shape
        return self.file(0).entries[path_of(BUFFERS, name)].shape

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """Return a tensor's dtype."""
        if name in self.manifest.parameters:
            bucket = self.manifest.parameters[name].bucket
            return dtype_of(self.manifest.buckets[bucket].dtypes[kind])
        return dtype_of(self.file(0).entries[path_of(BUFFERS, name)].dtype)

    def read(self, kind: str, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return elements [start, stop) of a tensor, flat.

        Costs what it returns, twice where ranks share it, and a block for each file; reads what it
        needs, in blocks.

        Raises:
            CheckpointError: a file is missing or its bytes aren't those that were saved.
        """
        if name not in self.manifest.parameters:
            return self.file(0).read(path_of(BUFFERS, name), start, stop)
        place = self.manifest.parameters[name]
        shard, dataset = self.manifest.shard(place.bucket), path_of(kind, place.bucket)
        first = place.start + start
        last = place.start + (place.numel if stop is None else stop)
        parts = []
        for rank in range(first // shard, -(-last // shard)) if first < last else ():
            lo, hi = max(first, rank * shard), min(last, (rank + 1) * shard)
            parts.append(self.file(rank).read(dataset, lo - rank * shard, hi - rank * shard))
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype(kind, name))

    def verify(self) -> Iterator[tuple[str, int]]:
        """Read everything, and yield each file's dataset and bytes when it is verified.

        Raises:
            CheckpointError: the first thing that isn't as it was saved.
        """
        for rank in range(self.manifest.world):
            seal, group = self.manifest.part(rank)
            for name, nbytes in self.file(rank).verify():
                yield f"{seal.name}:{group}{name}", nbytes
        yield index.FILE, self._verify_index()

    def _verify_index(self) -> int:
        path = self.folder / index.FILE
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None
        if checksum(content) != self.manifest.index:
            raise CheckpointError(
                f"{path}: expected checksum {self.manifest.index}, found {checksum(content)}: the "
                "file was damaged or replaced; load_checkpoint doesn't need it"
            )
        return len(content)
