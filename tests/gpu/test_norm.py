"""The compiled sum of squares gives the bits of its twin, on any number of threads."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from extensions import assert_built, build, each_level
from launch import ROOT

from hpczero.gpu import norm
from hpczero.gpu.norm import BLOCK, LANES

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SIZES = [0, 1, LANES - 1, LANES, 3 * LANES + 5, BLOCK, 2 * BLOCK + 4099]


def values(count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    scale = torch.pow(10.0, torch.randint(-9, 4, (count,), generator=generator))
    return (torch.randn(count, generator=generator) * scale).to(dtype)


def test_it_was_built() -> None:
    assert_built("hpczero/gpu", "_norm_cpu")
    assert all(norm._kernel(str(dtype).removeprefix("torch.")) for dtype in DTYPES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_it_is_the_twin(dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for size in SIZES:
            flat = values(size, dtype)
            found = norm.sum_of_squares(flat)
            assert found == norm._twin(flat)
            expected = math.fsum(x * x for x in flat.double().tolist())
            assert found == pytest.approx(expected, rel=1e-12)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_tells(dtype: torch.dtype, bad: float) -> None:
    flat = values(BLOCK + 9, dtype)
    assert math.isfinite(norm.sum_of_squares(flat))
    flat[-2] = bad
    assert not math.isfinite(norm.sum_of_squares(flat))
    assert not math.isfinite(norm._twin(flat))


def test_the_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "_twin", lambda flat: pytest.fail("the twin"))
    if norm._kernel("float32") is None:
        pytest.skip("no compiler")
    assert norm.sum_of_squares(torch.full((3,), 2.0)) == 12.0


def test_the_twin_stays_on_the_device() -> None:
    with torch.device("meta"):
        assert norm._twin(torch.full((3,), 2.0, device="cpu")) == 12.0


def test_strides_take_the_twin() -> None:
    flat = values(10_000, torch.float32)
    assert norm.sum_of_squares(flat[::2]) == norm._twin(flat[::2].clone())


@each_level
def test_instruction_sets_agree(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(ROOT / "hpczero/gpu/norm_cpu.cpp", tmp_path / "_norm_cpu.so", level)
    monkeypatch.setattr(norm, "__file__", str(tmp_path / "norm.py"))
    norm._kernel.cache_clear()
    try:
        assert norm._kernel("float32") is not None
        for dtype in DTYPES:
            flat = values(2 * BLOCK + 4099, dtype)
            assert norm.sum_of_squares(flat) == norm._twin(flat)
    finally:
        norm._kernel.cache_clear()
