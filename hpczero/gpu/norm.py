"""The sum of squares of a flat tensor: compiled where it was built, else its twin in torch."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from hpczero import compiled

BLOCK = 1 << 20
"""Elements whose squares are summed apart from others: a thread's share, at least."""

LANES = 2048
"""Of norm_cpu.cpp: sums of a block that are added up last."""


def sum_of_squares(flat: torch.Tensor) -> float:
    """Return the float64 sum of squares, the same on any number of threads and by either way.

    In fixed blocks, each in lanes that are then added in halves. Not finite exactly where `flat`
    isn't, or a square of float64 overflows. One pass over memory on torch's number of threads; the
    twin needs a block in float64.
    """
    kernel = _kernel(str(flat.dtype).removeprefix("torch."))
    if kernel is None or not flat.is_cpu or not flat.is_contiguous():
        return _twin(flat)
    blocks = -(-flat.numel() // BLOCK)
    sums = (ctypes.c_double * blocks)()
    kernel(
        ctypes.c_void_p(flat.data_ptr()),
        ctypes.c_int64(flat.numel()),
        ctypes.c_int64(BLOCK),
        sums,
        ctypes.c_int(max(1, min(torch.get_num_threads(), blocks))),
    )
    total = 0.0
    for square in sums:
        total += square
    return total


def _twin(flat: torch.Tensor) -> float:
    total = 0.0
    for block in torch.split(flat, BLOCK):
        wide = block.to(torch.float64, copy=True)
        wide.mul_(wide)
        lanes = wide.new_zeros(LANES)
        for row in torch.split(wide, LANES):
            lanes[: row.numel()].add_(row)
        while lanes.numel() > 1:
            low, high = lanes.chunk(2)
            lanes = low + high
        total += lanes.item()
    return total


@functools.cache
def _kernel(dtype: str) -> Any:
    return compiled.kernel(__file__, "_norm_cpu", f"squares_{dtype}")
