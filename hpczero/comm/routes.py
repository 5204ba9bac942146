"""Routes of blocks between nodes, and what each would cost over a measured link.

[Note: no sums on the way]
A sum adds the nodes' sums in node order, so none may be added on the way, as recursive halving
does: a reduction exchanges them whole, and its bits depend on no route. What is left to choose:

    gather    ring      n - 1 rounds between neighbours, a block in each
              direct    n - 1 messages at once
              Bruck     log2 n rounds of 1, 2, 4, ... blocks: recursive doubling's price, for any n
    exchange  direct    n - 1 messages at once
              Bruck     log2 n rounds of half the blocks each, passed on: more bytes

All gathers move the same bytes. MPI's own gather is none of the choices: it takes one of these by
limits that nobody measured here, and nobody could foretell what it costs.

The model is Hockney's (Parallel Computing 20, 1994), a latency and a bandwidth, with LogP's gap
between messages (Culler et al., PPoPP 1993); the costs are those of Thakur, Rabenseifner and Gropp
(Optimization of collective communication operations in MPICH, IJHPCA 19, 2005), the rounds those of
Bruck et al. (IEEE TPDS 8, 1997). It knows neither the copies that scattered blocks take inside MPI,
nor that a direct exchange sums while it sends.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from mpi4py import MPI

from hpczero.comm.waiting import wait_politely
from hpczero.comm.wire import PIECE_BYTES, buffer


class Link(NamedTuple):
    """Hold what it costs to talk to another node while all ranks of this one do."""

    latency: float
    """Seconds of a tiny message: half a ping-pong."""
    gap: float
    """Seconds from one message of a burst to the next."""
    bandwidth: float
    """Bytes per second of one rank, each way."""


FREE = Link(0.0, 0.0, float("inf"))
"""Where nothing was measured: the routes of fewest bytes, and between neighbours."""

ROUNDS = 7
BURST = 16
BULK = 1 << 18
"""Bytes: far above what fits a latency, and a node of eight ranks still sends them in 20 ms at
1 Gbit/s."""


def measure(comm: MPI.Intracomm, patience: float) -> Link:
    """Return what a column's first rank sees while each of the lower half plays ping-pong.

    Called by all ranks of all columns at once, so that those of a node share its network as they do
    in training. Costs 27 rounds, and 2.3 MiB that each rank sends.

    Args:
        comm: this rank's column.
        patience: seconds of yielding before sleeping.
    """
    half, memory = comm.size // 2, torch.empty(2 * BULK, dtype=torch.uint8)

    def seconds(messages: int, nbytes: int) -> float:
        ours, theirs = (
            [buffer(part, i * nbytes, (i + 1) * nbytes) for i in range(messages)]
            for part in (memory[:BULK], memory[BULK:])
        )
        times = []
        for _ in range(ROUNDS + 2 if comm.rank < 2 * half else 0):
            start = time.perf_counter()
            peer = (comm.rank + half) % (2 * half)  # a reply: else one may run ahead of the other
            coming = [comm.Irecv(row, peer) for row in theirs]
            if comm.rank >= half:
                wait_politely(coming, patience, moving=True)
            going = [comm.Isend(row, peer) for row in ours]
            wait_politely([*coming, *going], patience, moving=True)
            times.append((time.perf_counter() - start) / 2)
        return statistics.median(times[2:] or [1.0])  # connected; a last odd rank plays none

    latency, burst, bulk = seconds(1, 1), seconds(BURST, 1), seconds(1, BULK)
    gap = max(0.0, burst - latency) / (BURST - 1)
    link: Link = comm.bcast(Link(latency, gap, BULK / max(bulk - latency, bulk / 2)))
    return link


# Costs #


def gather_seconds(nodes: int, nbytes: int, link: Link) -> dict[str, float]:
    """Return the seconds of each route that brings a block of every node to all of them."""
    transfer = (nodes - 1) * nbytes / link.bandwidth
    return {
        "ring": (nodes - 1) * link.latency + transfer,
        "direct": link.latency + (nodes - 2) * link.gap + transfer,
        "bruck": len(_distances(nodes)) * link.latency + transfer,
    }


def exchange_seconds(nodes: int, nbytes: int, link: Link) -> dict[str, float]:
    """Return the seconds of each route that brings every node a block of each other."""
    blocks = sum(len(_passed(nodes, distance)) for distance in _distances(nodes))
    return {
        "direct": link.latency + (nodes - 2) * link.gap + (nodes - 1) * nbytes / link.bandwidth,
        "bruck": len(_distances(nodes)) * link.latency + blocks * nbytes / link.bandwidth,
    }


def gather_route(nodes: int, nbytes: int, link: Link) -> str:
    """Return which route a gather of blocks of `nbytes` takes.

    The ring, unless its latencies make it a tenth slower: it loads only links of neighbours.
    """
    seconds = gather_seconds(nodes, nbytes, link)
    if nodes // 2 * nbytes > PIECE_BYTES:
        del seconds["bruck"]  # more than MPI counts in its largest message
    best = min(seconds, key=seconds.__getitem__)
    return "ring" if seconds["ring"] <= 1.1 * seconds[best] else best


def exchange_route(nodes: int, nbytes: int, link: Link) -> str:
    """Return which route an exchange of blocks of `nbytes` takes: the faster one."""
    seconds = exchange_seconds(nodes, nbytes, link)
    return "bruck" if seconds["bruck"] < seconds["direct"] else "direct"


# Gathers #


class Blocks(NamedTuple):
    """Say where the blocks of all nodes lie, in their order."""

    memory: MPI.buffer
    nbytes: int
    """Of each block."""
    stride: int
    """Bytes from one to the next."""

    def one(self, number: int) -> MPI.buffer:
        """Return a block."""
        begin = number * self.stride
        return self.memory[begin : begin + self.nbytes]


def gather(comm: MPI.Intracomm, blocks: Blocks, link: Link, patience: float) -> None:
    """Fill the blocks of all others; each rank's own is there. Every rank sends n - 1 blocks.

    Args:
        comm: a rank of each node, in their order; all call.
        blocks: where they are, or will be.
        link: the same on all ranks.
        patience: seconds of yielding before sleeping.
    """
    run = {"ring": _ring_gather, "direct": _direct_gather, "bruck": _bruck_gather}
    run[gather_route(comm.size, blocks.nbytes, link)](comm, blocks, patience)


def _ring_gather(comm: MPI.Intracomm, blocks: Blocks, patience: float) -> None:
    """Pass on to the next node what the one before sent last."""
    nodes, mine = comm.size, comm.rank
    for step in range(1, nodes):
        coming, going = blocks.one((mine - step) % nodes), blocks.one((mine - step + 1) % nodes)
        requests = [comm.Irecv(coming, (mine - 1) % nodes), comm.Isend(going, (mine + 1) % nodes)]
        wait_politely(requests, patience, moving=True)


def _direct_gather(comm: MPI.Intracomm, blocks: Blocks, patience: float) -> None:
    """Send the own block to all."""
    nodes, mine = comm.size, comm.rank
    others = [(mine + step) % nodes for step in range(1, nodes)]
    requests = [comm.Irecv(blocks.one(peer), peer) for peer in others]
    requests += [comm.Isend(blocks.one(mine), peer) for peer in others]
    wait_politely(requests, patience, moving=True)


def _bruck_gather(comm: MPI.Intracomm, blocks: Blocks, patience: float) -> None:
    """Double the run of blocks that begins with this node's, from the node where it ends."""
    nodes, mine = comm.size, comm.rank
    for distance in _distances(nodes):
        count = min(distance, nodes - distance)
        ahead, behind = (mine + distance) % nodes, (mine - distance) % nodes
        coming = [(ahead + step) % nodes for step in range(count)]
        going = [(mine + step) % nodes for step in range(count)]
        _swap(comm, blocks, (coming, ahead), (going, behind), patience)


