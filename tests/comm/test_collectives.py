"""Collectives against single-process sums, in every dtype, on every number of ranks."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI

from hpczero.comm import collectives
from hpczero.comm.collectives import Staging

pytestmark = pytest.mark.mpi

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
COUNTS = [0, 1, 3, 64, 70_001, 600_000]  # below and above a block and a piece of the wire


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(count, generator=generator, dtype=torch.float32).to(dtype)


def reference_sum(size: int, count: int, dtype: torch.dtype, divisor: int) -> torch.Tensor:
    """Sum in rank order in float32 (float64 stays), divide, round once."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = values(0, count, dtype).to(wide)
    for rank in range(1, size):
        total += values(rank, count, dtype).to(wide)
    return (total / divisor).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_all_gather(world_comm: MPI.Intracomm, count: int, dtype: torch.dtype) -> None:
    full = torch.full((count * world_comm.size,), float("nan"), dtype=dtype)
    collectives.all_gather(world_comm, full, values(world_comm.rank, count, dtype))
    expected = torch.cat([values(rank, count, dtype) for rank in range(world_comm.size)])
    assert torch.equal(full, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_gather_in_place(world_comm: MPI.Intracomm, dtype: torch.dtype) -> None:
    full = torch.zeros(5 * world_comm.size, dtype=dtype)
    own = full[5 * world_comm.rank : 5 * world_comm.rank + 5]
    own.copy_(values(world_comm.rank, 5, dtype))
    collectives.all_gather(world_comm, full, own)
    expected = torch.cat([values(rank, 5, dtype) for rank in range(world_comm.size)])
    assert torch.equal(full, expected)


def test_all_gather_in_pieces(world_comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "PIECE_BYTES", 1000)
    full = torch.zeros(777 * world_comm.size)
    collectives.all_gather(world_comm, full, values(world_comm.rank, 777, torch.float32))
    expected = [values(rank, 777, torch.float32) for rank in range(world_comm.size)]
    assert torch.equal(full, torch.cat(expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_reduce_scatter(world_comm: MPI.Intracomm, count: int, dtype: torch.dtype) -> None:
    size, rank = world_comm.size, world_comm.rank
    out = torch.full((count,), float("nan"), dtype=dtype)
    full = values(rank, count * size, dtype)
    collectives.reduce_scatter(world_comm, full, out, Staging(size), divisor=size)
    expected = reference_sum(size, count * size, dtype, size)
    assert torch.equal(out, expected[rank * count : (rank + 1) * count])
    assert torch.equal(full, values(rank, count * size, dtype)), "the input must survive"


def test_reduce_scatter_adds_in_the_dtype_of_the_result(world_comm: MPI.Intracomm) -> None:
    size, rank = world_comm.size, world_comm.rank
    for wire, result in [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
    ]:
        out = torch.ones(100, dtype=result)
        full = values(rank, 100 * size, wire)
        collectives.reduce_scatter(world_comm, full, out, Staging(size), divisor=size, add=True)
        total = sum(values(r, 100 * size, wire).float() for r in range(size))
        assert isinstance(total, torch.Tensor)
        own = (total / size).to(result)[rank * 100 : (rank + 1) * 100]
        assert torch.equal(out, torch.ones(100, dtype=result) + own)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 64, 300_000])
def test_all_reduce(world_comm: MPI.Intracomm, count: int, dtype: torch.dtype) -> None:
    size = world_comm.size
    full = values(world_comm.rank, count * size, dtype)
    collectives.all_reduce(world_comm, full, Staging(size))
    assert torch.equal(full, reference_sum(size, count * size, dtype, 1))


def test_all_reduce_is_the_reduce_scatter_bit_for_bit(world_comm: MPI.Intracomm) -> None:
    size, rank = world_comm.size, world_comm.rank
    full, out = values(rank, 640 * size, torch.bfloat16), torch.empty(640, dtype=torch.bfloat16)
    collectives.reduce_scatter(world_comm, full, out, Staging(size), divisor=size)
    collectives.all_reduce(world_comm, full, Staging(size), divisor=size)
    assert torch.equal(full[rank * 640 : (rank + 1) * 640], out)


@pytest.mark.parametrize("piece", [1, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pieces_change_no_bit(world_comm: MPI.Intracomm, dtype: torch.dtype, piece: int) -> None:
    size, rank = world_comm.size, world_comm.rank
    mine, staging = values(rank, 70 * size, dtype), Staging(size)
    whole, cut = mine.clone(), mine.clone()
    collectives.all_reduce(world_comm, whole, staging, divisor=size)
    collectives.all_reduce(world_comm, cut, staging, divisor=size, piece=piece)
    assert torch.equal(cut, whole)
    collectives.all_gather(world_comm, whole, mine[:70])
    collectives.all_gather(world_comm, cut, mine[:70], piece)
    assert torch.equal(cut, whole)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.bool], ids=str)
def test_broadcast(
    world_comm: MPI.Intracomm, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "PIECE_BYTES", 128)
    root = world_comm.size - 1
    tensor = (values(world_comm.rank, 999, torch.float32) * 10).to(dtype)
    collectives.broadcast(world_comm, tensor, root)
    assert torch.equal(tensor, (values(root, 999, torch.float32) * 10).to(dtype))


def test_gather(world_comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "PIECE_BYTES", 128)
    size, rank = world_comm.size, world_comm.rank
    full = torch.zeros(99 * size) if rank == 0 else None
    collectives.gather(world_comm, values(rank, 99, torch.float32), full)
    if full is not None:
        assert torch.equal(full, torch.cat([values(r, 99, torch.float32) for r in range(size)]))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_totals_above_two_to_the_31_elements(world_comm: MPI.Intracomm) -> None:
    """2^31 + 2^20 elements of bf16: 4 GiB per rank, counts that no 32-bit integer holds."""
    size, rank = world_comm.size, world_comm.rank
    if size != 2:
        pytest.skip("sized for the memory of two ranks")
    count = 2**30 + 2**19
    full = torch.zeros(2 * count, dtype=torch.bfloat16)
    own = full[rank * count : (rank + 1) * count]
    own.fill_(rank + 1)
    own[-1] = 7 + rank
    collectives.all_gather(world_comm, full, own)
    for peer in range(2):
        part = full[peer * count : (peer + 1) * count]
        assert bool((part[:-1] == peer + 1).all())
        assert part[-1].item() == 7 + peer
    full.fill_(rank + 1)
    collectives.reduce_scatter(world_comm, full, own, Staging(2))
    assert bool((own == 3).all())
    other = full[(1 - rank) * count : (2 - rank) * count]
    assert bool((other == rank + 1).all())
