"""Batches of a data set in an order that epoch, seed and position determine, whatever the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler


class GlobalOrder(Sampler[int]):
    """Yield this rank's samples of an epoch: each N-th of one shuffled order for all N ranks.

    The order is that of torch's DistributedSampler. Positions in it count samples over all ranks,
    so that another number of ranks can go on from one.

    Args:
        size: samples in the data set.
        ranks: how many ranks share them.
        rank: this one.
        drop_last: leave out the samples that don't divide by the ranks, else repeat the first ones.
        seed: another seed gives another order.
    """

    def __init__(self, size: int, ranks: int, rank: int, drop_last: bool, seed: int = 0) -> None:
        self._size, self._ranks, self._rank = size, ranks, rank
        self._drop_last = drop_last
        self._seed = seed
        self.epoch = 0
        self.start = 0
        """Samples over all ranks that are passed over."""

    def __len__(self) -> int:
        left = max(0, self._size - self.start)
        return left // self._ranks if self._drop_last else -(-left // self._ranks)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        order = torch.randperm(self._size, generator=generator).tolist()
        total = self.start + len(self) * self._ranks
        order += (order * -(-total // max(1, self._size)))[: max(0, total - self._size)]
        yield from order[self.start + self._rank : total : self._ranks]


class EpochLoader(DataLoader[Any]):
    """Load this rank's samples; each iteration is the next epoch, in an order of its own.

    After `load_state_dict` the first iteration is the rest of the epoch that was under way. Takes
    nothing from torch's global random numbers.

    Args:
        data: with a length.
        batch: samples in a micro-batch of one rank.
        ranks: how many ranks share the data.
        rank: this one.
        drop_last: leave out the last batch if it is smaller.
        collate_fn: makes a batch of samples.
    """

    def __init__(
        self,
        data: Dataset[Any],
        *,
        batch: int,
        ranks: int,
        rank: int,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
    ) -> None:
        self._order = GlobalOrder(len(cast("Sized", data)), ranks, rank, drop_last)
        self._step = batch * ranks
        self._samples = len(cast("Sized", data))
        self._position = (-1, self._samples)
        self._resumed: tuple[int, int] | None = None
        super().__init__(
            data,
            batch_size=batch,
            sampler=self._order,
            collate_fn=collate_fn,
            drop_last=drop_last,
            generator=torch.Generator(),
        )

    @property
    def epoch(self) -> int:
        """Return the epoch under way, or the one that has ended; -1 before the first."""
        return self._position[0]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Start the next epoch, or go on with a loaded one."""
        epoch, start = self._resumed or (self.epoch + 1, 0)
        self._resumed = None
        self._order.epoch, self._order.start = epoch, start
        self._position = (epoch, start)
        self.generator.manual_seed(epoch)
        for batch in super().__iter__():
            start = min(start + self._step, self._samples)
            self._position = (epoch, start)
            yield batch
        self._order.start = 0

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the samples of it that all ranks together have had."""
        epoch, samples = self._resumed or self._position
        return {"epoch": epoch, "samples": samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a position, on as many ranks as there are now."""
        self._position = (state["epoch"], self._samples)
        ended = state["samples"] >= self._samples
        self._resumed = None if ended else (state["epoch"], state["samples"])
