"""Collectives of ranks on one node over tensors in node memory: each reads where the others' lie.

Their bits are those of `collectives`. All functions are called by all ranks of `comm`, one at a
time, when all have come to it; they return when no rank looks at another's tensor any more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from hpczero.comm.collectives import Staging
from hpczero.comm.node import NodeMemory
from hpczero.comm.sums import sum_into
from hpczero.comm.waiting import wait_politely


class Windows:
    """Reach what all ranks of a node have in its memory. Costs nothing but the mappings."""

    def __init__(self, comm: MPI.Intracomm, memory: NodeMemory, patience: float) -> None:
        self._comm, self._memory, self._patience = comm, memory, patience

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, places: Sequence[int]) -> None:
        """Fill `full` with the shards of all ranks, which lie at `places`.

        A rank's shard may be its own slice of its `full`. Costs each rank one copy of `full`.
        """
        nbytes = shard.numel() * shard.element_size()
        for rank, place in enumerate(places):
            target = full[rank * shard.numel() : (rank + 1) * shard.numel()]
            if rank != self._comm.rank:
                target.copy_(self._memory.look(place, nbytes).view(shard.dtype))
            elif target.data_ptr() != shard.data_ptr():
                target.copy_(shard)
        self._leave()

    def reduce_scatter(
        self,
        full: torch.Tensor,
        out: torch.Tensor,
        places: Sequence[int],
        staging: Staging,
        *,
        divisor: int = 1,
        add: bool = False,
    ) -> None:
        """Put the sum over ranks of this rank's slice of their `full`, divided, into `out`.

        `out` may be the rank's own slice of `full`. Costs each rank reading the slice N times.
        """
        begin = self._comm.rank * out.numel()
        item = full.element_size()
        sources = [
            self._memory.look(place + begin * item, out.numel() * item).view(full.dtype)
            for place in places
        ]
        sum_into(out, sources, staging.sums, divisor, add)
        self._leave()

    def all_reduce(
        self,
        full: torch.Tensor,
        out: torch.Tensor,
        places: Sequence[tuple[int, int]],
        staging: Staging,
        *,
        divisor: int = 1,
        add: bool = False,
    ) -> None:
        """Put the sum over ranks of `full`, divided, into `out` on every rank.

        Args:
            places: of `full` and `out`, which may be the same.
        """
        count = full.numel() // self._comm.size
        own = out[self._comm.rank * count : (self._comm.rank + 1) * count]
        sums, results = zip(*places, strict=True)
        self.reduce_scatter(full, own, sums, staging, divisor=divisor, add=add)
        stride = count * out.element_size()
        shards = [place + rank * stride for rank, place in enumerate(results)]
        self.all_gather(out, own, shards)

    def _leave(self) -> None:
        """Wait until all ranks have read: then what they looked at may change."""
        wait_politely(self._comm.Ibarrier(), self._patience)
