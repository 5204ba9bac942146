"""Collectives over tensors in node memory: on a node each rank reads where the others' lie.

[Note: each byte crosses once]
On several nodes of equally many ranks, only ranks of equal place on their nodes, a column, talk
across. A gather sends a rank's shard to its column; then every rank of a node takes from its
neighbours what their columns have brought, or finds it in the vector that they share. A reduction
sums on the node first what goes to another, in float32, and sends that. So each byte crosses the
network once per node in place of once per rank, and every rank drives a part of it. On how many
nodes a column is, how large its blocks are, and its link decide by which of `routes` they go.

The bits are those of `collectives`. All functions are called by all ranks of `comm`, one at a time,
when all have come to it; they return when no rank looks at another's tensor any more, and tell how
many bytes this one has sent to other nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from mpi4py import MPI

from hpczero.comm import routes
from hpczero.comm.collectives import Nodes, Staging, share
from hpczero.comm.copies import copy_into
from hpczero.comm.node import NodeMemory
from hpczero.comm.routes import Blocks, Link
from hpczero.comm.sums import sum_into
from hpczero.comm.waiting import wait_politely
from hpczero.comm.wire import PIECE_BYTES, buffer, pieces


class Windows:
    """Reach what all ranks of a node have in its memory, and the columns across nodes.

    Created by all ranks of `comm` together. Costs two communicators, and no memory.

    Args:
        comm: all ranks.
        memory: of this rank's node.
        patience: seconds of yielding before sleeping.
        nodes: the ranks of each node; see `columns`.
        link: between nodes, the same on all ranks.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        memory: NodeMemory,
        patience: float,
        nodes: Nodes,
        link: Link = routes.FREE,
    ) -> None:
        self._memory, self._patience, self.rank = memory, patience, comm.rank
        self._link = link
        self.node_number = next(n for n, ranks in enumerate(nodes) if comm.rank in ranks)
        self._nodes = [list(ranks) for ranks in nodes]
        self._neighbours = self._nodes[self.node_number]
        place = self._neighbours.index(comm.rank)
        self._column = [ranks[place] for ranks in nodes]
        """The ranks of equal place, in the order of nodes; this one is among them."""
        self._near = comm.Split(self.node_number, comm.rank)
        self._far = cast("MPI.Intracomm", comm.Split(place, comm.rank))

    def all_gather(
        self,
        full: torch.Tensor,
        shard: torch.Tensor,
        places: Sequence[int],
        piece: int | None = None,
        *,
        in_full: bool,
    ) -> int:
        """Fill `full` with the shards of all ranks.

        A rank's shard may be its own slice of its `full`, and that one `full` of all ranks of the
        node. Costs each rank one copy of `full` if not, and sends its shard to every other node.

        Args:
            full: the result.
            shard: this rank's.
            places: by rank, of their shards, or of their `full` where shards are found in it.
            piece: elements of `full` that cross at a time, at most.
            in_full: which of the two; always in `full` on several nodes.
        """
        count, item = shard.numel(), shard.element_size()
        own = full[self.rank * count : (self.rank + 1) * count]
        if own.data_ptr() != shard.data_ptr():
            copy_into(own, shard)
        if len(self._nodes) > 1:
            self._gather_column(full, count * item, piece)
            self._meet()
        mine = places[self.rank]
        for place, neighbour in enumerate(self._neighbours):
            if in_full and places[neighbour] == mine:
                continue  # my own, or we share one `full`
            for ranks in self._nodes if neighbour != self.rank else ():
                begin = ranks[place] * count
                offset = begin * item if in_full else 0
                source = self._memory.look(places[neighbour] + offset, count * item)
                copy_into(full[begin : begin + count], source.view(shard.dtype))
        self._meet()
        return (len(self._nodes) - 1) * count * item

    def reduce_scatter(
        self,
        full: torch.Tensor,
        out: torch.Tensor,
        places: Sequence[int],
        staging: Staging,
        *,
        divisor: int = 1,
        add: bool = False,
        piece: int | None = None,
    ) -> int:
        """Put the sum over ranks of this rank's slice of their `full`, divided, into `out`.

        `out` may be the rank's own slice of `full`. Costs each rank reading the slice of each of
        its column once on every neighbour, and sends that many less its own in the sums' dtype.
        """
        sent = 0
        if len(self._nodes) == 1:
            sources = self._terms(full, out.numel(), self.rank, places)
            sum_into(out, sources, staging.sums, divisor, add)
        else:
            sent = self._reduce_column(full, out, places, staging, divisor, add, piece)
        self._meet()
        return sent

    def all_reduce(
        self,
        full: torch.Tensor,
        out: torch.Tensor,
        places: Sequence[tuple[int, int]],
        staging: Staging,
        *,
        divisor: int = 1,
        add: bool = False,
        piece: int | None = None,
    ) -> int:
        """Put the sum over ranks of `full`, divided, into `out` on every rank.

        Args:
            full: the terms.
            out: the result, perhaps `full` itself.
            places: by rank, of `full` and `out`.
            staging: memory to sum in.
            divisor: of the sum.
            add: keep what `out` has.
            piece: elements of `full` that cross at a time, at most.
        """
        count = full.numel() // sum(map(len, self._nodes))
        own = out[self.rank * count : (self.rank + 1) * count]
        sums, results = zip(*places, strict=True)
        sent = self.reduce_scatter(full, own, sums, staging, divisor=divisor, add=add, piece=piece)
        stride = count * out.element_size() if len(self._nodes) == 1 else 0
        shards = [place + rank * stride for rank, place in enumerate(results)]
        in_full = len(self._nodes) > 1
        return sent + self.all_gather(out, own, shards, piece, in_full=in_full)

    def _terms(
        self, full: torch.Tensor, count: int, rank: int, places: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the slice of a rank in the `full` of each rank of this node."""
        begin, item = rank * count * full.element_size(), full.element_size()
        return [
            self._memory.look(places[neighbour] + begin, count * item).view(full.dtype)
            for neighbour in self._neighbours
        ]

    def _gather_column(self, full: torch.Tensor, nbytes: int, piece: int | None) -> None:
        """Bring the shards of this rank's column to their places in `full`."""
        item = full.element_size()
        limit = item * share(piece, len(self._column), PIECE_BYTES // item)
        step = self._column[1] - self._column[0]
        everything = buffer(full)[self._column[0] * nbytes :]
        for start, stop in pieces(nbytes, limit):
            blocks = Blocks(everything[start:], stop - start, step * nbytes)
            routes.gather(self._far, blocks, self._link, self._patience)

    def _reduce_column(
        self,
        full: torch.Tensor,
        out: torch.Tensor,
        places: Sequence[int],
        staging: Staging,
        divisor: int,
        add: bool,
        piece: int | None,
    ) -> int:
        """Sum on this node what each of the column owns, exchange the sums, and add them up."""
        count, nodes = out.numel(), len(self._column)
        wide = torch.float64 if out.dtype == torch.float64 else torch.float32
        rows = staging.rows(wide)[: 2 * nodes]  # there are: at least two ranks a node
        terms = [self._terms(full, count, rank, places) for rank in self._column]
        sent = 0
        for start, stop in pieces(count, share(piece, nodes, rows.shape[1])):

            def fill(node: int, row: torch.Tensor, start: int = start, stop: int = stop) -> None:
                sum_into(row, [term[start:stop] for term in terms[node]], staging.sums)

            lent = rows[:, : stop - start]
            sums, more = routes.exchange(self._far, lent, fill, self._link, self._patience)
            sum_into(out[start:stop], sums, staging.sums, divisor, add)
            sent += more
        return sent

    def _meet(self) -> None:
        """Wait for all ranks of the node: what they look at is there, or may change from now on."""
        wait_politely([self._near.Ibarrier()], self._patience)


def columns(nodes: Nodes) -> bool:
    """Tell whether ranks of equal place on their nodes can exchange whole columns.

    All nodes must have equally many ranks, and the ranks of a column be evenly spaced, as launchers
    number them by blocks or in turns.
    """
    if len(nodes) == 1:
        return True
    if len({len(ranks) for ranks in nodes}) > 1 or len(nodes[0]) == 1:
        return False
    steps = {b - a for one, next_ in pairwise(nodes) for a, b in zip(one, next_, strict=True)}
    return len(steps) == 1 and min(steps) > 0
