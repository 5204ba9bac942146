"""The Courier: order, counts, disagreement, goodbye."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from mpi4py import MPI

from hpczero.comm.collectives import Count, Traffic
from hpczero.comm.courier import Courier, Fate
from hpczero.comm.wire import Cargo, Signature, pieces
from hpczero.errors import Disagreement

pytestmark = pytest.mark.mpi


def test_pieces_cover_an_interval() -> None:
    assert list(pieces(10, 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(pieces(0, 4)) == []


def test_collectives_run_in_order_and_are_counted(world_comm: MPI.Intracomm) -> None:
    size, rank = world_comm.size, world_comm.rank
    traffic = Traffic()
    courier = Courier(world_comm, "test", traffic)
    full = torch.zeros(64 * size)
    shard = torch.full((64,), float(rank))
    courier.all_gather(Cargo("parameters", "a", 200), full, shard)
    out = torch.zeros(64)
    reduced = courier.reduce_scatter(Cargo("gradients", "a", 200), full, out, divisor=size)
    reduced.result()
    assert torch.equal(full, torch.arange(size).repeat_interleave(64).float())
    assert torch.equal(out, torch.full((64,), float(rank)))
    courier.all_reduce(Cargo("gradients", "b", 200), full).result()
    assert torch.equal(full, size * torch.arange(size).repeat_interleave(64).float())
    records = courier.exchange(Cargo("exchange", "x", 0), bytes([rank, 7])).result()
    assert records == [bytes([r, 7]) for r in range(size)]
    assert courier.exchange_objects("o", {"rank": rank}).result() == [
        {"rank": r} for r in range(size)
    ]
    sent = 256 * (size - 1)
    counts = traffic.take()
    assert counts["all_gather", "parameters"] == Count(1, 200, sent)
    assert counts["reduce_scatter", "gradients"] == Count(1, 200, sent)
    assert counts["all_reduce", "gradients"] == Count(1, 400, 2 * sent)
    assert traffic.take() == {}
    courier.goodbye().result()


def test_two_couriers_need_not_interleave_alike(world_comm: MPI.Intracomm) -> None:
    traffic = Traffic()
    first, second = (Courier(world_comm, name, traffic) for name in ("first", "second"))
    tensors = [torch.ones(64 * world_comm.size) for _ in range(2)]
    work = [(first, 0), (second, 1)]
    jobs = [
        courier.all_reduce(Cargo("p", f"tensor{which}", 0), tensors[which])
        for courier, which in (work if world_comm.rank % 2 else reversed(work))
    ]
    for job in jobs:
        job.result()
    assert all(bool((tensor == world_comm.size).all()) for tensor in tensors)
    for courier in (first, second):
        courier.goodbye().result()


@pytest.mark.parametrize("difference", ["name", "size", "dtype", "collective", "number"])
def test_ranks_that_disagree_all_raise(world_comm: MPI.Intracomm, difference: str) -> None:
    if world_comm.size == 1:
        pytest.skip("one rank agrees with itself")
    odd = world_comm.rank == world_comm.size - 1
    courier = Courier(world_comm, "test", Traffic())
    name = "odd" if odd and difference == "name" else "even"
    count = 128 if odd and difference == "size" else 64
    dtype = torch.float64 if odd and difference == "dtype" else torch.float32
    full = torch.ones(count * world_comm.size, dtype=dtype)
    shard = torch.ones(count, dtype=dtype)
    if difference == "number" and odd:
        courier._number += 1
    carry = courier.all_gather
    if odd and difference == "collective":
        carry = courier.reduce_scatter
    job = carry(Cargo("p", name, 0), full, shard)
    with pytest.raises(Disagreement) as raised:
        job.result()
    assert "the ranks disagree at collective" in str(raised.value)
    if difference != "number":
        assert f"rank {world_comm.size - 1}:" in str(raised.value)
    with pytest.raises(Disagreement):  # broken for good: the queues no longer match
        courier.all_gather(Cargo("p", name, 0), full, shard)
    assert courier.goodbye().result() is None


def test_a_rank_that_leaves_is_named(world_comm: MPI.Intracomm) -> None:
    if world_comm.size == 1:
        pytest.skip("nobody to leave")
    courier = Courier(world_comm, "test", Traffic())
    if world_comm.rank == 0:
        assert isinstance(courier.goodbye().exception(), Disagreement)
        return
    full = torch.ones(world_comm.size)
    with pytest.raises(Disagreement, match=r"rank 0: has left") as raised:
        courier.all_reduce(Cargo("p", "wanted", 0), full).result()
    assert raised.value.reporter == 1
    assert "wanted" in str(raised.value)


def test_goodbye_ends_the_thread(world_comm: MPI.Intracomm) -> None:
    before = threading.active_count()
    courier = Courier(world_comm, "test", Traffic())
    courier.goodbye().result()
    courier._thread.join(timeout=10)
    assert threading.active_count() == before


def test_whoever_waits_in_one_queue_learns_that_the_other_failed(world_comm: MPI.Intracomm) -> None:
    if world_comm.size == 1:
        pytest.skip("one rank agrees with itself")
    fate, traffic = Fate(), Traffic()
    works, fails = (Courier(world_comm, name, traffic, fate) for name in ("works", "fails"))
    meeting = works.meet("here") if world_comm.rank == 0 else None  # the others don't come
    while meeting is not None and not works.waits:  # it is among the gathers, not in the queue
        time.sleep(1e-3)
    job = fails.meet("here" if world_comm.rank == 0 else "there")
    with pytest.raises(Disagreement, match="of the fails") as raised:
        job.result()
    if meeting is not None:
        assert meeting.exception(timeout=1) is raised.value
    with pytest.raises(Disagreement, match="of the fails"):
        works.meet("here")
    if meeting is None:  # let the thread of rank 0 go
        works._agree(Signature("meeting", "here", 0, ""))