# Exchanges #


def exchange(
    comm: MPI.Intracomm,
    rows: torch.Tensor,
    fill: Callable[[int, torch.Tensor], None],
    link: Link,
    patience: float,
) -> tuple[list[torch.Tensor], int]:
    """Return what each node has for this one, in their order, and the bytes that this rank sent.

    Args:
        comm: a rank of each node, in their order; all call.
        rows: memory for two rows per node, in which the result lies.
        fill: puts into a row what this node has for another, or for itself.
        link: the same on all ranks.
        patience: seconds of yielding before sleeping.
    """
    nbytes = rows.shape[1] * rows.element_size()
    if exchange_route(comm.size, nbytes, link) == "bruck":
        return _bruck_exchange(comm, rows, fill, patience)
    return _direct_exchange(comm, rows, fill, patience)


def _direct_exchange(
    comm: MPI.Intracomm,
    rows: torch.Tensor,
    fill: Callable[[int, torch.Tensor], None],
    patience: float,
) -> tuple[list[torch.Tensor], int]:
    """Send each row as soon as it is filled."""
    nodes, mine = comm.size, comm.rank
    ours, theirs = rows[:nodes], rows[nodes : 2 * nodes]
    others = [(mine + step) % nodes for step in range(1, nodes)]
    requests = [comm.Irecv(buffer(theirs[peer]), peer) for peer in others]
    for peer in [*others, mine]:
        fill(peer, ours[peer])
        if peer != mine:
            requests.append(comm.Isend(buffer(ours[peer]), peer))
    wait_politely(requests, patience, moving=True)
    found = [(ours if peer == mine else theirs)[peer] for peer in range(nodes)]
    return found, (nodes - 1) * rows.shape[1] * rows.element_size()


