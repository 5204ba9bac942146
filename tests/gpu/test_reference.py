"""Adam's twin against torch in float64, and bit for bit against itself in any cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.gpu.reference import AdamStep, adam_

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
