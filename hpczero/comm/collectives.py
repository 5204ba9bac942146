"""Collectives over flat tensors: exact, in fixed order, in pieces that every MPI can count.

All functions are called by all ranks of `comm`, by one thread at a time. 16-bit data moves as bytes
(MPI knows no bfloat16) and is summed in float32; every sum adds ranks 0, 1, ... N-1 in this order,
on several nodes first those of each and then the nodes' sums, divides, and rounds once to the dtype
of the result.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

from hpczero.comm.copies import copy_into
from hpczero.comm.sums import sum_into
from hpczero.comm.wire import PIECE_BYTES, buffer, pieces
from hpczero.sizing import WIRE_BLOCK, wire_piece

Nodes = Sequence[Sequence[int]]
"""The ranks of each node, ascending; none: all are on one."""


class Count(NamedTuple):
    """Hold one line of the traffic account."""

    calls: int
    bytes: int
    """Logical: bytes of the full vectors; an all-reduce is two (reduce-scatter, all-gather)."""
    sent: int
    """Bytes that MPI moved, per rank: total over all ranks / N."""

    def __add__(self, other: object) -> Count:
        assert isinstance(other, Count)
        return Count(*(a + b for a, b in zip(self, other, strict=True)))


class Traffic:
    """Count what collectives carry, by collective and purpose."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # both couriers count
        self._counts: dict[tuple[str, str], Count] = defaultdict(lambda: Count(0, 0, 0))

    def add(self, collective: str, purpose: str, count: Count) -> None:
        """Add one collective to the account."""
        with self._lock:
            self._counts[collective, purpose] += count

    def take(self) -> dict[tuple[str, str], Count]:
        """Return the counts since the last take, and start anew."""
        with self._lock:
            counts, self._counts = dict(self._counts), defaultdict(lambda: Count(0, 0, 0))
        return counts


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
PURPOSES = ("parameters", "gradients", "buffers", "exchange")


def tabulate(counts: dict[tuple[str, str], Count], unit: int) -> dict[str, Any]:
    """Return sums of counts: in all, by collective, by purpose; `unit` bytes are one multiple."""

    def line(some: Iterable[Count]) -> dict[str, float]:
        total = sum(some, Count(0, 0, 0))
        return {**total._asdict(), "multiples": total.bytes / unit if unit else 0.0}

    def by(index: int, usual: Sequence[str]) -> dict[str, dict[str, float]]:
        names = [*usual, *sorted({key[index] for key in counts} - set(usual))]
        return {
            name: line(count for key, count in counts.items() if key[index] == name)
            for name in names
        }

    return {
        **line(counts.values()),
        "by_collective": by(0, COLLECTIVES),
        "by_purpose": by(1, PURPOSES),
    }


