"""The communicators of this run."""

from __future__ import annotations

import logging
import math
import os
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from mpi4py import MPI

from hpczero.comm import watch
from hpczero.comm.collectives import Traffic
from hpczero.comm.courier import Courier, Fate
from hpczero.comm.monitor import Monitor, timeout
from hpczero.comm.node import open_node_memory
from hpczero.comm.routes import FREE, Link, measure
from hpczero.comm.timeline import Span, Timeline, offset, write
from hpczero.comm.waiting import CROWDED_YIELD_SECONDS, YIELD_SECONDS
from hpczero.comm.windows import columns
from hpczero.comm.wire import Cargo
from hpczero.errors import Disagreement

# What launchers set, each its own: they are looked at only when MPI says that it is alone.
_SIZE_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "PMIX_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "PALS_SIZE",
    "MPI_LOCALNRANKS",
)

log = logging.getLogger("hpczero")

Comm = MPI.Intracomm
"""What MPI calls a group of ranks that can talk; other folders need no more of MPI."""

_KEYVAL = MPI.Comm.Create_keyval()


class World:
    """Hold the ranks of this run and the Couriers between them.

    Created by all ranks of `comm` together (default: COMM_WORLD). Costs three duplicated
    communicators and three threads; `World.of` makes only one per communicator.

    Raises:
        RuntimeError: MPI runs without MPI_THREAD_MULTIPLE, or this is a world of one rank under a
            launcher that started more.
    """

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        watch.install()  # SIGTERM can be taken over only now that MPI runs
        if comm is None or comm == MPI.COMM_WORLD:
            comm = MPI.COMM_WORLD
            check_launcher(comm.size)
        _check_threads()
        _await_all(comm)
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        node = split_by_node(comm)
        self.local_rank: int = node.rank
        self.local_size: int = node.size
        memory, reason = open_node_memory(node)
        self.hosts: list[str] = comm.allgather(socket.gethostname())
        first = comm.rank if node.rank == 0 else 0
        firsts: list[int] = comm.allgather(node.bcast(first))
        node.Free()
        self.node_ranks = [
            [rank for rank, other in enumerate(firsts) if other == first]
            for first in sorted({*firsts})
        ]
        """The ranks of each node, ascending."""
        self.nodes = len(self.node_ranks)
        reasons: list[str] = comm.allgather(reason)
        useful = columns(self.node_ranks)
        if not useful and self.nodes < self.size and not any(reasons):
            found = "; ".join(", ".join(map(str, ranks)) for ranks in self.node_ranks)
            reasons = [
                f"the ranks of its nodes are {found}: expected equally many on each, numbered by "
                "blocks or in turns"
            ]
        self.node_memory = None if any(reasons) or not useful else memory
        """Memory that all ranks of the node see; None if any node has none, or it doesn't help."""
        self.no_node_memory = next((text for text in reasons if text), "")
        """Why there is none where there should be."""
        if self.no_node_memory and self.rank == 0:
            log.warning(f"all ranks send messages: no node memory ({self.no_node_memory})")
        crowded = self.local_size > len(os.sched_getaffinity(0))
        self._patience = CROWDED_YIELD_SECONDS if crowded else YIELD_SECONDS
        columned = self.nodes > 1 and self.node_memory is not None
        self.link = self._measure() if columned else FREE
        """Between nodes, as rank 0 found it; FREE where there is one, or no node memory."""
        self.library: str = MPI.Get_library_version().splitlines()[0].strip(" \0")
        self.engines = 0
        """Made so far, by all ranks together."""
        self.traffic = Traffic()
        self.timeline = Timeline()
        self._fate = Fate()
        self.gathers = self._courier("gathers")
        self.reductions = self._courier("reductions")
        self._checkpoints: Courier | None = None
        self._monitor = Monitor(comm, self.couriers) if comm.size > 1 else None
        _OPEN.add(self)

    @classmethod
    def of(cls, comm: MPI.Intracomm | None = None) -> World:
        """Return the World of a communicator, made at the first call (by all ranks together)."""
        comm = MPI.COMM_WORLD if comm is None else comm
        world = cast("World | None", comm.Get_attr(_KEYVAL))
        if world is None or world.broken or world.gathers.closed:
            world = cls(comm)
            comm.Set_attr(_KEYVAL, world)
        return world

    def _courier(self, name: str) -> Courier:
        return Courier(
            self.comm,
            name,
            self.traffic,
            self._fate,
            self._patience,
            self.timeline,
            self.node_memory,
            self.node_ranks,
            self.link,
        )

    def _measure(self) -> Link:
        """Measure the link of all columns at once; rank 0's counts, so that all choose alike."""
        column = cast("MPI.Intracomm", self.comm.Split(self.local_rank, self.rank))
        link: Link = self.comm.bcast(measure(column, self._patience))
        column.Free()
        return link

    @property
    def couriers(self) -> list[Courier]:
        """Return all queues."""
        more = [] if self._checkpoints is None else [self._checkpoints]
        return [self.gathers, self.reductions, *more]

    @property
    def broken(self) -> bool:
        """Tell whether a collective has failed, after which nothing can be carried any more."""
        return self._fate.error is not None

    @property
    def checkpoints(self) -> Courier:
        """Return the queue of those who write checkpoints, made when all ranks first ask for it."""
        if self._checkpoints is None:
            # Not for the monitor: a slow disk is no hanging rank.
            self._checkpoints = self._courier("checkpoints")
        return self._checkpoints

    def mean(self, value: float, purpose: str = "metrics") -> float:
        """Return the mean of a number over ranks, summed in rank order; all ranks call."""
        cargo = Cargo(purpose, "mean", 0)
        with self.timeline.wait("metrics", purpose):
            records = self.gathers.exchange(cargo, struct.pack("d", value)).result()
        total = 0.0
        for record in records:
            total += float(struct.unpack("d", record)[0])
        return total / self.size

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Return the (small) objects of all ranks on rank 0, None elsewhere; all ranks call."""
        values = self.gathers.exchange_objects("objects", value).result()
        return values if self.rank == 0 else None

    def broadcast(self, tensor: torch.Tensor, purpose: str) -> None:
        """Copy a flat tensor from rank 0 to all ranks; all ranks call."""
        payload = tensor.numel() * tensor.element_size()
        with self.timeline.wait("buffers", purpose):
            self.gathers.broadcast(Cargo(purpose, purpose, payload), tensor).result()

    def reclaim_node_memory(self) -> None:
        """Give back what all ranks have freed of the node's shared memory; all ranks call."""
        if self.node_memory is not None:
            self.reductions.meet("freed node memory").result()  # nothing on its way uses any
            freed = self.node_memory.freed.copy()
            everyone = self.gathers.exchange_objects("freed node memory", freed).result()
            node = next(ranks for ranks in self.node_ranks if self.rank in ranks)
            self.node_memory.reclaim([everyone[rank] for rank in node])

    def write_timeline(self, path: Path) -> None:
        """Write what all ranks have recorded, on rank 0's clock, into a file of rank 0's.

        All ranks call. Costs rank 0 the spans of two ranks at a time, and a gather for each.

        Raises:
            OSError: on rank 0, where the file can't be written.
        """
        spans, lost = list(self.timeline.spans), self.timeline.lost  # without what follows here
        clock = []
        for _ in range(11):
            self.gathers.meet("clock").result()
            clock.append(time.perf_counter())
        clocks = self.gathers.exchange_objects("clock", clock).result()
        shift = offset(clock, clocks[0])
        start = min((span.start + shift for span in spans), default=math.inf)
        told = self.gathers.exchange_objects("spans", (start, lost)).result()
        most = max(each for _, each in told)
        if most and self.rank == 0:
            log.warning(f"{path}: ends early: up to {most} spans of a rank were too many to keep")

        def ranks() -> Iterator[tuple[str, float, Sequence[Span]]]:
            for rank, host in enumerate(self.hosts):
                mine = (shift, spans) if rank == self.rank else None
                everyone = self.gathers.gather_objects(f"timeline of rank {rank}", mine).result()
                if everyone is not None:
                    yield host, *everyone[rank]

        entries = ranks()
        try:
            if self.rank == 0:
                write(path, entries, min(first for first, _ in told))
        finally:
            deque(entries, maxlen=0)  # the other ranks take part even if nothing can be written

    def close(self) -> None:
        """Part from the other ranks; all ranks call, at the latest at exit.

        Where others still want a collective, they stop with an error that names this rank.
        """
        _part([self])


