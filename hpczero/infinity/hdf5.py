"""Tensors as HDF5 datasets: their types, their room in a file, and their bytes beside HDF5."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.bool,
        torch.complex64,
        torch.complex128,
        *(getattr(torch, name) for name in _INTEGERS),
    )
}


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name, "bfloat16" say.

    Raises:
        TypeError: HDF5 has no type for it.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise TypeError(
            f"expected a dtype that HDF5 can store ({', '.join(_DTYPES)}), found {name}"
        )
    return name


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name that `name_of` gave.

    Raises:
        ValueError: there is no such dtype.
    """
    if name not in _DTYPES:
        raise ValueError(f"expected a dtype of {', '.join(_DTYPES)}, found {name!r}")
    return _DTYPES[name]


def hdf5_type(name: str) -> Any:
    """Return HDF5's type: bfloat16 as a two-byte float that h5py reads as float32."""
    if name != "bfloat16":
        return h5py.h5t.py_create(np.dtype(name), logical=True)
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)  # sign bit, exponent at 7 of 8 bits, mantissa at 0 of 7
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


def reserve(file: Any, name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Make room for a tensor in an open h5py.File, and return where its bytes go.

    They lie in one run, and are written with `write_at` once the file is closed: HDF5 would want
    a flat run cut into boxes, and holds a lock for all threads.
    """
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_layout(h5py.h5d.CONTIGUOUS)
    create.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    create.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
    dataset = h5py.h5d.create(file.id, None, hdf5_type(dtype), space, create)
    h5py.h5o.link(dataset, file.id, name.encode(), lcpl=link_properties())
    return dataset.get_offset() or 0  # an empty dataset has no place


def link_properties() -> Any:
    """Return properties for names in UTF-8 whose groups are made as needed."""
    link = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    link.set_create_intermediate_group(True)
    link.set_char_encoding(h5py.h5t.CSET_UTF8)
    return link


def write_at(number: int, offset: int, data: memoryview) -> None:
    """Write bytes at a place of an open file, however many calls that takes."""
    while data:
        written = os.pwrite(number, data, offset)
        offset, data = offset + written, data[written:]


@contextlib.contextmanager
def naming(path: Path, what: str = "") -> Iterator[None]:
    """Raise an OSError that names `path`, and what was done, for those of the system or of HDF5.

    HDF5's own tell in several lines which of its functions met an errno, if as a RuntimeError.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        number = error.errno if isinstance(error, OSError) else None
        if number is None and (told := re.search(r"errno = (\d+)", str(error))):
            number = int(told[1])
        if number is None or getattr(error, "filename", None) is not None:
            raise
        text = f"{what}: {os.strerror(number)}" if what else os.strerror(number)
        raise OSError(number, text, str(path)) from error
