"""Write a checkpoint's weights for programs that know nothing of shards."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import h5py
import torch

from hpczero.checkpoints import safetensors, torchfile
from hpczero.checkpoints.files import replacing
from hpczero.checkpoints.source import Done, Progress, Source, converted, numel, pieces, raw
from hpczero.infinity import hdf5

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
    names = source.names(kind)
    targets = {name: converted(source.dtype(kind, name), dtype) for name in names}
    types = {name: _type_name(target, name) for name, target in targets.items()}
    with replacing(path) as temporary:
        with h5py.File(temporary, "w", libver=("earliest", "v110")) as file:
            offsets = {
                name: hdf5.reserve(file, name, types[name], source.shape(kind, name))
                for name in names
            }
            for alias, name in source.tied().items():
                if name in offsets:
                    file[alias] = file[name]
        total = sum(numel(source, kind, name) * targets[name].itemsize for name in names)
        done = Done(total, progress)
        with temporary.open("r+b") as file:
            for name in names:
                for piece in pieces(source, kind, name, dtype):
                    hdf5.write_at(file.fileno(), offsets[name], raw(piece))
                    offsets[name] += piece.nbytes
                    done.add(piece.nbytes)


def _type_name(dtype: torch.dtype, name: str) -> str:
    try:
        return hdf5.name_of(dtype)
    except TypeError as error:
        raise ValueError(f"{name!r}: {error}: give a dtype to convert to") from None
