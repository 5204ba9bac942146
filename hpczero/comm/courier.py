"""The one thread that carries collectives, first in first out, on its own communicator."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from hpczero.comm import collectives
from hpczero.comm.collectives import Count, Staging, Traffic
from hpczero.comm.timeline import Timeline
from hpczero.comm.wire import GOODBYE, SIGNATURE_BYTES, Cargo, Signature, signature
from hpczero.errors import Disagreement

YIELD_SECONDS = 1e-3
CROWDED_YIELD_SECONDS = 5e-3
"""Where ranks outnumber cores, those in step arrive later; yielding gives them the core."""
SLEEP_SECONDS = 1e-4


CAUSES = {
    "all_gather": "gather",
    "broadcast": "gather",
    "gather": "gather",
    "reduce_scatter": "reduce",
    "all_reduce": "reduce",
}
"""What a collective is in the timeline; others carry names only."""


class _Job(NamedTuple):
    signature: Signature
    run: Callable[[], Any]
    future: Future[Any]


class Fate:
    """Share the first error among the Couriers of a World: it breaks all of them.

    Whoever waits for one of them learns at once of an error of another. Else a rank would wait, in
    the queue that works, for ranks that have long given up in the other.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._waiting: set[Future[Any]] = set()

    def watch(self, future: Future[Any]) -> None:
        """Let a future fail with the others; raise the error that there is already."""
        with self._lock:
            if self.error is not None:
                raise self.error
            self._waiting.add(future)
        future.add_done_callback(self._forget)

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._waiting.discard(future)

    def seal(self, error: BaseException) -> None:
        """Fail all that is waited for. Collectives under way go on: other ranks may be in them."""
        with self._lock:
            self.error = self.error or error
            waiting = list(self._waiting)
        for future in waiting:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)


