"""Schedules: DeepSpeed's rates at every update, and a mended warm-up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

from hpczero import ConfigError, schedules

LR = 0.01
UPDATES = 20
# A name and parameters; the recorded values below are of the first case of each schedule.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "warmup": ("WarmupLR", {"warmup_min_lr": 0.001, "warmup_num_steps": 8}),
    "warmup-linear": (
        "WarmupLR",
        {"warmup_max_lr": [0.1, 0.2], "warmup_num_steps": 7, "warmup_type": "linear"},
    ),
    "warmup-one": ("WarmupLR", {"warmup_max_lr": 0.3, "warmup_num_steps": 1}),
    "decay": ("WarmupDecayLR", {"total_num_steps": 15, "warmup_num_steps": 5}),
    "decay-linear": (
        "WarmupDecayLR",
        {
            "total_num_steps": 18,
            "warmup_min_lr": 0.1,
            "warmup_max_lr": 0.5,
            "warmup_num_steps": 6,
            "warmup_type": "linear",
        },
    ),
    "decay-short": ("WarmupDecayLR", {"total_num_steps": 3, "warmup_num_steps": 6}),
    "cosine": (
        "WarmupCosineLR",
        {"total_num_steps": 16, "warmup_num_steps": 5, "warmup_min_ratio": 0.2},
    ),
    "cosine-linear": (
        "WarmupCosineLR",
        {
            "total_num_steps": 40,
            "warmup_num_steps": 4,
            "cos_min_ratio": 0.3,
            "warmup_type": "linear",
        },
    ),
    "cosine-short": ("WarmupCosineLR", {"total_num_steps": 5, "warmup_num_steps": 5}),
    "cycle": (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 0.9,
            "cycle_first_step_size": 6,
            "cycle_second_step_size": 8,
            "decay_lr_rate": 0.5,
            "decay_mom_rate": 0.01,
            "decay_step_size": 2,
        },
    ),
    "cycle-stairs": (
        "OneCycle",
        {
            "cycle_min_lr": [0.1, 0.2],
            "cycle_max_lr": 0.7,
            "cycle_first_step_size": 7,
            "cycle_first_stair_count": 3,
            "cycle_second_stair_count": 2,
            "cycle_min_mom": [0.5, 0.6],
        },
    ),
    "cycle-up": (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 0.7,
            "cycle_first_step_size": 9,
            "cycle_second_step_size": 0,
            "cycle_momentum": False,
        },
    ),
    "range": (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2},
    ),
    "range-stairs": (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": [0.01, 0.02],
            "lr_range_test_step_size": 3,
            "lr_range_test_staircase": True,
        },
    ),
}
# Rates of the first group at the updates 1, 2, ... in DeepSpeed 0.19.8.
RECORDED: dict[str, list[float]] = {
    "warmup": [
        0.001, 0.001, 0.004, 0.00575488750216347, 0.007, 0.007965784284662087,
        0.00875488750216347, 0.009422064766172814, *[0.01] * 12,
    ],
    "decay": [
        0.0, 0.0, 0.00043067655807339306, 0.0006826061944859854, 0.0008613531161467861,
        0.001, 0.001, 0.0009, 0.0008, 0.0007, 0.0006, 0.0005, 0.0004, 0.0003, 0.0002, 0.0001,
        0.0, 0.0, 0.0, 0.0,
    ],
    "cosine": [
        0.0, 0.002, 0.005445412464587145, 0.007460849555887883, 0.00889082492917429, 0.01,
        0.00979748512158568, 0.009206347037389491, 0.008274476239359453, 0.007077367357502932,
        0.00571200303394729, 0.0042889969660527116, 0.0029236326424970692, 0.0017265237606405477,
        0.0007946529626105091, 0.00020351487841432095, 1e-6, 1e-6, 1e-6, 1e-6,
    ],
    "cycle": [
        0.1, 0.7 / 3, 1.1 / 3, 0.5, 1.9 / 3, 2.3 / 3, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1,
        0.08, 0.2 / 3, 0.05714285714285715, 0.05, 0.4 / 9,
    ],
    "range": [0.01 * (1 + 2 * update / 3) for update in range(20)],
}  # fmt: skip
RECORDED_BETA1 = [
    0.8, 2.65 / 3, 2.6 / 3, 0.85, 2.5 / 3, 2.45 / 3, 0.8, 0.8125, 0.825, 0.8375, 0.85, 0.8625,
    0.875, 0.8875, 0.9, 0.9045, 0.909, 0.9135, 0.918, 0.9225,
]  # fmt: skip


def optimizer(lr: float = LR) -> AdamW:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": scale * lr} for scale in (1, 3)]
    return AdamW(groups, betas=(0.95, 0.999))


def rates(scheduler: Any, inner: Optimizer) -> list[list[Any]]:
    """Return each group's rate and betas at the updates 1 to 20."""
    found = []
    for _ in range(UPDATES):
        found.append([(group["lr"], group.get("betas")) for group in inner.param_groups])
        inner.step()
        scheduler.step()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_update_has_deepspeeds_rate(case: str) -> None:
    name, params = CASES[case]
    theirs = pytest.importorskip("deepspeed.runtime.lr_schedules")
    inner = optimizer()
    expected = rates(getattr(theirs, name)(inner, **params), inner)
    inner = optimizer()
    assert rates(schedules.build(name, params, inner), inner) == expected


