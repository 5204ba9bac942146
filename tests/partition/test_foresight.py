"""How far ahead to gather: the rule on paper, what is timed, and that all ranks do as rank 0."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from mpi4py import MPI
from reference import assert_same_bits, config, train
from torch import nn

import hpczero
from hpczero import sizing
from hpczero.comm.timeline import Timeline
from hpczero.partition import hooks
from hpczero.partition.foresight import FURTHER, MEASURED, Gauge, Visit, further, waiting

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

ALIKE = [Visit(100, 1.0)] * 12
MIXED = [*[Visit(1, 0.25)] * 4, Visit(100, 0.05)] * 3
WEIGHTS_LAST = [
    Visit(numel, seconds)
    for numel, seconds in [(5, 1.5), (5, 1.5), (10, 1.2), (10, 1.2), (20, 1.0), (20, 1.0),
                           (50, 0.8), (50, 0.8), (100, 0.5), (100, 0.5)]
]  # fmt: skip


def wholes(visits: list[Visit]) -> list[int]:
    sizes = sorted(visit.numel for visit in visits)
    return [sum(sizes[-(2 + more) :]) for more in range(FURTHER + 1)]


def per_element(visits: list[Visit], ratio: float) -> float:
    """Return the seconds with which gathers take `ratio` of what computing takes."""
    return ratio * sum(v.seconds for v in visits) / sum(v.numel for v in visits)


@pytest.mark.parametrize("ratio", [0.5, 0.7, 0.95])
def test_of_like_units_only_the_first_is_waited_for(ratio: float) -> None:
    for whole in wholes(ALIKE):
        assert waiting(ALIKE, ratio / 100, whole) == pytest.approx(ratio)
    assert waiting(ALIKE, ratio / 100, 100) == pytest.approx(12 * ratio)  # nothing is foreseen


def test_a_slow_network_never_rests() -> None:
    for whole in wholes(ALIKE):
        assert waiting(ALIKE, 0.02, whole) == pytest.approx(12 * 2.0 - 11 * 1.0)


@pytest.mark.parametrize(
    ("visits", "ratio", "units"),
    [
        (ALIKE, 0.7, 0),
        (ALIKE, 3.0, 0),
        (MIXED, 0.7, 0),  # what is foreseen anyway begins with the large unit in time
        (WEIGHTS_LAST, 0.1, 0),
        (WEIGHTS_LAST, 0.5, 1),
        (WEIGHTS_LAST, 1.0, 2),
        ([], 1.0, 0),
    ],
)
def test_further_units_where_they_pay(visits: list[Visit], ratio: float, units: int) -> None:
    seconds = per_element(visits, ratio) if visits else ratio
    assert further([visits, visits], seconds, wholes(visits)) == units


def test_mixed_units_are_hidden_within_the_formula() -> None:
    seconds = per_element(MIXED, 0.7)
    first = seconds * MIXED[0].numel
    assert waiting(MIXED, seconds, wholes(MIXED)[0]) == pytest.approx(first)


def test_what_a_gauge_counts() -> None:
    line = Timeline()
    gauge = Gauge(line)
    gauge.enter("forward", "a", 5)
    time.sleep(0.02)
    with line.wait("gathers", "b"):
        time.sleep(0.2)
    gauge.leave()
    time.sleep(0.2)
    gauge.enter("forward", "a", 5)  # again, as recomputation does
    gauge.leave()
    gauge.enter("forward", "b", 7)
    gauge.leave()
    gauge.leave()
    gauge.enter("backward", "b", 7)
    gauge.leave()
    with line.span("gathers", "b", "gather"):
        time.sleep(0.02)
    gauge.gather(4)
    assert [[visit.numel for visit in visits] for visits in gauge.passes] == [[5, 7], [7]]
    assert 0.02 <= gauge.passes[0][0].seconds < 0.2
    assert gauge.passes[0][1].seconds < 0.2
    assert gauge.seconds_per_element >= 0.005


# On ranks #


class Falling(nn.Module):
    """Have few weights in front, many behind."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 300, 300, 300)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, w), nn.Linear(w, 16)) for w in widths
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x.square().sum(-1).mean()


def loss_of(model: Any, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    loss: torch.Tensor = model(torch.randn(4, 16, generator=generator))
    return loss


@pytest.mark.mpi
def test_all_ranks_do_as_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "LEAST_NUMEL", 0)
    monkeypatch.setattr(hooks, "further", lambda *_: 2 if RANK == 0 else 1)
    steps = MEASURED.stop + 2
    settings = {**config(3), "node_memory": False}
    measured = train(Falling, loss_of, settings, steps=steps)
    fixed = [
        train(Falling, loss_of, {**config(3, prefetch=numel), "node_memory": False}, steps=steps)
        for numel in (0, 10_000)
    ]
    assert measured.engine.further_units == (2 if SIZE > 1 else 0)
    assert [run.engine.further_units for run in fixed] == [0, 0]
    assert_same_bits([measured, *fixed])


@pytest.mark.mpi
@pytest.mark.parametrize("more", range(FURTHER + 1))
def test_gathered_memory_is_as_the_formula_says(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "LEAST_NUMEL", 0)
    monkeypatch.setattr(hooks, "further", lambda *_: more)
    engine = hpczero.Engine(Falling(), {**config(3), "node_memory": False})
    runtime, high = engine._runtime, [0]
    gather = runtime._gather

    def watched(bucket: Any) -> None:
        gather(bucket)
        high.append(sum(each.layout.padded for each in runtime._used))

    monkeypatch.setattr(runtime, "_gather", watched)
    for _ in range(MEASURED.stop + 1):
        high.clear()
        engine.backward(engine(torch.ones(2, 16)))
        engine.step()
    more = engine.further_units
    none, these = (
        sizing.memory_formula(engine.bucket_shapes(), 3, SIZE, further=units)["buffers"]
        for units in (0, more)
    )
    sizes = sorted(shape.padded for shape in engine.bucket_shapes())
    assert these - none == 4 * sum(sizes[-(2 + more) : -2])
    assert max(high) == sum(sizes[-(2 + more) :])


@pytest.mark.mpi
def test_what_is_measured_is_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "LEAST_NUMEL", 0)
    engine = hpczero.Engine(Falling(), {**config(3), "node_memory": False})
    for number in range(MEASURED.stop + 1):
        engine.backward(engine(torch.ones(2, 16)))
        engine.step()
        gauge = engine._runtime._gauge
        assert (gauge is not None) == (SIZE > 1 and number + 1 in MEASURED)
        if number + 1 == MEASURED.stop - 1 and gauge is not None:
            kept = gauge
    assert engine.world.mean(engine.further_units) == engine.further_units
    if SIZE > 1:
        blocks = len(engine.module.blocks)
        assert [len(visits) for visits in kept.passes] == [blocks + 1] * 2 * len(MEASURED)
        assert all(visit.seconds > 0 for visits in kept.passes for visit in visits)
        assert kept.seconds_per_element > 0