def _bruck_exchange(
    comm: MPI.Intracomm,
    rows: torch.Tensor,
    fill: Callable[[int, torch.Tensor], None],
    patience: float,
) -> tuple[list[torch.Tensor], int]:
    """Let each row travel the powers of two of which its distance is the sum.

    Row d goes d nodes further. Each time that it moves it changes between the lower half of the
    rows and the upper one, since what comes in its place must not overwrite it.
    """
    nodes, mine = comm.size, comm.rank
    nbytes, stride = (count * rows.element_size() for count in (rows.shape[1], rows.stride(0)))
    memory = MPI.buffer.fromaddress(rows.data_ptr(), (2 * nodes - 1) * stride + nbytes)
    blocks = Blocks(memory, nbytes, stride)

    def place(row: int, travelled: int) -> int:
        return row + nodes * (travelled.bit_count() % 2)

    for row in range(nodes):
        fill((mine + row) % nodes, rows[row])
    sent = 0
    for distance in _distances(nodes):
        passed = _passed(nodes, distance)
        coming = [place(row, row % (2 * distance)) for row in passed]
        going = [place(row, row % distance) for row in passed]
        ahead, behind = (mine + distance) % nodes, (mine - distance) % nodes
        _swap(comm, blocks, (coming, behind), (going, ahead), patience)
        sent += len(passed) * nbytes
    travelled = [(mine - peer) % nodes for peer in range(nodes)]
    return [rows[place(row, row)] for row in travelled], sent


def _distances(nodes: int) -> list[int]:
    """Return the powers of two below `nodes`: Bruck's rounds."""
    return [1 << power for power in range((nodes - 1).bit_length())]


@functools.cache  # each piece of a reduction asks
def _passed(nodes: int, distance: int) -> tuple[int, ...]:
    """Return which rows of an exchange travel in a round."""
    return tuple(row for row in range(nodes) if row & distance)


def _swap(
    comm: MPI.Intracomm,
    blocks: Blocks,
    coming: tuple[Sequence[int], int],
    going: tuple[Sequence[int], int],
    patience: float,
) -> None:
    """Receive some blocks from a rank, and send others to another, in one message each."""
    with _picked(blocks, coming[0]) as theirs, _picked(blocks, going[0]) as ours:
        requests = [
            comm.Irecv([blocks.memory, 1, theirs], coming[1]),
            comm.Isend([blocks.memory, 1, ours], going[1]),
        ]
        wait_politely(requests, patience, moving=True)


@contextlib.contextmanager
def _picked(blocks: Blocks, numbers: Sequence[int]) -> Iterator[MPI.Datatype]:
    """Make the type of some of the blocks."""
    places = [number * blocks.stride for number in numbers]
    made = MPI.BYTE.Create_hindexed_block(blocks.nbytes, places).Commit()
    try:
        yield made
    finally:
        made.Free()