@pytest.mark.parametrize("case", RECORDED)
def test_every_update_has_the_recorded_rate(case: str) -> None:
    inner = optimizer()
    found = rates(schedules.build(*CASES[case], inner), inner)
    assert [groups[0][0] for groups in found] == pytest.approx(RECORDED[case], rel=1e-12)
    if case == "cycle":
        assert [groups[0][1][0] for groups in found] == pytest.approx(RECORDED_BETA1, rel=1e-12)
        assert {groups[1][1][1] for groups in found} == {0.99}


def first_group(name: str, **params: Any) -> list[float]:
    inner = optimizer()
    return [groups[0][0] for groups in rates(schedules.build(name, params, inner), inner)]


@pytest.mark.parametrize("kind", ["linear", "log"])
def test_no_update_is_wasted_where_the_warmup_counts_from_one(kind: str) -> None:
    mended = {"warmup_type": kind, "warmup_num_steps": 4, "warmup_counts_from_one": True}
    constant = first_group("WarmupLR", **mended)
    decay = first_group("WarmupDecayLR", total_num_steps=20, warmup_max_lr=LR, **mended)
    cosine = first_group("WarmupCosineLR", total_num_steps=20, cos_min_ratio=0.0, **mended)
    assert constant[:4] == decay[:4] == cosine[:4]
    if kind == "linear":
        assert constant == pytest.approx([LR / 4, LR / 2, 3 * LR / 4, *[LR] * 17])
    assert all(0 < rate <= LR for rate in (*constant, *decay, *cosine[:-1]))
    assert decay[4] == LR
    assert decay[19] == pytest.approx(LR / 16)
    assert cosine[19] == pytest.approx(0.0)
    assert sorted(decay[3:], reverse=True) == decay[3:]


@pytest.mark.parametrize("case", CASES)
def test_resume_goes_on(case: str) -> None:
    inner = optimizer()
    straight = schedules.build(*CASES[case], inner)
    rates(straight, inner)
    saved = straight.state_dict()
    assert saved == {"last_batch_iteration": UPDATES - 1}  # as DeepSpeed saves it
    expected = rates(straight, inner)
    inner = optimizer()
    resumed = schedules.build(*CASES[case], inner)
    resumed.load_state_dict(saved)
    assert resumed.get_last_lr() == [group["lr"] for group in inner.param_groups]
    assert rates(resumed, inner) == expected


