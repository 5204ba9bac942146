"""Safetensors without its library: a writer in constant memory and a reader of any run.

A file is the length of its header (8 bytes, little-endian), the header (JSON: each tensor's dtype,
shape and place), and the tensors' bytes without a gap. As in the reference implementation, the
header is padded with spaces to a multiple of 8 bytes and wider types come first, so that every
tensor is aligned. A model of several files has an index that says which tensor is in which.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpczero.checkpoints.files import replacing, sync
from hpczero.checkpoints.source import (
    Done,
    Progress,
    Source,
    check_range,
    converted,
    numel,
    pieces,
    raw,
)

INDEX = "model.safetensors.index.json"

# In the order in which the reference implementation sorts them, narrow types first.
_CODES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in _CODES.items()}
_CODE_OF = {dtype: code for code, dtype in _DTYPES.items()}
_ORDER = list(_DTYPES)
_HEADER_LIMIT = 100_000_000  # bytes, as in the reference implementation
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


# ---- writing


def write_file(
    source: Source,
    path: Path,
    *,
    kind: str = "weights",
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> None:
    """Write all tensors of a kind into one file, in constant memory; tied aliases are left out.

    The file appears whole or not at all.

    Args:
        source: the tensors.
        path: of the file; what is there is replaced.
        kind: which tensors.
        dtype: what floating tensors are converted to; None keeps each as it is.
        progress: is called after each piece.

    Raises:
        ValueError: a tensor's type isn't one that safetensors knows.
        OverflowError: a finite number isn't finite in `dtype`.
    """
    names = source.names(kind)
    done = Done(sum(_sizes(source, kind, names, dtype).values()), progress)
    with replacing(path) as temporary:
        _write(source, temporary, kind, names, dtype, done)


def write_folder(
    source: Source,
    folder: Path,
    *,
    kind: str = "weights",
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Write model.safetensors, or several files and their index, as transformers names them.

    Constant memory. All files are on the disk before the first gets its name; then the weights
    that the folder had go, and the index comes last: a folder never mixes two models.

    Args:
        source: the tensors; those of one file follow one another in the source's order.
        folder: is made if need be; its other files stay.
        kind: which tensors.
        dtype: what floating tensors are converted to; None keeps each as it is.
        max_shard_bytes: no file has more bytes of tensors, but for one that is larger by itself.
            None writes one file.
        progress: is called after each piece.

    Raises:
        ValueError: a tensor's type isn't one that safetensors knows, or the limit isn't positive.
        OverflowError: a finite number isn't finite in `dtype`.
    """
    sizes = _sizes(source, kind, source.names(kind), dtype)
    shards = _split(sizes, max_shard_bytes)
    total = sum(sizes.values())
    done = Done(total, progress)
    files = ["model.safetensors"]
    if len(shards) > 1:
        count = f"{len(shards):05d}"
        files = [f"model-{i:05d}-of-{count}.safetensors" for i in range(1, len(shards) + 1)]
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as names:
        if len(shards) > 1:
            # Entered first, so that it gets its name last.
            index = names.enter_context(replacing(folder / INDEX))
            where = {
                name: file for file, shard in zip(files, shards, strict=True) for name in shard
            }
            elements = sum(numel(source, kind, name) for name in sizes)
            metadata = {"total_parameters": elements, "total_size": total}
            content = {"metadata": metadata, "weight_map": dict(sorted(where.items()))}
            index.write_text(json.dumps(content, indent=2) + "\n")
        for file, shard in zip(files, shards, strict=True):
            temporary = names.enter_context(replacing(folder / file))
            _write(source, temporary, kind, shard, dtype, done)
            sync(temporary)
        for old in folder.iterdir():
            if old.name == INDEX or _WEIGHTS.fullmatch(old.name):
                old.unlink()


def _sizes(
    source: Source, kind: str, names: Sequence[str], dtype: torch.dtype | None
) -> dict[str, int]:
    """Return the bytes of each tensor as it is written, having looked at all types."""
    sizes = {}
    for name in names:
        target = converted(source.dtype(kind, name), dtype)
        if target not in _CODE_OF:
            raise ValueError(f"expected a dtype that safetensors knows, found {target} in {name!r}")
        sizes[name] = numel(source, kind, name) * target.itemsize
    return sizes


