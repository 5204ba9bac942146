"""Adam's and LAMB's twins against float64, and bit for bit against themselves in any cut."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.gpu.reference import (
    AdamStep,
    LambStep,
    adam_,
    lamb_,
    lamb_moments_,
    trust_ratio,
)

LR, BETAS, EPS = 1e-2, (0.9, 0.95), 1e-8


def constants(
    step: int, decoupled: bool = True, scale: float = 1.0, decay: float = 0.1
) -> AdamStep:
    return AdamStep(LR, *BETAS, EPS, decay, decoupled, step, scale)


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_against_torch_in_float64(decoupled: bool, decay: float) -> None:
    torch.manual_seed(0)
    weights = torch.randn(1000)
    oracle = weights.double().requires_grad_()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([oracle], lr=LR, betas=BETAS, eps=EPS, weight_decay=decay)
    moments = torch.zeros(1000), torch.zeros(1000)
    for step in range(1, 11):
        grad = torch.randn(1000)
        oracle.grad = grad.double() * 0.5
        optimizer.step()
        adam_(weights, weights, grad, *moments, constants(step, decoupled, 0.5, decay))
    assert (weights - oracle.detach()).abs().max() < 4e-6  # ten roundings of values up to 4


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_parameter_is_the_rounded_master(grad_dtype: torch.dtype) -> None:
    master = torch.randn(100)
    weights, moments = master.bfloat16(), (torch.zeros(100), torch.zeros(100))
    adam_(weights, master, torch.randn(100).to(grad_dtype), *moments, constants(1))
    assert torch.equal(weights, master.bfloat16())


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 140_000), max_size=4))
def test_bits_do_not_depend_on_the_cut(cuts: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    master, grad, m, v = (torch.randn(140_000, generator=generator) for _ in range(4))
    v.abs_()
    whole = [t.clone() for t in (master, m, v)]
    adam_(whole[0], whole[0], grad, whole[1], whole[2], constants(3))
    edges = sorted({0, *cuts, 140_000})
    for start, stop in itertools.pairwise(edges):
        part = master[start:stop]
        adam_(part, part, grad[start:stop], m[start:stop], v[start:stop], constants(3))
    for mine, other in zip((master, m, v), whole, strict=True):
        assert torch.equal(mine, other)


def test_bits_do_not_depend_on_threads() -> None:
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(200_000, generator=generator) for _ in range(4)]
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            master, grad, m, v = (t.clone() for t in start)
            adam_(master, master, grad, m, v.abs_(), constants(2))
            results.append(master)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_empty() -> None:
    nothing = torch.zeros(0)
    adam_(nothing, nothing, nothing, nothing, nothing, constants(1))


# LAMB #


def lamb_constants(
    step: int, scale: float = 1.0, decay: float = 0.1, correct: bool = True, inside: bool = False
) -> LambStep:
    return LambStep(LR, *BETAS, EPS, decay, correct, inside, step, scale)


@pytest.mark.parametrize("inside", [False, True], ids=["eps outside", "eps inside"])
@pytest.mark.parametrize("correct", [True, False], ids=["corrected", "plain"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_against_its_formula_in_float64(decay: float, correct: bool, inside: bool) -> None:
    torch.manual_seed(0)
    weights = torch.randn(1000)
    moments = torch.zeros(1000), torch.zeros(1000)
    w, m, v = weights.double(), torch.zeros(1000).double(), torch.zeros(1000).double()
    for step in range(1, 11):
        grad = torch.randn(1000)
        g = grad.double() * 0.5
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g**2
        u = m / ((v + EPS).sqrt() if inside else v.sqrt() + EPS) + decay * w
        size = LR * (1 - BETAS[1] ** step) ** 0.5 / (1 - BETAS[0] ** step) if correct else LR
        ratio = (w.norm() / u.norm()).clamp(0.01, 10.0)
        w = w - size * ratio * u
        constants = lamb_constants(step, 0.5, decay, correct, inside)
        squares = lamb_moments_(weights, grad, *moments, constants)
        lamb_(weights, weights, *moments, constants, trust_ratio(*squares, 0.01, 10.0))
        assert trust_ratio(*squares, 0.01, 10.0) == pytest.approx(ratio.item(), rel=1e-5)
    assert (weights - w).abs().max() < 4e-6  # ten roundings of values up to 4


def test_lambs_parameter_is_the_rounded_master() -> None:
    master = torch.randn(100)
    weights, moments = master.bfloat16(), (torch.ones(100), torch.ones(100))
    lamb_(weights, master, *moments, lamb_constants(1), 1.0)
    assert torch.equal(weights, master.bfloat16())


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 100_000), st.sampled_from([64, 8000, 16384, 20_032, 10**6]))
def test_lambs_bits_do_not_depend_on_the_tiles(numel: int, tile_size: int) -> None:
    results = []
    for size in (65536, tile_size):
        generator = torch.Generator().manual_seed(1)
        master, grad, m, v = (torch.randn(numel, generator=generator) for _ in range(4))
        squares = lamb_moments_(master, grad, m, v.abs_(), lamb_constants(3), size)
        lamb_(master, master, m, v, lamb_constants(3), 0.5, size)
        results.append((squares, master, m, v))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1:], results[1][1:], strict=True))


@pytest.mark.parametrize(
    ("weights", "update", "ratio"),
    [(0.0, 4.0, 1.0), (4.0, 0.0, 1.0), (4.0, 16.0, 0.5), (4e9, 1.0, 10.0), (1.0, 4e9, 0.01)],
)
def test_the_trust_ratio_is_clamped(weights: float, update: float, ratio: float) -> None:
    assert trust_ratio(weights, update, 0.01, 10.0) == ratio


def test_a_nan_passes_the_clamp() -> None:
    assert math.isnan(trust_ratio(1.0, float("nan"), 0.01, 10.0))
    assert math.isnan(trust_ratio(float("inf"), float("inf"), 0.01, 10.0))


def test_lamb_of_nothing() -> None:
    nothing = torch.zeros(0)
    assert lamb_moments_(nothing, nothing, nothing, nothing, lamb_constants(1)) == (0.0, 0.0)
    lamb_(nothing, nothing, nothing, nothing, lamb_constants(1), 1.0)
