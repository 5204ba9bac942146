"""The compiled sum gives the bits of its twin in torch."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from extensions import assert_built, build, each_level
from launch import ROOT

from hpczero.comm import sums
from hpczero.comm.collectives import Staging

PAIRS = [
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32), (torch.float16, torch.float16),
    (torch.float16, torch.float32), (torch.float64, torch.float64),
    (torch.float32, torch.bfloat16), (torch.float32, torch.float16),
]  # fmt: skip
LARGE = 140_001  # elements, of any dtype past the caches


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    scale = torch.pow(10.0, torch.randint(-9, 4, (count,), generator=generator))
    flat = torch.randn(count, generator=generator) * scale
    flat[:: 101 + rank] = 0.0
    flat[1 :: 103 + rank] = -0.0
    flat[2 :: 107 + rank] = float("inf")
    flat[3 :: 109 + rank] = float("-inf")
    flat[4 :: 113 + rank] = float("nan")
    return flat.to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return bits, of all NaNs the same."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.where(tensor.isnan(), 1.5, tensor).view(kinds[tensor.element_size()])


@pytest.mark.parametrize(("source", "result"), PAIRS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_it_is_the_twin(ranks: int, source: torch.dtype, result: torch.dtype) -> None:
    assert_built("hpczero/comm", "_sum_cpu")
    staging = Staging(ranks)
    half = ranks // 2
    nodes = [(), (ranks,), (1,) * ranks, *([(half, ranks - half), (1, ranks - 1)] if half else [])]
    for count, node in itertools.product((0, 1, 7, 1024, 1025, 70_001), nodes):
        sources = [values(rank, count, source) for rank in range(ranks)]
        for add in (False, True):
            for divisor in (1, 4, 7):
                mine, twin = (values(99, count, result) for _ in range(2))
                assert sums._kernel(f"sum_{sums._name(sources[0])}_{sums._name(mine)}") is not None
                sums.sum_into(mine, sources, staging.sums, divisor, add, node)
                sums._twin(twin, sources, staging.sums, divisor, add, node or (ranks,))
                assert torch.equal(bits(mine), bits(twin))


def test_nodes_are_summed_first() -> None:
    terms = [1e8, -1e8, 3.0, 1e8, 1.0, -1e8]  # in float32 the order tells
    sources, out = [torch.full((5,), term) for term in terms], torch.empty(5)
    sums.sum_into(out, sources, Staging(6).sums, nodes=(2, 1, 3))
    assert out.eq(3.0).all()
    sums.sum_into(out, sources, Staging(6).sums)
    assert out.eq(0.0).all()


@pytest.mark.parametrize(("source", "result"), PAIRS, ids=str)
@pytest.mark.parametrize("start", [0, 1, 32])
def test_large_results_go_past_the_caches(
    start: int, source: torch.dtype, result: torch.dtype
) -> None:
    assert_built("hpczero/comm", "_sum_cpu")
    staging, sources = Staging(2), [values(rank, LARGE, source) for rank in range(2)]
    mine, twin = (values(99, LARGE + 64, result) for _ in range(2))
    place = slice(start, start + LARGE)
    sums.sum_into(mine[place], sources, staging.sums, 3)
    sums._twin(twin[place], sources, staging.sums, 3, False, (2,))
    assert torch.equal(bits(mine), bits(twin))


@pytest.mark.parametrize("count", [5000, LARGE])
@pytest.mark.parametrize("place", [0, 1])
def test_the_result_may_be_a_source(place: int, count: int) -> None:
    assert_built("hpczero/comm", "_sum_cpu")
    staging, sources = Staging(2), [values(rank, count, torch.bfloat16) for rank in range(2)]
    apart = torch.empty(count, dtype=torch.bfloat16)
    sums.sum_into(apart, sources, staging.sums, 2)
    sums.sum_into(sources[place], sources, staging.sums, 2)
    assert torch.equal(bits(sources[place]), bits(apart))


def test_a_pair_that_is_not_compiled_takes_the_twin() -> None:
    out = torch.zeros(100, dtype=torch.float32)
    sums.sum_into(out, [torch.ones(100, dtype=torch.float64)] * 2, Staging(2).sums)
    assert out.eq(2).all()


@each_level
def test_instruction_sets_agree(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_built("hpczero/comm", "_sum_cpu")
    build(ROOT / "hpczero/comm/sum_cpu.cpp", tmp_path / "_sum_cpu.so", level)
    expected = []
    for use in (True, False):
        if not use:
            monkeypatch.setattr(sums, "__file__", str(tmp_path / "sums.py"))
            sums._kernel.cache_clear()
            assert sums._kernel("sum_float32_float32") is not None
        for (source_type, result), add in itertools.product(PAIRS, (False, True)):
            out = values(99, LARGE, result)
            sources = [values(rank, LARGE, source_type) for rank in range(3)]
            sums.sum_into(out, sources, Staging(3).sums, 3, add=add)
            expected.append(bits(out))
    sums._kernel.cache_clear()
    half = len(expected) // 2
    assert all(map(torch.equal, expected[:half], expected[half:]))