def _split(sizes: dict[str, int], limit: int | None) -> list[list[str]]:
    """Return which tensors go into which file, filled in order."""
    if limit is None:
        return [list(sizes)]
    if limit <= 0:
        raise ValueError(f"expected max_shard_bytes above 0, found {limit}")
    shards: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def _write(
    source: Source,
    path: Path,
    kind: str,
    names: Sequence[str],
    dtype: torch.dtype | None,
    done: Done,
) -> None:
    targets = {name: converted(source.dtype(kind, name), dtype) for name in names}
    ordered = sorted(names, key=lambda name: (-_ORDER.index(_CODE_OF[targets[name]]), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in ordered:
        end = offset + numel(source, kind, name) * targets[name].itemsize
        shape = list(source.shape(kind, name))
        code = _CODE_OF[targets[name]]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_LIMIT:
        raise ValueError(
            f"expected a header of at most {_HEADER_LIMIT} bytes, found {len(text)} for "
            f"{len(names)} tensors: give max_shard_bytes, so that they go into several files"
        )
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            for piece in pieces(source, kind, name, dtype):
                file.write(raw(piece))
                done.add(piece.nbytes)


# ---- reading


class _Place(NamedTuple):
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file


class SafetensorsFolder:
    """Read runs of tensors from a safetensors file, or from a folder of them; a Source of weights.

    Costs the headers' memory; a run is read from its place without the rest. No file stays open.

    Args:
        path: a file, or a folder with model.safetensors or an index as transformers writes it.

    Raises:
        FileNotFoundError: there is neither, or a file that the index names is missing.
        ValueError: a file is truncated, its header isn't sound, or the index doesn't fit the files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            self.places = _header(path)
        elif (path / INDEX).exists():
            self.places = _indexed(path)
        elif (path / "model.safetensors").exists():
            self.places = _header(path / "model.safetensors")
        else:
            raise FileNotFoundError(
                f"expected model.safetensors or {INDEX} in {str(path)!r}, found neither"
            )

    def kinds(self) -> list[str]:
        """Return ["weights"]."""
        return ["weights"]

    def names(self, kind: str) -> list[str]:
        """Return the names of all tensors, in the files' order."""
        if kind != "weights":
            raise KeyError(f"safetensors has weights only, found a request for {kind!r}")
        return list(self.places)

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._place(kind, name).shape

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """Return a tensor's type."""
        return self._place(kind, name).dtype

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a flattened tensor.

        Raises:
            ValueError: the range isn't inside the tensor, or the file has become shorter.
        """
        place = self._place(kind, name)
        check_range(start, stop, numel(self, kind, name), name)
        size = (stop - start) * place.dtype.itemsize
        if size == 0:
            return torch.empty(0, dtype=place.dtype)
        content = bytearray(size)
        got = 0
        with place.path.open("rb") as file:
            begin = place.start + start * place.dtype.itemsize
            while got < size:
                count = os.preadv(file.fileno(), [memoryview(content)[got:]], begin + got)
                if count == 0:
                    raise ValueError(
                        f"expected {size} bytes of {name!r} at {begin} in {str(place.path)!r}, "
                        f"found {got}: the file has become shorter"
                    )
                got += count
        return torch.frombuffer(content, dtype=place.dtype)

    def tied(self) -> dict[str, str]:
        """Return {}: safetensors doesn't say what is tied."""
        return {}

    def _place(self, kind: str, name: str) -> _Place:
        if kind != "weights" or name not in self.places:
            raise KeyError(f"expected one of {len(self.places)} weights, found {kind} {name!r}")
        return self.places[name]


def _indexed(folder: Path) -> dict[str, _Place]:
    index = folder / INDEX
    content = _json(index.read_bytes(), str(index))
    where = content.get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise ValueError(f"expected a weight_map of names to files in {str(index)!r}")
    places: dict[str, _Place] = {}
    for file in dict.fromkeys(where.values()):
        if Path(file).name != file:
            raise ValueError(f"expected names of files beside {str(index)!r}, found {file!r}")
        if not (folder / file).is_file():
            raise FileNotFoundError(f"expected {file!r} beside {str(index)!r}, which names it")
        header = _header(folder / file)
        places |= {name: place for name, place in header.items() if where.get(name) == file}
    if missing := [name for name in where if name not in places]:
        raise ValueError(
            f"expected {missing[0]!r} in {where[missing[0]]!r}, as {str(index)!r} says, "
            f"found no such tensor ({len(missing)} in all)"
        )
    return places


def _header(path: Path) -> dict[str, _Place]:
    """Return where the tensors of a file are, having checked that they fill it exactly."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise ValueError(
                f"expected a safetensors header of at most {min(size, _HEADER_LIMIT)} bytes "
                f"in {str(path)!r}, found {length}: the file is truncated or no safetensors"
            )
        content = _json(file.read(length), str(path))
    content.pop("__metadata__", None)
    spans: list[tuple[int, int, str]] = []
    places: dict[str, _Place] = {}
    for name, entry in content.items():
        dtype, shape, begin, end = _entry(entry, name, path)
        spans.append((begin, end, name))
        places[name] = _Place(path, dtype, shape, 8 + length + begin)
    expected = 0
    for begin, end, name in sorted(spans):
        if begin != expected:
            raise ValueError(
                f"expected {name!r} to begin at byte {expected} in {str(path)!r}, found {begin}: "
                f"tensors {'overlap' if begin < expected else 'leave a gap'}"
            )
        expected = end
        if 8 + length + end > size:
            raise ValueError(
                f"expected {8 + length + end} bytes in {str(path)!r} for {name!r}, found {size}: "
                "the file is truncated"
            )
    if 8 + length + expected != size:
        raise ValueError(
            f"expected {8 + length + expected} bytes in {str(path)!r}, found {size}: "
            "there is more than the header names"
        )
    return places


def _entry(entry: Any, name: str, path: Path) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    try:
        code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
        sound = isinstance(code, str) and isinstance(shape, list)
        sound = sound and all(type(number) is int and number >= 0 for number in numbers)
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise ValueError(
            f"expected dtype, shape and data_offsets of {name!r} in {str(path)!r}, found {entry!r}"
        )
    if code not in _DTYPES:
        raise ValueError(f"expected a known dtype of {name!r} in {str(path)!r}, found {code!r}")
    count = _DTYPES[code].itemsize
    for extent in shape:
        count *= extent
    if end - begin != count:
        raise ValueError(
            f"expected {count} bytes for {name!r} ({code}, shape {shape}) in {str(path)!r}, "
            f"found {end - begin}"
        )
    return _DTYPES[code], tuple(shape), begin, end


def _json(text: bytes, origin: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)

    try:
        content = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON in {origin!r}, found: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object in {origin!r}, found {type(content).__name__}")
    return content