_OPEN: weakref.WeakSet[World] = weakref.WeakSet()
watch.at_exit(lambda: _part(list(_OPEN)))


def _part(worlds: list[World]) -> None:
    """Say goodbye in all queues of all worlds at once: the others may wait in any of them."""
    for world in [] if watch.released() else worlds:
        error = world._fate.error
        if error is None or isinstance(error, Disagreement) or world.size == 1:
            continue
        # No other rank knows, unless all have made a new world since, or given this one up.
        if world.comm != MPI.COMM_NULL and world.comm.Get_attr(_KEYVAL) is world:
            watch.fail_with(error, error.__traceback__, "failed")
    leaving = [
        courier.goodbye()
        for world in worlds
        if not world.broken  # the queues no longer match
        for courier in world.couriers
    ]
    _OPEN.difference_update(worlds)
    if any(isinstance(future.exception(), Disagreement) for future in leaving):
        time.sleep(10)  # the others are ending the job with the message
    for world in worlds:
        if world._monitor is not None:
            world._monitor.close()


def split_by_node(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return the communicator of the ranks that share memory; all ranks of `comm` call.

    HPCZERO_RANKS_PER_NODE=k makes nodes of k ranks out of each, to try what several nodes do.

    Raises:
        ValueError: it is set to anything but a positive number.
    """
    node = cast("MPI.Intracomm", comm.Split_type(MPI.COMM_TYPE_SHARED))
    text = os.environ.get("HPCZERO_RANKS_PER_NODE")
    if text is None:
        return node
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"HPCZERO_RANKS_PER_NODE: expected a positive number, found {text!r}")
    pretended = cast("MPI.Intracomm", node.Split(node.rank // int(text)))
    node.Free()
    return pretended


def _await_all(comm: MPI.Intracomm) -> None:
    """Wait for all ranks to come here: a rank that left before has no queue to say so in."""
    seconds, start = timeout(), time.monotonic()
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)
        if time.monotonic() - start > seconds:
            raise TimeoutError(
                f"rank {comm.rank} waited {seconds:g} s (HPCZERO_TIMEOUT) for all {comm.size} "
                "ranks to build their first Engine: have some ended, or do they build none?"
            )


def _check_threads() -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            f"expected MPI with MPI_THREAD_MULTIPLE, found thread level {MPI.Query_thread()}: "
            "hpczero carries collectives in threads of its own. Import mpi4py before other MPI "
            "users, leave mpi4py.rc.thread_level at 'multiple', on Cray set "
            "MPICH_MAX_THREAD_SAFETY=multiple"
        )


def check_launcher(size: int) -> None:
    """Refuse a world of one rank under a launcher that started more.

    Raises:
        RuntimeError: with the cure: the launcher and the loaded MPI speak different protocols.
    """
    if size > 1:
        return
    vendor = MPI.get_vendor()[0]
    started = {name: os.environ[name] for name in _SIZE_VARIABLES if name in os.environ}
    if not started and "SLURM_STEP_NUM_TASKS" in os.environ:
        started = {"SLURM_STEP_NUM_TASKS": os.environ["SLURM_STEP_NUM_TASKS"]}
    more = {name: text for name, text in started.items() if text.isdigit() and int(text) > 1}
    if not more:
        return
    name, count = next(iter(more.items()))
    flag = "pmix" if "Open MPI" in vendor else "pmi2"
    raise RuntimeError(
        f"the launcher started {count} ranks ({name}={count}), but MPI sees a world of 1: each "
        f"would train alone. Under Slurm use `srun --mpi={flag}`; with mpiexec use the one that "
        f"belongs to {vendor}, which mpi4py has loaded"
    )
