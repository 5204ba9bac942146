"""The compiled Adam against its twin: the same bits in every dtype, cut and instruction set."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from extensions import assert_built, build, each_level
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import ROOT

from hpczero.gpu import adam, reference
from hpczero.gpu.reference import AdamStep

State = tuple[torch.Tensor, ...]  # weights, master, moments

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
PAIRS = [
    (None, FP32), (None, BF16), (None, FP16), (BF16, FP32), (BF16, BF16), (FP16, FP32),
    (FP16, FP16), (None, FP64),
]  # fmt: skip
needs_kernel = pytest.mark.skipif(adam.kernel_name() == "torch", reason="no compiled kernel here")


def test_the_kernel_was_built() -> None:
    assert_built("hpczero/gpu", "_adam_cpu")
    assert adam.kernel_name().startswith("C++")


def start(weights: torch.dtype | None, grad: torch.dtype, count: int) -> tuple[State, torch.Tensor]:
    """Return numbers of all sizes, with nan, inf and minus zero among them."""
    generator = torch.Generator().manual_seed(0)
    wide = FP64 if grad == FP64 else FP32
    master = torch.randn(count, dtype=wide, generator=generator)
    powers = 10.0 ** torch.randint(-30, 5, (count,), generator=generator)
    gradient = (torch.randn(count, generator=generator) * powers).to(grad)
    moment1 = torch.randn(count, dtype=wide, generator=generator) * 1e-3
    moment2 = torch.rand(count, dtype=wide, generator=generator) * 1e-6
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0])[:count]
    gradient[: len(odd)] = odd.to(grad)
    master[5:8] = torch.tensor([float("inf"), -0.0, 0.0], dtype=wide)[: max(0, count - 5)]
    moment1[3:5] = -0.0
    kept = master if weights is None else master.to(weights)
    return (kept, master, moment1, moment2), gradient


def update(function: object, state: State, gradient: torch.Tensor, constants: AdamStep) -> State:
    master = state[1].clone()
    weights = master if state[0] is state[1] else state[0].clone()
    moments = state[2].clone(), state[3].clone()
    function(weights, master, gradient, *moments, constants)  # type: ignore[operator]
    return weights, master, *moments


def assert_same_bits(a: State, b: State) -> None:
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    for x, y in zip(a, b, strict=True):
        bits = kinds[x.element_size()]
        same = (x.view(bits) == y.view(bits)) | (x.isnan() & y.isnan())
        assert same.all(), f"{int((~same).sum())} of {same.numel()} differ"


def all_constants() -> Iterator[AdamStep]:
    for decoupled, decay, scale, step in itertools.product(
        (True, False), (0.0, 0.1), (1.0, 0.37), (1, 1000)
    ):
        yield AdamStep(1e-3, 0.9, 0.95, 1e-8, decay, decoupled, step, scale)


@needs_kernel
@pytest.mark.parametrize(("weights", "grad"), PAIRS, ids=str)
def test_the_bits_of_the_twin(weights: torch.dtype | None, grad: torch.dtype) -> None:
    for count in (0, 1, 63, 1000, 140_003):
        state, gradient = start(weights, grad, count)
        for constants in all_constants():
            expected = update(reference.adam_, state, gradient, constants)
            assert_same_bits(update(adam.adam_, state, gradient, constants), expected)


@needs_kernel
@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 140_003), max_size=4), st.sampled_from([1, 2, 3]))
def test_bits_do_not_depend_on_cuts_and_threads(cuts: list[int], threads: int) -> None:
    state, gradient = start(BF16, BF16, 140_003)
    constants = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 3, 0.5)
    expected = update(adam.adam_, state, gradient, constants)
    edges = [0, *sorted(cuts), 140_003]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        parts = [
            update(adam.adam_, tuple(t[a:b] for t in state), gradient[a:b], constants)
            for a, b in itertools.pairwise(edges)
        ]
    finally:
        torch.set_num_threads(before)
    assert_same_bits(tuple(torch.cat(column) for column in zip(*parts, strict=True)), expected)


@each_level
def test_bits_do_not_depend_on_the_instruction_set(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "adam.so"
    build(ROOT / "hpczero/gpu/adam_cpu.cpp", library, level)
    built = ctypes.CDLL(str(library))
    monkeypatch.setattr(adam, "_kernel", lambda name: getattr(built, name, None))
    for weights, grad in PAIRS:
        state, gradient = start(weights, grad, 3001)
        for constants in all_constants():
            expected = update(reference.adam_, state, gradient, constants)
            assert_same_bits(update(adam.adam_, state, gradient, constants), expected)


def test_where_nothing_was_built_the_twin_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "_library", lambda: None)
    monkeypatch.setattr(adam, "_kernel", lambda name: None)
    assert adam.kernel_name() == "torch"
    state, gradient = start(BF16, BF16, 1000)
    constants = next(all_constants())
    expected = update(reference.adam_, state, gradient, constants)
    assert_same_bits(update(adam.adam_, state, gradient, constants), expected)
