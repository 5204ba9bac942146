"""The sum of squares of a flat tensor: the compiled kernel where it was built, else its twin."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from hpczero import compiled
from hpczero.gpu import reference
from hpczero.gpu.reference import NORM_BLOCK


def sum_of_squares(flat: torch.Tensor) -> float:
    """Return the float64 sum of squares, the same on any number of threads and by either way.

    Not finite exactly where `flat` isn't, or a square of float64 overflows. One pass over memory
    on torch's number of threads.
    """
    kernel = _kernel(str(flat.dtype).removeprefix("torch."))
    if kernel is None or not flat.is_cpu or not flat.is_contiguous():
        return reference.sum_of_squares(flat)
    blocks = -(-flat.numel() // NORM_BLOCK)
    sums = (ctypes.c_double * blocks)()
    kernel(
        ctypes.c_void_p(flat.data_ptr()),
        ctypes.c_int64(flat.numel()),
        ctypes.c_int64(NORM_BLOCK),
        sums,
        ctypes.c_int(min(torch.get_num_threads(), blocks)),
    )
    total = 0.0
    for square in sums:
        total += square
    return total


@functools.cache
def _kernel(dtype: str) -> Any:
    library = compiled.library(str(Path(__file__).parent), "_norm_cpu")
    kernel: Any = getattr(library, f"squares_{dtype}", None)
    if kernel is not None:
        kernel.restype = None
    return kernel
