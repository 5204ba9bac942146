"""Turn flat tensors into what MPI sends, and calls into signatures that ranks can compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from mpi4py import MPI

PIECE_BYTES = 1 << 29
"""Largest count in one MPI call: Open MPI 5 refuses counts of 2^31, and users report worse."""

SIGNATURE_BYTES = 32


def buffer(tensor: torch.Tensor, start: int = 0, stop: int | None = None) -> MPI.buffer:
    """Return the bytes of elements [start, stop) of a flat tensor as an MPI buffer.

    Costs a microsecond and no copy. The caller keeps the tensor alive while MPI uses the buffer.
    Never goes through `.numpy()`, which would forbid the storage to be resized.
    """
    size = tensor.element_size()
    stop = tensor.numel() if stop is None else stop
    return MPI.buffer.fromaddress(tensor.data_ptr() + start * size, (stop - start) * size)


def pieces(count: int, limit: int) -> Iterator[tuple[int, int]]:
    """Cut [0, count) into intervals of at most `limit`."""
    for start in range(0, count, limit):
        yield start, min(start + limit, count)


class Cargo(NamedTuple):
    """Say what a collective carries, for counters and error messages."""

    purpose: str
    name: str
    payload: int
    """Bytes of the full vector without padding: what the traffic formulas count."""
    piece: int | None = None
    """Elements of the full vector that travel at a time, at most; None is up to the collective."""


class Signature(NamedTuple):
    """Describe one collective so that ranks can compare it before the data moves."""

    collective: str
    name: str
    numel: int
    dtype: str

    def __str__(self) -> str:
        if self.collective == GOODBYE:
            return "has left (its program ended)"
        size = f" of {self.numel} x {self.dtype}" if self.dtype else ""
        return f"{self.collective} {self.name!r}{size}"

    def pack(self, number: int) -> npt.NDArray[np.uint8]:
        """Return a digest of the signature and its number in the queue."""
        text = f"{number}|{self.collective}|{self.name}|{self.numel}|{self.dtype}"
        digest = hashlib.blake2b(text.encode(), digest_size=SIGNATURE_BYTES).digest()
        return np.frombuffer(digest, dtype=np.uint8)


GOODBYE = "goodbye"


def signature(collective: str, cargo: Cargo, tensor: torch.Tensor) -> Signature:
    """Return the signature of a collective over a full flat tensor."""
    return Signature(
        collective, cargo.name, tensor.numel(), str(tensor.dtype).removeprefix("torch.")
    )