class Courier:
    """Carry collectives in the order of the calls, which must be the same on all ranks.

    Each method returns a Future at once and is called by all ranks; the tensors given must stay
    alive and untouched until it is done. Costs one thread and one duplicated communicator.
    A failed collective breaks the Courier and those that share its Fate: all that is waited for and
    every later call raise the same error.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        name: str,
        traffic: Traffic,
        fate: Fate | None = None,
        patience: float = YIELD_SECONDS,
        timeline: Timeline | None = None,
    ) -> None:
        self.comm = comm.Dup()
        self.name = name
        self._fate = fate or Fate()
        self.staging = Staging(comm.size)
        self._traffic = traffic
        self._number = 0
        self._patience = patience
        self._timeline = timeline or Timeline()
        self._closed = False
        self._at: tuple[Signature, float] | None = None
        self._ended = time.monotonic()
        self.waits = False
        """Whether the collective under way waits for other ranks to come to it."""
        self._records = np.empty((comm.size, SIGNATURE_BYTES), dtype=np.uint8)
        self._queue: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"hpczero-{name}", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> BaseException | None:
        """Return the error that broke this Courier."""
        return self._fate.error

    @property
    def busy(self) -> tuple[str, float]:
        """Return which collective is under way, and for how many seconds; ("", 0) if none is."""
        at = self._at
        if at is None:
            return "", 0.0
        return f"{self._number} of the {self.name}: {at[0]}", time.monotonic() - at[1]

    @property
    def idle(self) -> float:
        """Return the seconds since the last collective ended."""
        return time.monotonic() - self._ended

    # Collectives #

    def all_gather(self, cargo: Cargo, full: torch.Tensor, shard: torch.Tensor) -> Future[None]:
        """Fill `full` with the shards of all ranks."""
        return self._carry(
            "all_gather",
            cargo,
            full,
            lambda: collectives.all_gather(self.comm, full, shard, cargo.piece),
        )

    def reduce_scatter(
        self,
        cargo: Cargo,
        full: torch.Tensor,
        out: torch.Tensor,
        *,
        divisor: int = 1,
        add: bool = False,
    ) -> Future[None]:
        """Put the sum of this rank's slice of `full`, divided, into `out` (or add it there)."""
        return self._carry(
            "reduce_scatter",
            cargo,
            full,
            lambda: collectives.reduce_scatter(
                self.comm, full, out, self.staging, divisor=divisor, add=add, piece=cargo.piece
            ),
        )

    def all_reduce(
        self,
        cargo: Cargo,
        full: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        divisor: int = 1,
        add: bool = False,
    ) -> Future[None]:
        """Put the sum of `full`, divided, into `out` on all ranks (or add it there)."""
        return self._carry(
            "all_reduce",
            cargo,
            full,
            lambda: collectives.all_reduce(
                self.comm,
                full,
                self.staging,
                out=out,
                divisor=divisor,
                add=add,
                piece=cargo.piece,
            ),
            factor=2,
        )

    def broadcast(self, cargo: Cargo, tensor: torch.Tensor, root: int = 0) -> Future[None]:
        """Copy a flat tensor from `root` to all ranks."""
        return self._carry(
            "broadcast", cargo, tensor, lambda: collectives.broadcast(self.comm, tensor, root)
        )

    def gather(
        self, cargo: Cargo, shard: torch.Tensor, full: torch.Tensor | None, root: int = 0
    ) -> Future[None]:
        """Fill `full` on `root` with the shards of all ranks."""
        return self._carry(
            "gather", cargo, shard, lambda: collectives.gather(self.comm, shard, full, root)
        )

    def exchange(self, cargo: Cargo, record: bytes) -> Future[list[bytes]]:
        """Return the records of all ranks, in rank order; all have the same length."""
        mine = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        everyone = torch.empty(self.comm.size * len(record), dtype=torch.uint8)

        def run() -> list[bytes]:
            collectives.all_gather(self.comm, everyone, mine)
            return [bytes(row.tolist()) for row in everyone.view(self.comm.size, -1)]

        return self._carry("all_gather", cargo, everyone, run)

    def exchange_objects(self, name: str, value: Any) -> Future[list[Any]]:
        """Return the (pickled, small) objects of all ranks, in rank order."""
        return self._submit(Signature("exchange", name, 0, ""), lambda: self.comm.allgather(value))

    def gather_objects(self, name: str, value: Any) -> Future[list[Any] | None]:
        """Return the (pickled) objects of all ranks, in rank order, on rank 0, None elsewhere."""
        signature = Signature("gather objects", name, 0, "")
        return self._submit(signature, lambda: self.comm.gather(value))

    def meet(self, name: str) -> Future[None]:
        """Find all ranks at the same place in the queue, or name what each wants instead."""
        return self._submit(Signature("meeting", name, 0, ""), lambda: None)

    # Life #

    def goodbye(self) -> Future[None]:
        """Take leave: done when all ranks have, an error if some still want something."""
        if self.failure is not None or self._closed:
            future: Future[None] = Future()
            future.set_result(None)
            return future
        self._closed = True
        return self._submit(Signature(GOODBYE, self.name, 0, ""), lambda: None)

    def _carry(
        self,
        collective: str,
        cargo: Cargo,
        full: torch.Tensor,
        run: Callable[[], Any],
        factor: int = 1,
    ) -> Future[Any]:
        size = self.comm.size
        nbytes = full.numel() * full.element_size()
        count = Count(1, factor * cargo.payload, factor * nbytes * (size - 1) // size)

        def counted() -> Any:
            result = run()
            self._traffic.add(collective, cargo.purpose, count)
            return result

        return self._submit(signature(collective, cargo, full), counted)

    def _submit(self, signature: Signature, run: Callable[[], Any]) -> Future[Any]:
        job = _Job(signature, run, Future())
        self._fate.watch(job.future)
        self._queue.put(job)
        return job.future

    def _run(self) -> None:
        while True:
            job = self._queue.get()
            if self.failure is not None:
                continue  # its future has the error
            self._at, self.waits = (job.signature, time.monotonic()), True
            try:
                name = job.signature.name
                with self._timeline.span(self.name, name, "wait"):
                    self._agree(job.signature)
                with self._timeline.span(self.name, name, CAUSES.get(job.signature.collective, "")):
                    result = job.run()
            except BaseException as error:
                self._fate.seal(error)
            else:
                with contextlib.suppress(InvalidStateError):
                    job.future.set_result(result)
                if job.signature.collective == GOODBYE:
                    return
            finally:
                self._at, self.waits, self._ended = None, False, time.monotonic()

    def _agree(self, signature: Signature) -> None:
        """Compare signatures with all ranks before any data moves."""
        self._number += 1
        if self.comm.size == 1:
            return
        record = signature.pack(self._number)
        request = self.comm.Iallgather(record, self._records)
        wait_politely(request, self._patience)
        if bool((self._records == record).all()):
            return
        # Everyone has seen all records, so everyone comes here: safe to talk.
        calls: list[tuple[int, Signature]] = self.comm.allgather((self._number, signature))
        raise _disagreement(self.name, calls)


def wait_politely(request: MPI.Request, patience: float = YIELD_SECONDS) -> None:
    """Wait without taking the core from a rank that still computes.

    A blocking call spins for as long as the last rank computes. Here: yield the core at every test
    for `patience` seconds, in which ranks in step arrive, then sleep between tests.
    """
    end = time.perf_counter() + patience
    while not request.Test():
        if time.perf_counter() < end:
            os.sched_yield()
        else:
            time.sleep(SLEEP_SECONDS)


def _disagreement(name: str, calls: list[tuple[int, Signature]]) -> Disagreement:
    groups: dict[str, list[int]] = {}
    for rank, (_, call) in enumerate(calls):
        groups.setdefault(str(call), []).append(rank)
    left = [rank for rank, (_, call) in enumerate(calls) if call.collective == GOODBYE]
    lines = [f"  {ranks_text(ranks)}: {call}" for call, ranks in groups.items()]
    number = calls[0][0]
    cure = (
        "do all ranks get the same number of batches and run the same number of steps?"
        if left
        else "do all ranks run the same modules, micro-steps and steps in the same order?"
    )
    return Disagreement(
        f"the ranks disagree at collective {number} of the {name}:\n"
        + "\n".join(lines)
        + f"\n{cure}",
        reporter=next(rank for rank in range(len(calls)) if rank not in left),
    )


def ranks_text(ranks: list[int]) -> str:
    """Return 'rank 3' or 'ranks 0, 2'."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
