"""Write a state dict that torch.load reads, in constant memory.

[Note: a .pt file]
It is a zip without compression: `data.pkl` is a pickle whose tensors refer to storages by number,
`data/N` is the bytes of storage N at a multiple of 64 bytes (so that `mmap=True` works). torch.save
wants all tensors in memory; here the pickle is made of stand-ins that pickle as tensors do, and
zipfile takes the bytes piece by piece and computes their checksums.
"""

from __future__ import annotations

import collections
import io
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpczero.checkpoints.files import replacing
from hpczero.checkpoints.source import Done, Progress, Source, converted, numel, pieces, raw

_ALIGNMENT = 64
_LOCAL_HEADER = 30  # bytes of a zip's local header without name and extra field
_ZIP64 = 20  # bytes of the extra field of a file that may be larger than 2 GiB
_PADDING = b"FB"  # the extra field's tag, as torch's own writer has it

# Classes by which a pickle names a storage's type; newer types have none and go by their dtype.
_STORAGES = {
    torch.bool: torch.BoolStorage,
    torch.uint8: torch.ByteStorage,
    torch.int8: torch.CharStorage,
    torch.int16: torch.ShortStorage,
    torch.int32: torch.IntStorage,
    torch.int64: torch.LongStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}


def write_file(
    source: Source,
    path: Path,
    *,
    kind: str = "weights",
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> None:
    """Write all tensors of a kind as a dict for torch.load, with weights_only and mmap or without.

    Constant memory. Tied aliases share their parameter's storage, as in a model's own state dict.
    The file appears whole or not at all.

    Args:
        source: the tensors.
        path: of the file; what is there is replaced.
        kind: which tensors.
        dtype: what floating tensors are converted to; None keeps each as it is.
        progress: is called after each piece with the bytes done and the bytes in all.

    Raises:
        OverflowError: a finite number isn't finite in `dtype`.
    """
    tensors = [
        _Tensor(
            _Storage(key, converted(source.dtype(kind, name), dtype), numel(source, kind, name)),
            source.shape(kind, name),
        )
        for key, name in enumerate(source.names(kind))
    ]
    state = collections.OrderedDict(zip(source.names(kind), tensors, strict=True))
    state.update({alias: state[name] for alias, name in source.tied().items() if name in state})
    total = sum(tensor.storage.numel * tensor.storage.dtype.itemsize for tensor in tensors)
    done = Done(total, progress)
    with replacing(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        _record(archive, "data.pkl", _pickled(state))
        _record(archive, "byteorder", sys.byteorder.encode())
        for tensor, name in zip(tensors, source.names(kind), strict=True):
            storage = tensor.storage
            size = storage.numel * storage.dtype.itemsize
            with _open(archive, f"data/{storage.key}", size) as file:
                for piece in pieces(source, kind, name, dtype):
                    file.write(raw(piece))
                    done.add(piece.nbytes)
        _record(archive, "version", b"3\n")


class _Storage(NamedTuple):
    key: int
    dtype: torch.dtype
    numel: int


class _Tensor:
    """Pickle as a contiguous tensor."""

    def __init__(self, storage: _Storage, shape: tuple[int, ...]) -> None:
        self.storage = storage
        self.shape = shape

    def __reduce__(self) -> tuple[Any, ...]:
        stride: list[int] = []
        step = 1
        for extent in reversed(self.shape):
            stride.insert(0, step)
            step *= max(extent, 1)
        hooks: dict[str, object] = collections.OrderedDict()
        arguments = self.storage, 0, self.shape, tuple(stride), False, hooks
        if self.storage.dtype in _STORAGES:
            return torch._utils._rebuild_tensor_v2, arguments
        return torch._utils._rebuild_tensor_v3, (*arguments, self.storage.dtype)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        if obj.dtype in _STORAGES:
            return "storage", _STORAGES[obj.dtype], str(obj.key), "cpu", obj.numel
        return "storage", torch.UntypedStorage, str(obj.key), "cpu", obj.numel * obj.dtype.itemsize


def _pickled(state: dict[str, _Tensor]) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(state)
    return buffer.getvalue()


def _record(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    with _open(archive, name, len(content)) as file:
        file.write(content)


def _open(archive: zipfile.ZipFile, name: str, size: int) -> Any:
    """Return a record to be written, whose bytes begin at a multiple of the alignment."""
    info = zipfile.ZipInfo(f"archive/{name}")
    info.file_size = size
    large = size >= zipfile.ZIP64_LIMIT
    head = _LOCAL_HEADER + len(info.filename) + (_ZIP64 if large else 0) + 4
    padding = -(archive.start_dir + head) % _ALIGNMENT
    info.extra = _PADDING + padding.to_bytes(2, "little") + b"Z" * padding
    return archive.open(info, "w", force_zip64=large)
