"""fp16: the loss scale by DeepSpeed's rules; one rank's overflow skips the step everywhere."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from models import Squared, TinyLM, features, tokens
from mpi4py import MPI
from reference import assert_same_bits
from torch import nn

import hpczero
from hpczero.partition.precision import LossScaler

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank


def skips(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was logged of gradients that aren't finite."""
    return [message for message in caplog.messages if "isn't finite" in message]


def trail(scaler: LossScaler, overflows: str) -> list[float]:
    """Return the scale before each step; 'x' overflows."""
    scales = []
    for letter in overflows:
        scales.append(scaler.scale)
        scaler.update(letter == "x")
    return [*scales, scaler.scale]


def test_the_first_overflow_only_uses_up_the_hysteresis() -> None:
    assert trail(LossScaler(initial_scale_power=4), "xxx.") == [16, 16, 8, 4, 4]


def test_the_scale_doubles_after_a_window_without_overflow() -> None:
    scaler = LossScaler(initial_scale_power=4, loss_scale_window=2, hysteresis=1)
    assert trail(scaler, "....x....") == [16, 16, 16, 32, 32, 16, 16, 16, 32, 32]


@pytest.mark.slow
@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_the_trail_is_deepspeeds(
    hysteresis: int, consecutive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    monkeypatch.setattr(theirs.dist, "get_rank", lambda: 0)
    generator = random.Random(0)
    for window in (1, 2, 5):
        overflows = "".join(generator.choice("x...") for _ in range(60))
        oracle = theirs.DynamicLossScaler(
            init_scale=2**16,
            scale_window=window,
            min_scale=1,
            delayed_shift=hysteresis,
            consecutive_hysteresis=consecutive,
            raise_error_at_min_scale=False,
            dtype=torch.half,
        )
        expected = []
        for letter in overflows:
            expected.append(oracle.cur_scale)
            oracle.update_scale(letter == "x")
        ours = LossScaler(
            loss_scale_window=window, hysteresis=hysteresis, consecutive_hysteresis=consecutive
        )
        assert trail(ours, overflows) == [*expected, oracle.cur_scale]


def test_consecutive_hysteresis_comes_back_after_a_good_step() -> None:
    kept = LossScaler(initial_scale_power=4, consecutive_hysteresis=True)
    assert trail(kept, "x.x.x.") == [16] * 7
    lost = LossScaler(initial_scale_power=4)
    assert trail(lost, "x.x.x.") == [16, 16, 16, 8, 8, 4, 4]


def test_the_smallest_scale_survives_no_overflow() -> None:
    scaler = LossScaler(initial_scale_power=1, hysteresis=1, min_loss_scale=1)
    assert scaler.update(True)
    assert not scaler.update(True)
    assert scaler.scale == 1


def test_a_static_scale_stays() -> None:
    scaler = LossScaler(loss_scale=128)
    assert trail(scaler, "x.xx") == [128] * 5
    assert scaler.update(True)


def config(stage: int, **fp16: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage},
        "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, **fp16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }


class Result:
    def __init__(self, losses: list[float], norms: list[float], state: dict[str, Any]) -> None:
        self.losses, self.norms, self.state = losses, norms, state


def bf16(stage: int, checks: bool) -> dict[str, Any]:
    settings = config(stage)
    del settings["fp16"]
    return {**settings, "bf16": {"enabled": True, "check_grad_overflow": checks}}


def train(
    settings: dict[str, Any], bad: tuple[int, int] | None = None
) -> tuple[Result, hpczero.Engine]:
    """Train with an infinite loss at (step, rank)."""
    torch.manual_seed(0)
    engine = hpczero.Engine(TinyLM(), settings)
    losses, norms = [], []
    for step in range(5):
        loss = engine(tokens(step * SIZE + RANK))
        losses.append(engine.world.mean(loss.item()))
        engine.backward(loss * (float("inf") if bad == (step, RANK) else 1.0))
        engine.step()
        norms.append(engine.grad_norm)
    return Result(losses, [n for n in norms if n < 1e9], engine.full_state_dict()), engine


@pytest.mark.mpi
def test_fp16_learns_and_stages_agree() -> None:
    runs = [train(config(stage))[0] for stage in range(4)]
    assert_same_bits(runs)  # type: ignore[arg-type]
    assert runs[0].losses[-1] < 1.1 * runs[0].losses[0]


@pytest.mark.mpi
def test_an_overflow_on_one_rank_skips_the_step_on_all(caplog: pytest.LogCaptureFixture) -> None:
    rank = SIZE - 1
    with caplog.at_level(logging.WARNING, logger="hpczero"):
        runs = [train(config(stage), bad=(2, rank)) for stage in range(4)]
    assert_same_bits([run for run, _ in runs])  # type: ignore[arg-type]
    for _, engine in runs:
        assert engine.skipped_steps == 1
        assert engine.global_steps == 5
        assert engine._optimizer.steps == 4
        assert engine.loss_scale == 128
    if RANK == 0:
        assert len(skips(caplog)) == 4
        assert "step 3: the gradient of 'embed.weight' isn't finite" in skips(caplog)[0]
        assert "loss scale 256 -> 128" in skips(caplog)[0]


@pytest.mark.mpi
def test_bf16_skips_what_is_not_finite_where_asked_to(caplog: pytest.LogCaptureFixture) -> None:
    rank = SIZE - 1
    with caplog.at_level(logging.WARNING, logger="hpczero"):
        runs = [train(bf16(stage, checks=True), bad=(2, rank)) for stage in range(4)]
    assert_same_bits([run for run, _ in runs])  # type: ignore[arg-type]
    for _, engine in runs:
        assert (engine.skipped_steps, engine.global_steps, engine._optimizer.steps) == (1, 5, 4)
        assert engine.loss_scale == 1
    if RANK == 0:
        assert len(skips(caplog)) == 4
        message = "step 3: the gradient of 'embed.weight' isn't finite (shard of rank 0); skipped"
        assert skips(caplog)[0] == f"{message} on all ranks"
        assert all(bool(value.isfinite().all()) for value in runs[0][0].state.values())
    good = [train(bf16(1, checks=checks))[0] for checks in (False, True)]
    assert_same_bits(good)  # type: ignore[arg-type]
    unchecked, engine = train(bf16(3, checks=False), bad=(2, rank))
    assert engine.skipped_steps == 0
    assert unchecked.losses[4] != unchecked.losses[4]  # as in torch


@pytest.mark.mpi
@pytest.mark.parametrize("fast", [True, False])
def test_rank_0_says_that_the_cpu_is_slow_in_bf16(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr("hpczero.engine.multiplies_fast", lambda dtype: fast)
    with caplog.at_level(logging.WARNING, logger="hpczero"):
        hpczero.Engine(nn.Linear(2, 2), {"bf16": {"enabled": True}})
        hpczero.Engine(nn.Linear(2, 2), {})
    told = [m for m in caplog.messages if "multiplies torch.bfloat16" in m]
    assert len(told) == (not fast and RANK == 0)


@pytest.mark.mpi
def test_a_nan_in_one_parameter_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Squared(nn.Sequential(nn.Linear(12, 5), nn.Linear(5, 3)))
    engine = hpczero.Engine(model, config(2))
    handle = model.inner[1].bias.register_hook(lambda grad: grad * float("nan"))
    with caplog.at_level(logging.WARNING, logger="hpczero"):
        engine.backward(engine(features(RANK)))
        engine.step()
    handle.remove()
    assert engine.skipped_steps == 1
    if RANK == 0:
        assert "'inner.1.bias'" in caplog.text


@pytest.mark.mpi
def test_at_the_smallest_scale_the_error_names_the_tensor(world_comm: MPI.Intracomm) -> None:
    engine = hpczero.Engine(TinyLM(), config(1, initial_scale_power=0), world_comm)
    engine.backward(engine(tokens(RANK)) * float("inf"))
    with pytest.raises(hpczero.Overflow, match=r"'embed.weight'.*at its minimum"):
        engine.step()


@pytest.mark.mpi
def test_bf16_and_fp32_have_no_scale() -> None:
    assert hpczero.Engine(TinyLM(), {"bf16": {"enabled": True}}).loss_scale == 1.0
    assert hpczero.Engine(TinyLM(), {}).loss_scale == 1.0
