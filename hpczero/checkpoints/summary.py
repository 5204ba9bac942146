"""What a checkpoint holds, for people and programs that ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpczero.checkpoints import folder as folders
from hpczero.checkpoints import index
from hpczero.checkpoints import manifest as manifests
from hpczero.checkpoints.manifest import BUFFERS, WEIGHTS
from hpczero.checkpoints.reader import Checkpoint
from hpczero.checkpoints.source import numel
from hpczero.errors import CheckpointError
from hpczero.infinity.hdf5 import dtype_of, name_of


def find_any(path: Path) -> Path:
    """Return a checkpoint's folder: `path` itself, or the one that `latest` in it names.

    Raises:
        CheckpointError: it is neither a checkpoint nor a folder of checkpoints.
    """
    if (path / manifests.FILE).is_file():
        return path
    found = folders.find(path, None)
    if found is None:
        tags = folders.tags(path)
        hint = f", but {', '.join(tags)}: name one of them" if tags else ""
        raise CheckpointError(
            f"{path}: expected a checkpoint of hpczero ({manifests.FILE}) or a folder of them "
            f"({folders.LATEST}), found neither{hint}"
        )
    return found


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a checkpoint says of itself as plain data; reads no tensors.

    Raises:
        CheckpointError: a file is missing or isn't the one that was saved.
    """
    manifest = checkpoint.manifest
    others = [checkpoint.folder / name for name in (index.FILE, manifests.FILE)]
    try:
        files = {seal.name: seal.size for seal in manifest.files}
        files |= {path.name: path.stat().st_size for path in others}
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from None
    places = manifest.parameters.values()
    return {
        "folder": str(checkpoint.folder),
        "tag": manifest.tag,
        "step": manifest.counters["global_steps"],
        "world": manifest.world,
        "stage": manifest.stage,
        "precision": manifest.precision,
        "optimizer": manifest.optimizer["type"],
        "parameters": sum(place.numel for place in places),
        "trainable": sum(place.numel for place in places if place.trainable),
        "bytes": sum(files.values()),
        "files": files,
        "tensors": [*_parameters(checkpoint), *_buffers(checkpoint)],
        "tied": dict(manifest.tied),
        "versions": dict(manifest.versions),
    }


def _parameters(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    for name, place in checkpoint.manifest.parameters.items():
        dtypes = checkpoint.manifest.buckets[place.bucket].dtypes
        shard = checkpoint.manifest.shard(place.bucket)
        stop = place.start + place.numel
        ranks = range(place.start // shard, -(-stop // shard)) if place.numel else ()
        yield {
            "name": name,
            "shape": list(place.shape),
            "kinds": {kind: dtypes[kind] for kind in place.kinds},
            "ranks": list(ranks),
            "bytes": place.numel * sum(dtype_of(dtypes[kind]).itemsize for kind in place.kinds),
        }


def _buffers(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    for name in checkpoint.manifest.buffers:
        dtype = checkpoint.dtype(WEIGHTS, name)
        yield {
            "name": name,
            "shape": list(checkpoint.shape(WEIGHTS, name)),
            "kinds": {BUFFERS: name_of(dtype)},
            "ranks": [0],
            "bytes": numel(checkpoint, WEIGHTS, name) * dtype.itemsize,
        }
