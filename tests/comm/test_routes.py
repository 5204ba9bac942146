"""Routes bring every block to its place, whichever the model chooses, and it chooses sanely."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from launch import mpiexec
from mpi4py import MPI

from hpczero.comm import collectives, routes
from hpczero.comm.collectives import Staging, Traffic
from hpczero.comm.courier import Courier
from hpczero.comm.node import open_node_memory
from hpczero.comm.routes import FREE, Blocks, Link
from hpczero.comm.wire import PIECE_BYTES, Cargo, buffer

pytestmark = pytest.mark.mpi

CLUSTER = Link(3e-6, 5e-7, 3e9)
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(count, generator=generator, dtype=torch.float32).to(dtype)


@pytest.fixture(params=[("ring", "direct"), ("direct", "bruck"), ("bruck", "bruck")], ids=str)
def link(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Link:
    """Take one route for gathers and one for exchanges, whatever they cost."""
    gather, exchange = request.param
    monkeypatch.setattr(routes, "gather_route", lambda *_: gather)
    monkeypatch.setattr(routes, "exchange_route", lambda *_: exchange)
    return FREE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "step"), [(1, 1), (1, 3), (7, 7), (5, 8), (70_001, 140_003)])
def test_gather(
    world_comm: MPI.Intracomm, link: Link, count: int, step: int, dtype: torch.dtype
) -> None:
    size, rank = world_comm.size, world_comm.rank
    full = torch.full(((size - 1) * step + count,), -1.0, dtype=dtype)
    expected = full.clone()
    for peer in range(size):
        expected[peer * step : peer * step + count] = values(peer, count, dtype)
    own = slice(rank * step, rank * step + count)
    full[own] = expected[own]
    item = dtype.itemsize
    routes.gather(world_comm, Blocks(buffer(full), count * item, step * item), link, 1e-3)
    assert torch.equal(full, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 7, 4096])
def test_exchange(world_comm: MPI.Intracomm, link: Link, count: int, dtype: torch.dtype) -> None:
    size, rank = world_comm.size, world_comm.rank
    memory = torch.full((2 * size, 4096), -1.0, dtype=dtype)

    def fill(node: int, row: torch.Tensor) -> None:
        row.copy_(values(100 * rank + node, count, dtype))

    found, sent = routes.exchange(world_comm, memory[:, :count], fill, link, 1e-3)
    for peer, row in enumerate(found):
        assert torch.equal(row, values(100 * peer + rank, count, dtype))
    assert memory[:, count:].eq(-1).all()
    blocks, rest = divmod(sent, count * dtype.itemsize)
    assert rest == 0
    assert blocks >= size - 1


def check_windows(comm: MPI.Intracomm, nodes: list[list[int]], link: Link) -> None:
    """Compare collectives over columns with those by messages, in pieces and whole."""
    size, rank = comm.size, comm.rank
    number = next(n for n, ranks in enumerate(nodes) if rank in ranks)
    near = comm.Split(number, rank)
    memory, reason = open_node_memory(near)
    near.Free()
    assert memory is not None, reason
    courier = Courier(comm, "columns", Traffic(), memory=memory, nodes=nodes, link=link)
    staging = Staging(size)
    for dtype in DTYPES:
        for count in (0, 1, 7, 3001):
            for piece in (None, 999):
                cargo = Cargo("p", "n", 8, piece)
                mine = values(rank, count * size, dtype)
                full = memory.empty(mine.nbytes).view(dtype).copy_(mine)
                expected = mine.clone()
                collectives.all_reduce(comm, expected, staging, divisor=size, nodes=nodes)
                courier.all_reduce(cargo, full, divisor=size).result()
                assert torch.equal(full, expected)
                full.copy_(mine)
                own = full[rank * count : (rank + 1) * count]
                courier.all_gather(cargo, full, own).result()
                shards = [values(peer, count * size, dtype) for peer in range(size)]
                assert torch.equal(
                    full,
                    torch.cat([s[p * count : (p + 1) * count] for p, s in enumerate(shards)]),
                )
    courier.goodbye().result()


@pytest.mark.parametrize("turns", [False, True])
def test_columns_give_the_bits_of_messages(
    world_comm: MPI.Intracomm, link: Link, turns: bool
) -> None:
    size = world_comm.size
    if size < 4 or size % 2:
        pytest.skip("nodes of two ranks")
    half = size // 2
    pairs = [[n, n + half] if turns else [2 * n, 2 * n + 1] for n in range(half)]
    check_windows(world_comm, pairs, link)


def test_a_link_is_measured(world_comm: MPI.Intracomm) -> None:
    if world_comm.size == 1:
        pytest.skip("nobody to play with")
    link = routes.measure(world_comm, 1e-3)
    assert world_comm.allgather(link) == [link] * world_comm.size
    assert 0 < link.latency < 1
    assert 0 <= link.gap < 1
    assert 1e5 < link.bandwidth < 1e13


# Choices #

SIZES = [1 << power for power in range(29)]
NODES = [*range(2, 40), 63, 64, 65, 127, 500, 1000, 1024, 2000, 2048]


@pytest.mark.parametrize("link", [CLUSTER, Link(5e-5, 5e-6, 1e8), Link(2e-2, 1e-6, 1e9)])
def test_choices_follow_the_costs(link: Link) -> None:
    for nodes in NODES:
        for costs, route, last in (
            (routes.gather_seconds, routes.gather_route, "ring"),
            (routes.exchange_seconds, routes.exchange_route, "direct"),
        ):
            chosen = [route(nodes, nbytes, link) for nbytes in SIZES]
            assert sum(a != b for a, b in pairwise(chosen)) <= 1  # latencies count less and less
            assert chosen[-1] == last or link.latency > 1e-3
            for nbytes, name in zip(SIZES, chosen, strict=True):
                seconds = costs(nodes, nbytes, link)
                assert min(seconds.values()) > 0
                if nodes // 2 * nbytes <= PIECE_BYTES:
                    assert seconds[name] <= 1.1 * min(seconds.values())
                else:
                    assert name != "bruck"


def test_choices_on_a_cluster() -> None:
    assert {routes.gather_route(2, nbytes, CLUSTER) for nbytes in SIZES} == {"ring"}
    assert {routes.exchange_route(2, nbytes, CLUSTER) for nbytes in SIZES} == {"direct"}
    for nbytes in (1, 1024):
        assert routes.gather_route(8, nbytes, CLUSTER) == "direct"
        assert routes.gather_route(100, nbytes, CLUSTER) == "bruck"
        assert routes.gather_route(2048, nbytes, CLUSTER) == "bruck"
    for nodes in (8, 100, 2048):
        for nbytes in (1 << 20, 1 << 28):
            assert routes.gather_route(nodes, nbytes, CLUSTER) == "ring"
            assert routes.exchange_route(nodes, nbytes, CLUSTER) == "direct"
    assert routes.exchange_route(2048, 64, CLUSTER) == "bruck"
    small = routes.gather_seconds(2048, 64, CLUSTER)
    assert small["ring"] > 50 * small["bruck"]


def test_costs_of_few_nodes() -> None:
    link = Link(10.0, 1.0, 0.5)
    assert routes.gather_seconds(2, 1, link) == {"ring": 12, "direct": 12, "bruck": 12}
    assert routes.exchange_seconds(2, 1, link) == {"direct": 12, "bruck": 12}
    assert routes.gather_seconds(5, 1, link) == {"ring": 48, "direct": 21, "bruck": 38}
    # Rows 1 and 3, then 2 and 3, then 4.
    assert routes.exchange_seconds(5, 1, link) == {"direct": 21, "bruck": 40}


# Many ranks #


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [6, 7, 8])
def test_many_ranks(ranks: int) -> None:
    if MPI.COMM_WORLD.size > 1:
        pytest.skip("starts ranks of its own")
    job = mpiexec(ranks, "-m", "pytest", "-q", "-m", "not slow", __file__, timeout=100)
    assert job.returncode == 0, job.stdout