def test_resume_before_the_first_update_or_after_it() -> None:
    for done in (0, 1):
        inner = optimizer()
        scheduler = schedules.build(*CASES["decay"], inner)
        scheduler.load_state_dict({"last_batch_iteration": done - 1})
        assert [groups[0][0] for groups in rates(scheduler, inner)][: 20 - done] == pytest.approx(
            RECORDED["decay"][done:]
        )


def test_rates_may_be_tensors() -> None:
    inner = AdamW([torch.nn.Parameter(torch.ones(2))], lr=torch.tensor(LR))
    tensor = inner.param_groups[0]["lr"]
    scheduler = schedules.build("WarmupLR", {"warmup_num_steps": 2}, inner)
    for expected in (0.0, 0.0, LR, LR):
        assert tensor.item() == pytest.approx(expected)
        inner.step()
        scheduler.step()
    assert inner.param_groups[0]["lr"] is tensor


def test_auto_means_the_groups_own_rate() -> None:
    inner = optimizer()
    params = {
        "total_num_steps": 1e2,
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": 2,
        "warmup_type": "auto",
    }
    scheduler = schedules.build("WarmupDecayLR", params, inner)
    rates(scheduler, inner)
    assert scheduler.get_last_lr() == pytest.approx([LR * 81 / 98, 3 * LR * 81 / 98])


def test_momentum_is_left_alone_where_there_is_none() -> None:
    inner = SGD([torch.nn.Parameter(torch.ones(2))], lr=LR)
    scheduler = schedules.build(*CASES["cycle"], inner)
    assert [groups[0][0] for groups in rates(scheduler, inner)] == pytest.approx(RECORDED["cycle"])
    assert "betas" not in inner.param_groups[0]


def test_torchs_schedules_have_their_names() -> None:
    inner = optimizer()
    scheduler = schedules.build("StepLR", {"step_size": 2, "gamma": 0.5}, inner)
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    assert [groups[0][0] for groups in rates(scheduler, inner)][:5] == [
        LR, LR, LR / 2, LR / 2, LR / 4,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("WarmUpLR", {}, ["scheduler.type", "'WarmUpLR'", "did you mean 'WarmupLR'?"]),
        ("ReduceLROnPlateau", {}, ["unknown schedule 'ReduceLROnPlateau'"]),
        ("WarmupLR", {"warmup_steps": 3}, ["'scheduler.params.warmup_steps'", "did you mean"]),
        ("WarmupLR", {"warmup_num_steps": 0}, ["scheduler.params.warmup_num_steps", "found 0"]),
        ("WarmupLR", {"warmup_num_steps": 2.5}, ["scheduler.params.warmup_num_steps", "2.5"]),
        ("WarmupLR", {"warmup_type": "cubic"}, ["warmup_type: expected 'log' or 'linear'"]),
        ("WarmupLR", {"warmup_max_lr": [1.0]}, ["params.warmup_max_lr", "(2), found 1"]),
        ("WarmupLR", {"last_batch_iteration": 3}, ["params.last_batch_iteration", "found 3"]),
        ("WarmupLR", {"warmup_min_lr": float("nan")}, ["params.warmup_min_lr", "found nan"]),
        ("WarmupDecayLR", {}, ["scheduler.params.total_num_steps: missing"]),
        ("WarmupDecayLR", {"total_num_steps": "auto"}, ["params.total_num_steps: missing"]),
        ("OneCycle", {"cycle_min_lr": -1}, ["params.cycle_max_lr: missing", "found -1"]),
        ("StepLR", {"step": 3}, ["did you mean 'step_size'?", "params.step_size: missing"]),
        ("MultiStepLR", {"milestones": 3}, ["scheduler.params: torch's MultiStepLR"]),
    ],
)
def test_problems_name_the_key(name: str, params: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        schedules.build(name, params, optimizer())
    text = str(raised.value)
    assert all(part in text for part in expected), text


def test_all_problems_at_once() -> None:
    params = {"warmup_num_steps": -1, "warmup_type": 3, "warmup_lr": 1}
    assert len(schedules.problems("WarmupDecayLR", params)) == 4
