"""Write a checkpoint's weights for programs that know nothing of shards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from hpczero.checkpoints import safetensors, torchfile
from hpczero.checkpoints.files import replacing
from hpczero.checkpoints.source import Progress, Source, converted, numel, pieces, raw

Format = Literal["safetensors", "torch", "hdf5"]


def consolidate(
    source: Source,
    out: Path,
    format: Format,  # noqa: A002
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
    progress: Progress | None = None,
    *,
    kind: str = "weights",
) -> None:
    """Write all tensors of a kind whole, in the memory of a few pieces; one process calls.

    What is at `out` is replaced when all is on the disk, and stays if anything fails.

    Args:
        source: the tensors.
        out: a file; with format "safetensors" a name that doesn't end in .safetensors is a folder,
            which `from_pretrained` of transformers reads if it has the model's config.json.
        format: "safetensors" (tied aliases left out), "torch" (for torch.load, also with
            weights_only and mmap) or "hdf5" (each tensor a dataset under its name, an alias a
            second link to it; bfloat16 as a float of 2 bytes that h5py reads as float32).
        dtype: what floating tensors are converted to; None keeps each as it is.
        max_shard_bytes: cuts a folder of safetensors into files of at most so many bytes.
        progress: is called after each piece with the bytes done and the bytes in all.
        kind: "weights", or one of the optimizer's states.

    Raises:
        ValueError: the format isn't known or can't hold a tensor's type, or `max_shard_bytes` is
            given for a single file.
        OverflowError: a finite number isn't finite in `dtype`.
    """
    folder = format == "safetensors" and out.suffix != ".safetensors"
    if max_shard_bytes is not None and not folder:
        raise ValueError(
            f"expected a folder of safetensors with max_shard_bytes, found {format} {str(out)!r}"
        )
    if folder:
        safetensors.write_folder(
            source, out, kind=kind, dtype=dtype, max_shard_bytes=max_shard_bytes, progress=progress
        )
        return
    writers = {
        "safetensors": safetensors.write_file,
        "torch": torchfile.write_file,
        "hdf5": _write_hdf5,
    }
    if format not in writers:
        raise ValueError(f"expected one of {list(writers)}, found {format!r}")
    writers[format](source, out, kind=kind, dtype=dtype, progress=progress)


def _write_hdf5(
    source: Source, path: Path, *, kind: str, dtype: torch.dtype | None, progress: Progress | None
) -> None:
    import h5py

    names = source.names(kind)
    targets = {name: converted(source.dtype(kind, name), dtype) for name in names}
    types = {target: _hdf5_type(target) for target in targets.values()}
    if unknown := [name for name in names if types[targets[name]] is None]:
        raise ValueError(
            f"expected a dtype that HDF5 has, found {targets[unknown[0]]} in {unknown[0]!r}: "
            "give a dtype to convert to"
        )
    with replacing(path) as temporary:
        # The bytes are written beside HDF5, which would want a tensor's shape cut into blocks.
        offsets: dict[str, int | None] = {}
        with h5py.File(temporary, "w", libver=("earliest", "v110")) as file:
            for name in names:
                dataset = _dataset(file, name, source.shape(kind, name), types[targets[name]])
                offsets[name] = dataset.get_offset()
            for alias, name in source.tied().items():
                if name in offsets:
                    file[alias] = file[name]
        total = sum(numel(source, kind, name) * targets[name].itemsize for name in names)
        done = 0
        with temporary.open("r+b") as file:
            for name, piece in _all_pieces(source, kind, names, dtype):
                if piece.numel() == 0:
                    continue
                offset = offsets[name]
                assert offset is not None, f"HDF5 has no room for {name!r}"
                _write_at(file.fileno(), raw(piece), offset)
                offsets[name] = offset + piece.nbytes
                done += piece.nbytes
                if progress is not None:
                    progress(done, total)


def _all_pieces(
    source: Source, kind: str, names: list[str], dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        for piece in pieces(source, kind, name, dtype):
            yield name, piece


def _write_at(descriptor: int, content: memoryview, offset: int) -> None:
    while content:
        count = os.pwrite(descriptor, content, offset)
        content, offset = content[count:], offset + count


def _dataset(file: Any, name: str, shape: tuple[int, ...], type_id: Any) -> Any:
    """Return a dataset whose bytes lie in one run of the file, already there."""
    import h5py

    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_layout(h5py.h5d.CONTIGUOUS)
    create.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    create.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    link = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    link.set_create_intermediate_group(True)
    link.set_char_encoding(h5py.h5t.CSET_UTF8)
    space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
    dataset = h5py.h5d.create(file.id, None, type_id, space, create)
    h5py.h5o.link(dataset, file.id, name.encode(), lcpl=link)
    return dataset


def _hdf5_type(dtype: torch.dtype) -> Any:
    """Return HDF5's type of a tensor's elements, None where it has none."""
    import h5py

    if dtype == torch.bfloat16:
        bf16 = h5py.h5t.IEEE_F32LE.copy()
        bf16.set_fields(15, 7, 8, 0, 7)  # places of sign, exponent (size 8) and mantissa (size 7)
        bf16.set_size(2)
        bf16.set_ebias(127)
        return bf16
    try:
        array = torch.empty(0, dtype=dtype).numpy()
    except TypeError:  # 8-bit floats
        return None
    return h5py.h5t.py_create(np.dtype(array.dtype), logical=True)
