"""Collectives over node memory give the bits of those that send messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mpi4py import MPI

from hpczero.comm.collectives import Count, Traffic
from hpczero.comm.courier import Courier
from hpczero.comm.node import open_node_memory
from hpczero.comm.windows import columns
from hpczero.comm.wire import Cargo

pytestmark = pytest.mark.mpi

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(count, generator=generator, dtype=torch.float32).to(dtype)


def nodes_of(size: int, nodes: str) -> list[list[int]]:
    """Return the ranks of each pretended node."""
    if nodes == "one node":
        return [[*range(size)]]
    half = size // 2
    if nodes == "two nodes":
        return [[*range(half)], [*range(half, size)]]
    return [[*range(0, size, 2)], [*range(1, size, 2)]]


class Pair:
    """A courier with node memory beside one without."""

    def __init__(self, comm: MPI.Intracomm, nodes: list[list[int]]) -> None:
        number = next(n for n, ranks in enumerate(nodes) if comm.rank in ranks)
        memory, reason = open_node_memory(comm.Split(number, comm.rank))
        assert memory is not None, reason
        self.comm, self.memory, self.traffic, self.nodes = comm, memory, Traffic(), len(nodes)
        self.looks = Courier(comm, "looks", self.traffic, memory=memory, nodes=nodes)
        self.sends = Courier(comm, "sends", Traffic(), nodes=nodes)

    def crosses(self, elements: int, item_bytes: int) -> int:
        """Return what each rank sends of a full vector of so many elements."""
        return elements * item_bytes * (self.nodes - 1) // self.comm.size

    def inside(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = self.memory.empty(tensor.numel() * tensor.element_size()).view(tensor.dtype)
        return copy.copy_(tensor)

    def both(self, run: Any) -> list[torch.Tensor]:
        results = [run(self.looks, self.inside), run(self.sends, torch.clone)]
        assert torch.equal(*results)
        return results

    def close(self) -> None:
        for courier in (self.looks, self.sends):
            courier.goodbye().result()


@pytest.fixture(params=["one node", "two nodes", "two nodes in turns"])
def pair(request: pytest.FixtureRequest, world_comm: MPI.Intracomm) -> Any:
    if request.param != "one node" and world_comm.size != 4:
        pytest.skip("two nodes of two ranks need four")
    made = Pair(world_comm, nodes_of(world_comm.size, request.param))
    yield made
    made.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 64, 70_001])
def test_all_gather(pair: Pair, count: int, dtype: torch.dtype) -> None:
    rank, size = pair.comm.rank, pair.comm.size

    def apart(courier: Courier, take: Any) -> Any:
        full = take(torch.zeros(count * size, dtype=dtype))
        shard = take(values(rank, count, dtype))
        courier.all_gather(Cargo("p", "n", 8), full, shard).result()
        return full.clone()

    def in_place(courier: Courier, take: Any) -> Any:
        full = take(torch.zeros(count * size, dtype=dtype))
        own = full[rank * count : (rank + 1) * count].copy_(values(rank, count, dtype))
        courier.all_gather(Cargo("p", "n", 8), full, own).result()
        return full.clone()

    expected = torch.cat([values(other, count, dtype) for other in range(size)])
    for run in (apart, in_place):
        assert torch.equal(pair.both(run)[0], expected)
    sent = 2 * pair.crosses(count * size, dtype.itemsize)
    assert pair.traffic.take() == {("all_gather", "p"): Count(2, 16, sent)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_reductions(pair: Pair, add: bool, wide: bool, dtype: torch.dtype) -> None:
    rank, size, count = pair.comm.rank, pair.comm.size, 70_001
    result = torch.promote_types(dtype, torch.float32) if wide else dtype

    scattering = Cargo("p", "n", 8, None if add else 12_000)

    def scattered(courier: Courier, take: Any) -> Any:
        full, out = take(values(rank, count * size, dtype)), values(99, count, result)
        job = courier.reduce_scatter(scattering, full, out, divisor=size, add=add)
        job.result()
        return out

    def everywhere(courier: Courier, take: Any) -> Any:
        full, out = take(values(rank, count * size, dtype)), take(values(98, count * size, result))
        courier.all_reduce(Cargo("p", "n", 8), full, out, divisor=size, add=add).result()
        return out.clone()

    def in_place(courier: Courier, take: Any) -> Any:
        full = take(values(rank, count * size, dtype))
        courier.all_reduce(Cargo("p", "n", 8), full, divisor=size).result()
        return full.clone()

    for run in (scattered, everywhere, in_place):
        pair.both(run)
    sums = pair.crosses(count * size, max(4, dtype.itemsize))
    results = [pair.crosses(count * size, kind.itemsize) for kind in (result, dtype)]
    assert pair.traffic.take() == {
        ("reduce_scatter", "p"): Count(1, 8, sums),
        ("all_reduce", "p"): Count(2, 32, 2 * sums + sum(results)),
    }


def test_one_tensor_elsewhere_sends_messages(pair: Pair) -> None:
    rank, size, count = pair.comm.rank, pair.comm.size, 100

    def run(courier: Courier, take: Any) -> Any:
        mine = values(rank, count * size, torch.float32)
        full, out = mine if rank == size - 1 else take(mine), torch.zeros(count)
        courier.reduce_scatter(Cargo("p", "n", 8), full, out).result()
        return out

    pair.both(run)
    sent = count * size * 4 * (size - 1) // size
    assert pair.traffic.take() == {("reduce_scatter", "p"): Count(1, 8, sent)}


def test_memory_may_change_as_soon_as_the_future_is_done(pair: Pair) -> None:
    rank, size, count = pair.comm.rank, pair.comm.size, 30_000
    full, out = pair.inside(torch.zeros(count * size)), torch.zeros(count)
    for number in range(30):
        full.fill_(number * (rank + 1))
        pair.looks.reduce_scatter(Cargo("p", "n", 8), full, out).result()
        full.fill_(-1)
        assert out.eq(number * size * (size + 1) / 2).all()


def test_columns() -> None:
    for nodes in ([[0, 1]], [[0]], [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1], [2, 3], [4, 5]]):
        assert columns(nodes)
    for nodes in (
        [[0], [1]], [[0, 1], [2]], [[0, 3], [1, 2]], [[0, 1], [4, 5], [2, 3]],
    ):  # fmt: skip
        assert not columns(nodes)