class Staging:
    """Lend the constant-size memory in which a reduction receives and sums.

    Costs `sizing.wire_bytes`, whatever the size of what is reduced.
    """

    def __init__(self, size: int) -> None:
        self.piece_bytes = wire_piece(size)
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._size = size
        self._sums: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def rows(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a (ranks, piece) tensor to receive into."""
        if self._bytes.numel() == 0:  # reductions may never come: pay when the first one does
            self._bytes = torch.empty(self._size * self.piece_bytes, dtype=torch.uint8)
        return self._bytes.view(dtype).view(self._size, -1)

    def sums(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return blocks to sum in: of all, of a node, and to widen a term."""
        if dtype not in self._sums:
            first, second, third = torch.empty(3, WIRE_BLOCK, dtype=dtype)
            self._sums[dtype] = (first, second, third)
        return self._sums[dtype]


def share(piece: int | None, ranks: int, most: int) -> int:
    """Return the elements of a shard that travel at a time, for a `piece` of the full vector."""
    return most if piece is None else max(1, min(most, piece // ranks))


def all_gather(
    comm: MPI.Intracomm, full: torch.Tensor, shard: torch.Tensor, piece: int | None = None
) -> None:
    """Fill `full` with the shards of all ranks, in rank order, `piece` elements at a time.

    `full` has N times the elements of `shard`; `shard` may be rank's own slice of it.
    """
    count = shard.numel()
    own = full[comm.rank * count : (comm.rank + 1) * count]
    if own.data_ptr() != shard.data_ptr():
        copy_into(own, shard)
    if comm.size == 1:
        return
    item = shard.element_size()
    limit = item * share(piece, comm.size, PIECE_BYTES // item)
    if count * item <= limit:
        comm.Allgather(MPI.IN_PLACE, buffer(full))
        return
    everything = buffer(full)
    for start, stop in pieces(count * item, limit):
        with strided(stop - start, count * item) as column:
            comm.Allgather(MPI.IN_PLACE, [everything[start:], 1, column])


@contextlib.contextmanager
def strided(nbytes: int, stride: int) -> Iterator[MPI.Datatype]:
    """Make the type of `nbytes` of one rank where the next rank's come `stride` bytes later."""
    run = MPI.BYTE.Create_contiguous(nbytes)
    column = run.Create_resized(0, stride).Commit()
    try:
        yield column
    finally:
        column.Free()
        run.Free()


def reduce_scatter(
    comm: MPI.Intracomm,
    full: torch.Tensor,
    out: torch.Tensor,
    staging: Staging,
    *,
    divisor: int = 1,
    add: bool = False,
    piece: int | None = None,
    nodes: Nodes = (),
) -> None:
    """Put the sum over ranks of this rank's slice of `full`, divided, into `out`.

    `out` may be the rank's own slice of `full`. With `add` the rounded result is added to `out` in
    its dtype. Each rank sends (N-1)/N of `full` directly from where it lies, at a time as much as
    the staging holds and at most `piece` elements of `full`. Those of each of `nodes` are summed
    first, as where nodes sum before they send.
    """
    order = [peer for node in nodes for peer in node] or list(range(comm.size))
    count, rank, size = out.numel(), comm.rank, comm.size
    rows = staging.rows(full.dtype)
    for start, stop in pieces(count, share(piece, size, rows.shape[1])):
        inward = [(rank - step) % size for step in range(1, size)]
        outward = [(rank + step) % size for step in range(1, size)]
        requests = [comm.Irecv(buffer(rows[peer], 0, stop - start), peer) for peer in inward]
        requests += [
            comm.Isend(buffer(full, peer * count + start, peer * count + stop), peer)
            for peer in outward
        ]
        MPI.Request.Waitall(requests)
        own = full[rank * count + start : rank * count + stop]
        sources = [own if peer == rank else rows[peer] for peer in order]
        sum_into(out[start:stop], sources, staging.sums, divisor, add, [*map(len, nodes)])


def all_reduce(
    comm: MPI.Intracomm,
    full: torch.Tensor,
    staging: Staging,
    *,
    out: torch.Tensor | None = None,
    divisor: int = 1,
    add: bool = False,
    piece: int | None = None,
    nodes: Nodes = (),
) -> None:
    """Put the sum over ranks of `full`, divided, into `out` (default: `full`) on every rank.

    A reduce-scatter and an all-gather, so that its bits are those of the two apart.
    The elements of `full` must divide by the number of ranks.
    """
    out = full if out is None else out
    count = full.numel() // comm.size
    own = out[comm.rank * count : (comm.rank + 1) * count]
    reduce_scatter(comm, full, own, staging, divisor=divisor, add=add, piece=piece, nodes=nodes)
    all_gather(comm, out, own, piece)


def broadcast(comm: MPI.Intracomm, tensor: torch.Tensor, root: int = 0) -> None:
    """Copy a flat tensor from `root` to all ranks."""
    if comm.size > 1:
        for start, stop in pieces(tensor.numel(), PIECE_BYTES // tensor.element_size()):
            comm.Bcast(buffer(tensor, start, stop), root)


def gather(
    comm: MPI.Intracomm, shard: torch.Tensor, full: torch.Tensor | None, root: int = 0
) -> None:
    """Fill `full` on `root` with the shards of all ranks; other ranks pass None and only send."""
    limit = PIECE_BYTES // shard.element_size()
    count = shard.numel()
    if comm.rank != root:
        for start, stop in pieces(count, limit):
            comm.Send(buffer(shard, start, stop), root)
        return
    assert full is not None
    copy_into(full[root * count : (root + 1) * count], shard)
    for peer in range(comm.size):
        if peer != root:
            for start, stop in pieces(count, limit):
                comm.Recv(buffer(full, peer * count + start, peer * count + stop), peer)
