"""Memory that the ranks of a node share."""

from __future__ import annotations

import gc
import os
import re
import resource
import time
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from hpczero.comm import node
from hpczero.comm.node import NOWHERE, NodeMemory, open_node_memory

pytestmark = pytest.mark.mpi


def opened(comm: MPI.Intracomm) -> NodeMemory:
    memory, reason = open_node_memory(comm)
    assert memory is not None, reason
    return memory


def held(memory: NodeMemory) -> int:
    """Return the bytes that are really there, of all ranks together."""
    return os.fstat(memory.file).st_blocks * 512


def mapped() -> int:
    """Return this rank's part of all node memory: a page of two ranks counts half."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = "memfd:hpczero" in line
        elif ours and line.startswith("Pss:"):
            total += 1024 * int(line.split()[1])
    return total


def test_what_is_shared_is_one(world_comm: MPI.Intracomm) -> None:
    rank, size = world_comm.rank, world_comm.size
    memory = opened(world_comm)
    first, second = memory.shared(100), memory.shared(8 * size).view(torch.float64)
    assert not first.any()
    second[rank] = rank + 0.5
    world_comm.Barrier()
    assert second.tolist() == [other + 0.5 for other in range(size)]
    assert not first.any()
    assert world_comm.allgather(memory.place(second)) == [memory.place(second)] * size
    world_comm.Barrier()


def test_others_look_at_what_one_has(world_comm: MPI.Intracomm) -> None:
    rank, size = world_comm.rank, world_comm.size
    memory = opened(world_comm)
    memory.empty(5)  # what comes next lies elsewhere on the page
    mine = memory.empty(40_000).view(torch.float32)
    mine.copy_(torch.arange(10_000) + 10_000 * rank)
    middle = mine[3000:3100]
    places = world_comm.allgather(memory.place(middle))
    for other in range(size):
        expected = torch.arange(3000, 3100, dtype=torch.float32) + 10_000 * other
        for _ in range(2):
            assert torch.equal(memory.look(places[other], 400).view(torch.float32), expected)
    assert memory.place(torch.zeros(3)) == NOWHERE
    nothing = memory.empty(0)
    for act in (memory.fill, memory.drop, memory.part, memory.join):
        act(nothing)
    assert nothing.numel() == memory.shared(0).numel() == 0
    world_comm.Barrier()


def test_changes_of_one_rank_stay_its_own_until_it_joins(world_comm: MPI.Intracomm) -> None:
    rank = world_comm.rank
    memory = opened(world_comm)
    tensor = memory.shared(20_000)
    if rank == 0:
        tensor.fill_(7)
    world_comm.Barrier()
    view = tensor[5000:5010]
    memory.part(tensor)
    view.fill_(100 + rank)
    world_comm.Barrier()
    assert view.tolist() == [100 + rank] * 10
    assert tensor[:5000].eq(7).all()
    world_comm.Barrier()
    memory.join(tensor)
    assert tensor.eq(7).all()
    world_comm.Barrier()
    if rank == 0:
        view.fill_(9)
    world_comm.Barrier()
    assert view.eq(9).all()
    world_comm.Barrier()


def test_pages_come_when_written_and_go_when_freed(world_comm: MPI.Intracomm) -> None:
    size, nbytes = world_comm.size, 1 << 20
    memory = opened(world_comm)
    mine, shared = memory.empty(nbytes), memory.shared(size * nbytes)
    world_comm.Barrier()
    assert held(memory) == 0
    world_comm.Barrier()
    gc.collect()  # what other tests have left
    before = mapped()
    mine.fill_(1)
    shared.fill_(world_comm.rank)
    world_comm.Barrier()
    assert held(memory) == 2 * size * nbytes
    grown = mapped() - before
    assert grown == pytest.approx(2 * nbytes, rel=0.05)  # of the shared ones, 1/N
    world_comm.Barrier()
    views = [mine[5:6], shared[5:6]]
    del mine, shared
    gc.collect()
    assert held(memory) == 2 * size * nbytes
    world_comm.Barrier()
    del views
    gc.collect()
    world_comm.Barrier()
    assert held(memory) == size * nbytes  # of the shared ones somebody must tell the others
    world_comm.Barrier()
    memory.reclaim(world_comm.allgather(memory.freed.copy()))
    world_comm.Barrier()
    assert held(memory) == 0
    assert not memory.freed
    assert mapped() <= before
    world_comm.Barrier()


def test_what_one_rank_still_has_is_not_reclaimed(world_comm: MPI.Intracomm) -> None:
    memory = opened(world_comm)
    shared: list[torch.Tensor] = [memory.shared(4096)]
    if world_comm.rank == 0:
        shared[0].fill_(3)
    world_comm.Barrier()
    if world_comm.rank != world_comm.size - 1:
        shared.clear()
    memory.reclaim(world_comm.allgather(memory.freed.copy()))
    world_comm.Barrier()
    assert all(tensor.eq(3).all() for tensor in shared)
    world_comm.Barrier()


def test_a_forked_child_frees_nothing_of_its_parent(world_comm: MPI.Intracomm) -> None:
    memory = opened(world_comm)
    mine = [memory.empty(4096)]
    mine[0].fill_(5)
    child = os.fork()
    if child == 0:
        mine.clear()
        gc.collect()
        os._exit(0)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.01)
    assert mine[0].eq(5).all()


def test_pages_that_are_dropped_come_back_as_zeros(world_comm: MPI.Intracomm) -> None:
    memory = opened(world_comm)
    mine, other = memory.empty(1 << 20), memory.empty(1 << 20)
    mine.fill_(1)
    other.fill_(2)
    place = memory.place(mine)
    assert memory.look(place, 10).eq(1).all()
    memory.drop(mine)
    world_comm.Barrier()
    assert held(memory) == world_comm.size << 20
    world_comm.Barrier()
    memory.fill(mine)
    world_comm.Barrier()
    assert held(memory) in (world_comm.size << 20, world_comm.size << 21)  # as Linux can
    assert mine.eq(0).all()
    assert other.eq(2).all()
    mine.fill_(3)
    assert memory.look(place, 10).eq(3).all()
    world_comm.Barrier()


@pytest.mark.parametrize("culprit", [0, -1])
def test_where_there_is_no_room_all_have_none(
    world_comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, culprit: int
) -> None:
    culprit %= world_comm.size
    if culprit == 0:
        if world_comm.rank == 0:
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
            memory, reason = open_node_memory(world_comm)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        else:
            memory, reason = open_node_memory(world_comm)
        expected = "no file in memory.*File too large"
    else:
        if world_comm.rank == culprit:  # as in a container with a network of its own
            monkeypatch.setattr("socket.socket.connect", refuse)
        memory, reason = open_node_memory(world_comm)
        expected = f"rank {culprit} of the node: the first rank can't be reached: .*refused here"
    assert memory is None
    assert re.search(expected, reason)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("suspicious", [0, 1])
def test_the_file_is_passed_to_the_same_user_only(
    world_comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, suspicious: int
) -> None:
    monkeypatch.setattr(node, "_SOCKET_SECONDS", 0.5)
    if world_comm.rank == suspicious:
        monkeypatch.setattr(node, "_user", lambda channel: os.getuid() + 1)
    memory, reason = open_node_memory(world_comm)
    assert memory is None
    assert "the file of the first rank was not passed" in reason
    assert ("another user" in reason) == (suspicious == 1)


def refuse(channel: object, address: object) -> None:
    raise ConnectionRefusedError("refused here")
