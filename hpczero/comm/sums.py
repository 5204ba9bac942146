"""Sum what ranks reduce: in compiled code where it was built, else in its twin in torch."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch

from hpczero import compiled
from hpczero.comm.wire import pieces
from hpczero.sizing import WIRE_BLOCK

Scratch = Callable[[torch.dtype], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Return three blocks of WIRE_BLOCK elements, for the twin."""


def sum_into(
    out: torch.Tensor,
    sources: Sequence[torch.Tensor],
    scratch: Scratch,
    divisor: int = 1,
    add: bool = False,
    nodes: Sequence[int] = (),
) -> None:
    """Put the sum of flat sources of one dtype, added in order, divided, into `out`, or add it.

    Sums in float32 (float64 stays) and rounds once, before it adds. `out` may be a source. One pass
    over memory on one thread, which doesn't hold Python's lock.

    Args:
        out: of as many elements as each source has.
        sources: the terms.
        scratch: memory for the twin.
        divisor: of the sum.
        add: keep what `out` has.
        nodes: how many sources each node has; these are summed first, then the nodes' sums. None:
            they are on one.
    """
    nodes = nodes or (len(sources),)
    kernel = _kernel(f"sum_{_name(sources[0])}_{_name(out)}")
    if kernel is None:
        _twin(out, sources, scratch, divisor, add, nodes)
        return
    wide = ctypes.c_double if out.dtype == torch.float64 else ctypes.c_float
    kernel(
        (ctypes.c_void_p * len(sources))(*(source.data_ptr() for source in sources)),
        (ctypes.c_int * len(nodes))(*nodes),
        ctypes.c_int(len(nodes)),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(out.numel()),
        wide(divisor),
        ctypes.c_int(add),
    )


def _twin(
    out: torch.Tensor,
    sources: Sequence[torch.Tensor],
    scratch: Scratch,
    divisor: int,
    add: bool,
    nodes: Sequence[int],
) -> None:
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    memory = scratch(wide)
    for start, stop in pieces(out.numel(), WIRE_BLOCK):
        total, node, extra = (block[: stop - start] for block in memory)
        terms = iter([source[start:stop] for source in sources])
        for number, count in enumerate(nodes):
            block = node if number else total
            block.copy_(next(terms))
            for term in islice(terms, count - 1):
                block.add_(term if term.dtype == wide else extra.copy_(term))
            if number:
                total.add_(node)
        if divisor != 1:
            total.div_(divisor)
        target = out[start:stop]
        if not add:
            target.copy_(total)
        else:
            target.add_(total if out.dtype == wide else total.to(out.dtype))


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@functools.cache
def _kernel(name: str) -> Any:
    return compiled.kernel(__file__, "_sum_cpu", name)
