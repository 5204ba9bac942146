"""index.h5: every tensor under its name at its full shape, read through to the ranks' files.

Plain h5py and h5dump read the model from it and know nothing of ranks. It is for people and their
tools: `load_checkpoint` reads the ranks' files, which carry the checksums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpczero.checkpoints.manifest import BUFFERS, Manifest
from hpczero.infinity.hdf5 import dtype_of, hdf5_type, link_properties, naming

FILE = "index.h5"

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and extents in a tensor's dimensions."""


def path_of(kind: str, name: str) -> str:
    """Return where HDF5 keeps a tensor; slashes, which it takes for folders, are JSON Pointer's."""
    return f"{kind}/{name.replace('~', '~0').replace('/', '~1')}"


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cut the run [start, stop) of a tensor's flat elements into boxes, in their order.

    There are at most two per dimension, less one: HDF5 maps boxes, not runs.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    inner = math.prod(shape[1:])
    row, column = divmod(start, inner)
    if column or stop < start + inner:
        end = min(stop - row * inner, inner)
        for offsets, extents in boxes(shape[1:], column, end):
            yield (row, *offsets), (1, *extents)
        start = row * inner + end
        row += 1
    rows = (stop - start) // inner
    if rows:
        yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
    yield from (
        ((row + rows, *offsets), (1, *extents))
        for offsets, extents in boxes(shape[1:], 0, (stop - start) % inner)
    )


def build(path: Path, manifest: Manifest) -> None:
    """Write the index of a checkpoint; one rank calls.

    Args:
        path: the new file, beside the ranks' files.
        manifest: names and places.
    """
    with naming(path), h5py.File(path, "x", libver=("earliest", "v110")) as file:
        for name, place in manifest.parameters.items():
            for kind in place.kinds:
                _link(file, manifest, kind, name)
        for name in manifest.buffers:
            seal, group = manifest.part(0)
            file[path_of(BUFFERS, name)] = h5py.ExternalLink(
                seal.name, group + path_of(BUFFERS, name)
            )
        for alias, name in manifest.tied.items():
            for kind in manifest.parameters[name].kinds:
                file[path_of(kind, alias)] = h5py.SoftLink("/" + path_of(kind, name))


def _link(file: Any, manifest: Manifest, kind: str, name: str) -> None:
    place = manifest.parameters[name]
    shard = manifest.shard(place.bucket)
    dtype = manifest.buckets[place.bucket].dtypes[kind]
    if not place.shape:  # HDF5 has no virtual scalars
        seal, group = manifest.part(place.start // shard)
        path = group + path_of(f"scalars/{kind}", name)
        file[path_of(kind, name)] = h5py.ExternalLink(seal.name, path)
        return
    type_ = hdf5_type(dtype)
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    space = h5py.h5s.create_simple(place.shape)
    if place.numel:
        create.set_layout(h5py.h5d.VIRTUAL)
        _fill_with_nan(create, dtype)
        source = h5py.h5s.create_simple((shard,))
        dataset = path_of(kind, place.bucket).replace("%", "%%")  # a printf format
        stop = place.start + place.numel
        for rank in range(place.start // shard, -(-stop // shard)):
            first, last = max(place.start, rank * shard), min(stop, (rank + 1) * shard)
            at = first - rank * shard
            seal, group = manifest.part(rank)
            origin = (group + dataset).encode()
            for offsets, extents in boxes(place.shape, first - place.start, last - place.start):
                count = math.prod(extents)
                space.select_hyperslab(offsets, (1,) * len(extents), block=extents)
                source.select_hyperslab((at,), (1,), block=(count,))
                create.set_virtual(space, seal.name.encode(), origin, source)
                at += count
        space.select_all()
    created = h5py.h5d.create(file.id, None, type_, space, create)
    h5py.h5o.link(created, file.id, path_of(kind, name).encode(), lcpl=link_properties())


def _fill_with_nan(create: Any, dtype: str) -> None:
    """Make a rank's missing file look like what it is; HDF5 itself says nothing of it."""
    if dtype_of(dtype).is_floating_point:
        create.set_fill_value(np.array(np.nan, "float32" if dtype == "bfloat16" else dtype))
