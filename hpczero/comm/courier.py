"""The one thread that carries collectives, first in first out, on its own communicator."""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from hpczero.comm import collectives
from hpczero.comm.collectives import Count, Nodes, Staging, Traffic
from hpczero.comm.node import NOWHERE, NodeMemory
from hpczero.comm.routes import FREE, Link
from hpczero.comm.timeline import Timeline
from hpczero.comm.waiting import YIELD_SECONDS, wait_politely
from hpczero.comm.windows import Windows
from hpczero.comm.wire import GOODBYE, SIGNATURE_BYTES, Cargo, Signature, signature
from hpczero.errors import Disagreement

CAUSES = {"parameters": "gather", "gradients": "reduce"}
"""What carrying for a purpose is in the timeline; others move little, or seldom."""


Places = list[tuple[int, int]]
"""By rank, where in node memory the tensors of a collective lie."""

_OUTSIDE = (NOWHERE, NOWHERE)

Within = contextlib.AbstractContextManager[object]
"""A block inside which tensors are there: entered before the other ranks are met, then left."""

_ANYWHERE: Within = contextlib.nullcontext()
_PLACES = struct.Struct("2q")


class _Job(NamedTuple):
    signature: Signature
    run: Callable[[Places], Any]
    future: Future[Any]
    places: tuple[int, int]
    within: Within
    cause: str


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
    alive and untouched until it is done. Where all ranks have theirs in the `memory` of their node,
    they are read where they lie, and only what no rank of a node has crosses between `nodes`; else
    they travel by messages between all. Costs one thread and one duplicated communicator, and two
    more with a memory.
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
        memory: NodeMemory | None = None,
        nodes: Nodes = (),
        link: Link = FREE,
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
        self.enters = False
        """Whether it waits for something of this rank's own, a disk, before it meets the others."""
        self.waits = False
        """Whether the collective under way waits for other ranks to come to it."""
        self._nodes = nodes or [range(comm.size)]
        self._memory = memory
        self._windows = (
            None if memory is None else Windows(self.comm, memory, patience, self._nodes, link)
        )
        self._records = np.empty((comm.size, SIGNATURE_BYTES + _PLACES.size), dtype=np.uint8)
        self._queue: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"hpczero-{name}", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Tell whether this rank has taken leave."""
        return self._closed

    @property
    def failure(self) -> BaseException | None:
        """Return the error that broke this Courier."""
        return self._fate.error

    @property
    def busy(self) -> tuple[str, float]:
        """Return which collective is under way, and for how many seconds; ("", 0) if none is.

        Those count that must end: not what was under way when this broke, as others won't come to
        it, nor the leave at the end of the program, where rank 0 may write results for long.
        """
        at = self._at
        if at is None or self.failure is not None or at[0].collective == GOODBYE:
            return "", 0.0
        return f"{self._number} of the {self.name}: {at[0]}", time.monotonic() - at[1]

    @property
    def idle(self) -> float:
        """Return the seconds since the last collective ended."""
        return time.monotonic() - self._ended

    # Collectives #

    def all_gather(
        self,
        cargo: Cargo,
        full: torch.Tensor,
        shard: torch.Tensor,
        within: Within = _ANYWHERE,
    ) -> Future[None]:
        """Fill `full` with the shards of all ranks, where that of this one is there `within`."""

        def look(windows: Windows, places: Places) -> int:
            sources = [place for place, _ in places]
            return windows.all_gather(
                full, shard, sources, cargo.piece, in_full=self._in_full(full)
            )

        return self._carry(
            "all_gather",
            cargo,
            full,
            lambda: collectives.all_gather(self.comm, full, shard, cargo.piece),
            look,
            places=self._places(*(full, full) if self._in_full(full) else (shard, shard)),
            within=within,
        )

    def _in_full(self, full: torch.Tensor) -> bool:
        """Tell whether ranks look at their neighbours' `full`, or share one, to find shards."""
        return len(self._nodes) > 1 or (self._memory is not None and self._memory.is_shared(full))

    def reduce_scatter(
        self,
        cargo: Cargo,
        full: torch.Tensor,
        out: torch.Tensor,
        *,
        divisor: int = 1,
        add: bool = False,
        within: Within = _ANYWHERE,
    ) -> Future[None]:
        """Put the sum of this rank's slice of `full`, divided, into `out` (or add it there).

        What `out` has is there `within`.
        """

        def look(windows: Windows, places: Places) -> int:
            sources = [place for place, _ in places]
            return windows.reduce_scatter(
                full, out, sources, self.staging, divisor=divisor, add=add, piece=cargo.piece
            )

        return self._carry(
            "reduce_scatter",
            cargo,
            full,
            lambda: collectives.reduce_scatter(
                self.comm,
                full,
                out,
                self.staging,
                divisor=divisor,
                add=add,
                piece=cargo.piece,
                nodes=self._nodes,
            ),
            look,
            places=self._places(full, full),
            within=within,
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
        target = full if out is None else out

        def look(windows: Windows, places: Places) -> int:
            return windows.all_reduce(
                full, target, places, self.staging, divisor=divisor, add=add, piece=cargo.piece
            )

        return self._carry(
            "all_reduce",
            cargo,
            full,
            lambda: collectives.all_reduce(
                self.comm,
                full,
                self.staging,
                out=target,
                divisor=divisor,
                add=add,
                piece=cargo.piece,
                nodes=self._nodes,
            ),
            look,
            places=self._places(full, target),
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
        return self._submit(
            Signature("exchange", name, 0, ""), lambda _: self.comm.allgather(value)
        )

    def gather_objects(self, name: str, value: Any) -> Future[list[Any] | None]:
        """Return the (pickled) objects of all ranks, in rank order, on rank 0, None elsewhere."""
        signature = Signature("gather objects", name, 0, "")
        return self._submit(signature, lambda _: self.comm.gather(value))

    def meet(self, name: str, within: Within = _ANYWHERE) -> Future[None]:
        """Find all ranks at the same place in the queue, or name what each wants instead."""
        return self._submit(Signature("meeting", name, 0, ""), lambda _: None, within=within)

    # Life #

    def goodbye(self) -> Future[None]:
        """Take leave: done when all ranks have, an error if some still want something."""
        if self.failure is not None or self._closed:
            future: Future[None] = Future()
            future.set_result(None)
            return future
        leave = self._submit(Signature(GOODBYE, self.name, 0, ""), lambda _: None)
        self._closed = True
        return leave

    def _carry(
        self,
        collective: str,
        cargo: Cargo,
        full: torch.Tensor,
        send: Callable[[], Any],
        look: Callable[[Windows, Places], int] | None = None,
        places: tuple[int, int] = _OUTSIDE,
        factor: int = 1,
        within: Within = _ANYWHERE,
    ) -> Future[Any]:
        """Queue a collective.

        Args:
            collective: its name.
            cargo: what it carries.
            full: the full vector, or the shard where only one rank gets that.
            send: does it by messages between all ranks.
            look: does it over node memory, and tells the bytes that this rank sent.
            places: of the tensors that others look at.
            factor: how often the full vector travels.
            within: a block around it, entered when its turn has come.
        """
        size = self.comm.size
        nbytes = full.numel() * full.element_size()
        count = Count(1, factor * cargo.payload, factor * nbytes * (size - 1) // size)

        def run(places: Places) -> Any:
            if look is None or self._windows is None or any(NOWHERE in place for place in places):
                result = send()
                self._traffic.add(collective, cargo.purpose, count)
                return result
            sent = look(self._windows, places)
            self._traffic.add(collective, cargo.purpose, count._replace(sent=sent))
            return None

        cause = CAUSES.get(cargo.purpose, "")
        return self._submit(signature(collective, cargo, full), run, places, within, cause)

    def _places(self, first: torch.Tensor, second: torch.Tensor) -> tuple[int, int]:
        """Return where others find two tensors."""
        if self._memory is None:
            return _OUTSIDE
        return self._memory.place(first), self._memory.place(second)

    def _submit(
        self,
        signature: Signature,
        run: Callable[[Places], Any],
        places: tuple[int, int] = _OUTSIDE,
        within: Within = _ANYWHERE,
        cause: str = "",
    ) -> Future[Any]:
        if self._closed:
            raise RuntimeError(
                f"{signature} after this rank has taken leave of the others: call it before "
                "world.close() and before the program's end"
            )
        job = _Job(signature, run, Future(), places, within, cause)
        self._fate.watch(job.future)
        self._queue.put(job)
        return job.future

    def _run(self) -> None:
        while self._carry_out(self._queue.get()):
            pass  # in a method of its own, so that no tensor of the last one is kept while waiting

    def _carry_out(self, job: _Job) -> bool:
        """Run a collective; tell whether more may come."""
        if self.failure is not None:
            return True  # its future has the error
        try:
            result = self._carry_within(job)
        except BaseException as error:
            self._fate.seal(error)
        else:
            with contextlib.suppress(InvalidStateError):
                job.future.set_result(result)
            return job.signature.collective != GOODBYE
        finally:
            self._at, self.waits, self._ended = None, False, time.monotonic()
        return True

    def _carry_within(self, job: _Job) -> Any:
        name, span = job.signature.name, self._timeline.span
        with contextlib.ExitStack() as stack:
            self.enters = True
            try:
                with span(self.name, name, "io"):
                    stack.enter_context(job.within)
            finally:
                self.enters = False
            self._at, self.waits = (job.signature, time.monotonic()), True
            with span(self.name, name, "wait"):
                places = self._agree(job.signature, job.places)
            with span(self.name, name, job.cause):
                return job.run(places)

    def _agree(self, signature: Signature, places: tuple[int, int] = _OUTSIDE) -> Places:
        """Compare signatures with all ranks before any data moves; return where theirs lies."""
        self._number += 1
        if self.comm.size == 1:
            return [places]
        mine = signature.pack(self._number)
        record = np.frombuffer(mine.tobytes() + _PLACES.pack(*places), dtype=np.uint8)
        wait_politely([self.comm.Iallgather(record, self._records)], self._patience)
        if bool((self._records[:, :SIGNATURE_BYTES] == mine).all()):
            found = self._records[:, SIGNATURE_BYTES:].tobytes()
            return [(first, second) for first, second in _PLACES.iter_unpack(found)]
        # Everyone has seen all records, so everyone comes here: safe to talk.
        calls: list[tuple[int, Signature]] = self.comm.allgather((self._number, signature))
        raise _disagreement(self.name, calls)


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
