"""Constant-size memory for what lives shortly, and the account of all memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Literal, get_args

import torch

from hpczero.comm.node import NodeMemory
from hpczero.comm.timeline import Timeline
from hpczero.plan import TierName

Kind = Literal["params", "grads", "states", "buffers"]


class Ledger:
    """Account the bytes of model states and buffers on this rank, with high-water marks.

    By tier, and on each by kind.
    """

    def __init__(self) -> None:
        self._now = {(tier, kind): 0 for tier in get_args(TierName) for kind in get_args(Kind)}
        self._high = dict(self._now)
        self._last = dict(self._now)
        self._lock = threading.Lock()

    def add(self, kind: Kind, nbytes: int, tier: TierName = "device") -> None:
        """Account bytes taken (or, negative, given back)."""
        with self._lock:  # threads of tiers account too
            self._now[tier, kind] += nbytes
            self._high[tier, kind] = max(self._high[tier, kind], self._now[tier, kind])

    def mark(self) -> None:
        """End a step: keep its high-water marks, begin the next one's."""
        self._last, self._high = self._high, dict(self._now)

    def last(self) -> dict[str, dict[str, int]]:
        """Return the high-water marks of the last step (of now, before the first), by tier."""
        found: dict[str, dict[str, int]] = {}
        for (tier, kind), now in self._now.items():
            found.setdefault(tier, {})[kind] = max(self._last[tier, kind], now)
        return found


SLOTS = 2
"""Reductions in flight before the next slot waits for the oldest."""

MOST_FREE = 16
"""Buffers that are kept, several times as many as are in use where no rank is slow."""

PATIENCE_SECONDS = 1.0


class Arena:
    """Lend flat memory for local gradients, and take it back when their reduction is done.

    Buffers are kept and lent again, so that a steady state allocates nothing. In `memory` the other
    ranks of the node read them where they lie.
    """

    def __init__(
        self,
        ledger: Ledger,
        memory: NodeMemory | None = None,
        timeline: Timeline | None = None,
        stalls: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stalls = stalls
        self._ledger, self._memory = ledger, memory
        self._timeline = timeline or Timeline()
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}
        self._busy: list[tuple[Future[Any], torch.Tensor]] = []

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor with arbitrary content.

        Waits for the oldest reduction in flight when there are many. Not for ever: it may hang on a
        gather that another rank wants from this one, and then more memory is taken instead, unless
        it `stalls` on this rank's own disk.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        while len(self._busy) >= SLOTS:
            with self._timeline.wait("reductions", "slot"):
                done = wait([self._busy[0][0]], timeout=PATIENCE_SECONDS).done
            if not done:
                if self._stalls():
                    continue
                break
            self._reclaim()
        self._reclaim()
        nbytes = numel * dtype.itemsize
        fitting = [memory for memory in self._free if memory.numel() >= nbytes]
        if fitting:
            best = min(fitting, key=torch.Tensor.numel)
            self._free = [memory for memory in self._free if memory is not best]
        else:
            # What is free is too small for anyone who asks like this again: don't hoard it.
            self._drop_free()
            take = self._memory.empty if self._memory is not None else _bytes
            best = take(nbytes)
            self._ledger.add("buffers", nbytes)
        self._lent[best.data_ptr()] = best
        return best[:nbytes].view(dtype)

    def give_back(self, tensor: torch.Tensor, when: Future[Any]) -> None:
        """Take memory back as soon as the reduction that reads it is done."""
        if tensor.numel():
            self._busy.append((when, self._lent.pop(tensor.data_ptr())))

    def _reclaim(self) -> None:
        done = [memory for future, memory in self._busy if future.done()]
        self._busy = [(future, memory) for future, memory in self._busy if not future.done()]
        self._free.extend(done)
        self._drop_free(MOST_FREE)  # more came while another rank was slow

    def _drop_free(self, keep: int = 0) -> None:
        """Drop what is free but the `keep` largest, which serve all."""
        self._free.sort(key=torch.Tensor.numel, reverse=True)
        for memory in self._free[keep:]:
            self._ledger.add("buffers", -memory.numel())
        del self._free[keep:]


def _bytes(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)
