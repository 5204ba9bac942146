"""Adam on flat tensors: the compiled kernel where it was built, else its twin in torch.

Both give the same bits; see adam.h.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path
from typing import Any

import torch

from hpczero import compiled
from hpczero.gpu import reference
from hpczero.gpu.reference import TILE, AdamStep

_FIELDS = (
    "scale", "keep", "weight_decay", "beta1", "rest1", "beta2", "rest2", "correction2", "eps",
    "size",
)  # fmt: skip


class _Float(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float) for name in _FIELDS]


class _Double(ctypes.Structure):
    _fields_ = [(name, ctypes.c_double) for name in _FIELDS]


def adam_(
    weights: torch.Tensor,
    master: torch.Tensor,
    grad: torch.Tensor,
    moment1: torch.Tensor,
    moment2: torch.Tensor,
    constants: AdamStep,
    tile_size: int = TILE,
) -> None:
    """Update flat `master` and moments in place from a gradient of any floating dtype.

    The new master is rounded into `weights`, which may be `master` itself. One pass over memory on
    torch's number of threads, without temporary memory; the twin needs two tiles.

    Args:
        weights: in the dtype of compute.
        master: float32 or float64, as the moments are.
        grad: of any floating dtype.
        moment1: Adam's m.
        moment2: Adam's v.
        constants: of this step.
        tile_size: elements at a time, for the twin.
    """
    same = weights.data_ptr() == master.data_ptr()
    name = f"adam_{'none' if same else _name(weights)}_{_name(grad)}"
    tensors = (weights, master, grad, moment1, moment2)
    kernel = _kernel(name)
    if kernel is None or not all(t.is_cpu and t.is_contiguous() for t in tensors):
        reference.adam_(weights, master, grad, moment1, moment2, constants, tile_size)
        return
    c = constants
    values = _Double if master.dtype == torch.float64 else _Float
    keep = 1 - c.lr * c.weight_decay if c.decoupled else 1.0
    kernel(
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors),
        ctypes.c_int64(master.numel()),
        ctypes.byref(
            values(
                scale=c.scale,
                keep=keep,
                weight_decay=0.0 if c.decoupled else c.weight_decay,
                beta1=c.beta1,
                rest1=1 - c.beta1,
                beta2=c.beta2,
                rest2=1 - c.beta2,
                correction2=math.sqrt(1 - c.beta2**c.step),
                eps=c.eps,
                size=c.lr / (1 - c.beta1**c.step),
            )
        ),
        ctypes.c_int(min(torch.get_num_threads(), -(-master.numel() // TILE))),
    )


def kernel_name() -> str:
    """Return which kernel updates: "C++ (AVX-512)" say, or "torch"."""
    library = _library()
    return "torch" if library is None else f"C++ ({library.instruction_set().decode()})"


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = compiled.library(str(Path(__file__).parent), "_adam_cpu")
    if library is None:
        return None
    library.instruction_set.restype = ctypes.c_char_p
    return library


@functools.cache
def _kernel(name: str) -> Any:
    return compiled.kernel(__file__, "_adam_cpu", name)
