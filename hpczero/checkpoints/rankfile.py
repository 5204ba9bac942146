"""One rank's HDF5 file: datasets made by h5py, bytes moved beside it, every block checksummed.

[Note: who checks what]
The manifest holds the checksum of each file's table and of its rest (HDF5's own structures). The
table, a dataset of JSON text, lists each other dataset with its place and the checksums of its
blocks. So whatever was read was what was written, a part of a dataset can be verified without
reading all of it, and no byte of a file goes unchecked.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import torch
import xxhash

from hpczero.comm.world import Comm
from hpczero.errors import CheckpointError
from hpczero.infinity.hdf5 import dtype_of, name_of, naming, reserve, write_at

BLOCK = 1 << 24
"""Bytes under one checksum."""
ALIGNMENT = 4096
"""Of datasets in the file: direct I/O and file systems' pages."""
TABLE = "table"


class Entry(NamedTuple):
    """Place a dataset in its file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    checksums: tuple[str, ...]
    """Of each block of the dataset's bytes, in xxh3_64."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the dataset."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


class Seal(NamedTuple):
    """Hold what a manifest says of a file: enough to know whether it is the one that was saved."""

    name: str
    size: int
    table_offset: int
    table_bytes: int
    table_checksum: str
    rest_checksum: str


class Stream(NamedTuple):
    """Stand for a tensor that is in no memory: it is written a block at a time."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], torch.Tensor]
    """Returns elements [start, stop), flat and contiguous."""


def write(path: Path, arrays: Sequence[tuple[str, torch.Tensor | Stream]]) -> Seal:
    """Write named tensors into a new file, flush it to the disk, and return its seal.

    Costs no memory beyond the tensors': their bytes go from where they lie. Streams cost a block.

    Raises:
        OSError: the disk is full, the folder read-only, the file there already.
        TypeError: HDF5 has no type for a tensor's dtype.
    """
    with naming(path):
        entries, table = create(path, describe(arrays))
        return seal(path, fill(path, arrays, entries), table)


def describe(arrays: Sequence[tuple[str, torch.Tensor | Stream]]) -> dict[str, Entry]:
    """Return the entries of tensors that have no place yet.

    Raises:
        TypeError: HDF5 has no type for a tensor's dtype.
    """
    return {
        name: Entry(
            name_of(tensor.dtype),
            tuple(tensor.shape),
            1 << 60,  # as long in the table as any place
            ("0" * 16,) * -(-math.prod(tensor.shape) * tensor.dtype.itemsize // BLOCK),
        )
        for name, tensor in arrays
    }


def create(
    path: Path, entries: Mapping[str, Entry], comm: Comm | None = None
) -> tuple[dict[str, Entry], Entry]:
    """Make a new file with room for all; return the entries with their places, and the table's.

    With `comm`, which takes an h5py with MPI, all its ranks call and give the same entries.

    Raises:
        OSError: the disk is full, the folder read-only, the file there already.
    """
    driver = {} if comm is None else {"driver": "mpio", "comm": comm}
    room = {"alignment_threshold": ALIGNMENT, "alignment_interval": ALIGNMENT}
    with h5py.File(path, "x", libver=("earliest", "v110"), **room, **driver) as file:
        placed = {
            name: each._replace(offset=reserve(file, name, each.dtype, each.shape))
            for name, each in entries.items()
        }
        # Last, so that what lies behind the data is never mistaken for it.
        shape = (len(_table(entries)),)
        return placed, Entry("uint8", shape, reserve(file, TABLE, "uint8", shape), ())


def fill(
    path: Path, arrays: Sequence[tuple[str, torch.Tensor | Stream]], entries: Mapping[str, Entry]
) -> dict[str, Entry]:
    """Write tensors in their places, flush them, and return their entries with checksums.

    Raises:
        OSError: the disk is full.
    """
    filled = {}
    with path.open("r+b", buffering=0) as file:
        for name, array in arrays:
            sums = tuple(_write(file.fileno(), entries[name].offset, _stream(array)))
            filled[name] = entries[name]._replace(checksums=sums)
        os.fsync(file.fileno())
    return filled


def seal(path: Path, entries: Mapping[str, Entry], table: Entry) -> Seal:
    """Write the table of all entries into their file, flush it, and return the file's seal.

    Raises:
        OSError: the disk is full.
    """
    text = _table(entries).ljust(table.nbytes)
    with path.open("r+b", buffering=0) as file:
        number = file.fileno()
        write_at(number, table.offset, memoryview(text))
        os.fsync(number)
        size = os.fstat(number).st_size
        rest = _rest(number, size, entries, table.offset, table.nbytes)
    return Seal(path.name, size, table.offset, table.nbytes, checksum(text), rest)


class RankFile:
    """Read tensors of a file, every byte verified before it is given.

    Args:
        folder: where the file lies.
        seal: what the manifest says of it.
        group: sees only the datasets in it, by their names there ("": all).

    Raises:
        CheckpointError: the file is missing, of another size, or isn't the one that was saved.
    """

    def __init__(self, folder: Path, seal: Seal, group: str = "") -> None:
        self.path = folder / seal.name
        try:
            self._number = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: {error.strerror}; the checkpoint needs it"
            ) from None
        os.posix_fadvise(self._number, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # read ahead while we check
        try:
            self.entries = self._open(seal, group)
        except BaseException:
            os.close(self._number)
            raise
        self._block = lru_cache(maxsize=2)(self._read_block)

    def _open(self, seal: Seal, group: str) -> dict[str, Entry]:
        size = os.fstat(self._number).st_size
        if size != seal.size:
            what = "truncated" if size < seal.size else "changed"
            raise CheckpointError(
                f"{self.path}: expected {seal.size} bytes, found {size}: the file was {what}"
            )
        table = bytearray(seal.table_bytes)
        _read_into(self._number, seal.table_offset, memoryview(table), self.path)
        self._check(checksum(table), seal.table_checksum, "table of checksums")
        entries = {
            name: Entry(dtype, tuple(shape), offset, tuple(sums))
            for name, (dtype, shape, offset, sums) in json.loads(table).items()
        }
        place = (seal.table_offset, seal.table_bytes)
        rest = _rest(self._number, size, entries, *place)
        self._check(rest, seal.rest_checksum, "HDF5 structures")
        return {
            name.removeprefix(group): entry
            for name, entry in entries.items()
            if name.startswith(group)
        }

    def forget(self) -> None:
        """Give back the memory of the blocks that were read last."""
        self._block.cache_clear()

    def close(self) -> None:
        """Close the file."""
        self.forget()
        os.close(self._number)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return elements [start, stop) of a dataset as a new flat tensor.

        Costs what it returns and one or two blocks.

        Raises:
            CheckpointError: there is no such dataset, or its bytes aren't those that were saved.
        """
        if name not in self.entries:
            raise CheckpointError(f"{self.path}: expected dataset {name!r}, found none")
        entry = self.entries[name]
        dtype = dtype_of(entry.dtype)
        stop = math.prod(entry.shape) if stop is None else stop
        result = torch.empty(stop - start, dtype=dtype)
        target = bytes_of(result)
        lo, hi = start * dtype.itemsize, stop * dtype.itemsize
        for index in range(lo // BLOCK, -(-hi // BLOCK)):
            start, end = index * BLOCK, min((index + 1) * BLOCK, entry.nbytes)
            first, last = max(lo, start), min(hi, end)
            piece = target[first - lo : last - lo]
            if (first, last) == (start, end):
                self._fill(piece, name, index)
            else:
                piece[:] = self._block(name, index)[first - start : last - start]
        return result

    def verify(self) -> Iterator[tuple[str, int]]:
        """Read everything, and yield each dataset's name and bytes when it is verified."""
        for name, entry in self.entries.items():
            for index in range(len(entry.checksums)):
                self._read_block(name, index)
            yield name, entry.nbytes

    def _read_block(self, name: str, index: int) -> memoryview:
        count = min(BLOCK, self.entries[name].nbytes - index * BLOCK)
        block = np.empty(count, dtype=np.uint8).data
        self._fill(block, name, index)
        return block

    def _fill(self, target: memoryview, name: str, index: int) -> None:
        entry = self.entries[name]
        offset = entry.offset + index * BLOCK
        _read_into(self._number, offset, target, self.path)
        self._check(checksum(target), entry.checksums[index], f"dataset {name!r}, block {index}")

    def _check(self, found: str, expected: str, what: str) -> None:
        if found != expected:
            raise CheckpointError(
                f"{self.path}: {what}: expected checksum {expected}, found {found}: the file was "
                "damaged or replaced after it was saved; load an older checkpoint (tag=...)"
            )


def checksum(data: memoryview | bytes | bytearray) -> str:
    """Return the xxh3_64 of bytes, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous tensor's memory; the caller keeps the tensor alive."""
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


def _stream(array: torch.Tensor | Stream) -> Stream:
    if isinstance(array, Stream):
        return array
    flat = array.detach().contiguous().view(-1)
    return Stream(array.dtype, tuple(array.shape), lambda start, stop: flat[start:stop])


def _table(entries: Mapping[str, Entry]) -> bytes:
    return json.dumps(entries).encode()


def _write(number: int, offset: int, stream: Stream) -> Iterator[str]:
    numel, size = math.prod(stream.shape), stream.dtype.itemsize
    for start in range(0, numel, BLOCK // size):
        values = stream.read(start, min(start + BLOCK // size, numel))
        block = bytes_of(values)
        write_at(number, offset + start * size, block)
        yield checksum(block)


def _read_into(number: int, offset: int, target: memoryview, path: Path) -> None:
    while target:
        count = os.preadv(number, [target], offset)
        if count == 0:
            raise CheckpointError(f"{path}: the file ends at byte {offset}: truncated")
        offset, target = offset + count, target[count:]


def _rest(
    number: int, size: int, entries: Mapping[str, Entry], table_offset: int, table_bytes: int
) -> str:
    """Return the checksum of all bytes that are neither data nor the table."""
    taken = sorted((e.offset, e.offset + e.nbytes) for e in entries.values() if e.nbytes)
    taken = [*taken, (table_offset, table_offset + table_bytes), (size, size)]
    digest, at = xxhash.xxh3_64(), 0
    for start, stop in sorted(taken):
        while at < start:
            piece = os.pread(number, min(BLOCK, start - at), at)
            if not piece:
                break
            digest.update(piece)
            at += len(piece)
        at = max(at, stop)
    return digest.hexdigest()
