"""LAMB on shards equals LAMB on whole parameters, whose norms it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from models import WIDTH, Squared, TinyLM, features, tokens
from mpi4py import MPI
from reference import assert_same_bits, config, train
from torch import nn

import hpczero
from hpczero.gpu import reference
from hpczero.partition import lamb

pytestmark = pytest.mark.mpi

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank


def tiny() -> nn.Module:
    """Tied and ragged, with frozen and empty parameters and one that no loss uses."""
    model = TinyLM()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("blocks.1.up" not in name)
    model.empty = nn.Parameter(torch.zeros(0, 5))
    model.unused = nn.Parameter(torch.linspace(-1, 1, 70))
    return model


def wide() -> nn.Module:
    """Parameters of several tiles, which the shards' borders cut anywhere."""
    return Squared(nn.Sequential(nn.Linear(WIDTH, 7001), nn.GELU(), nn.Linear(7001, 12)))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "tiny": (tiny, tokens),
    "wide": (wide, features),
}


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    vectors = [p for p in model.parameters() if p.ndim < 2]
    blocks = [p for n, p in model.named_parameters() if p.ndim > 1 and "0" in n]
    rest = [p for n, p in model.named_parameters() if p.ndim > 1 and "0" not in n]
    return [
        {"params": rest, "eps_inside_sqrt": True, "min_coeff": 0.5},
        {"params": vectors, "weight_decay": 0.0, "bias_correction": False},
        {"params": blocks, "lr": 3e-3, "max_coeff": 0.7, "betas": (0.8, 0.9)},
    ]


def make_lamb(model: nn.Module) -> hpczero.Lamb:
    return hpczero.Lamb(grouped(model), lr=2e-2, weight_decay=0.1)


class Run(NamedTuple):
    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]
    states: dict[str, dict[str, Any]]


def sharded(
    kind: str, stage: int, make: Callable[[nn.Module], Any] = make_lamb, **zero: Any
) -> Run:
    build, data = MODELS[kind]
    torch.manual_seed(0)
    model = build()
    settings = {"zero_optimization": {"stage": stage, **zero}, "gradient_clipping": 0.5}
    engine = hpczero.Engine(model, settings, optimizer=make(model))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)
    losses, norms = [], []
    for step in range(3):
        loss = engine(data(step * SIZE + RANK))
        losses.append(engine.world.mean(loss.item()))
        engine.backward(loss)
        engine.step()
        norms.append(engine.grad_norm)
        scheduler.step()
    return Run(losses, norms, engine.full_state_dict(), engine.full_optimizer_state())


def whole(kind: str, norms: list[float]) -> Run:
    """Train one process, clipped by the norms of a sharded run, whose rounding is not at stake."""
    build, data = MODELS[kind]
    torch.manual_seed(0)
    model = build()
    optimizer = make_lamb(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses = []
    for step in range(3):
        total = 0.0
        for rank in range(SIZE):
            loss = model(data(step * SIZE + rank))
            total += loss.item()
            (loss / SIZE).backward()
        losses.append(total / SIZE)
        for parameter in model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if norms[step] + 1e-6 > 0.5:
                    parameter.grad.mul_(0.5 / (norms[step] + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states = {names[id(parameter)]: state for parameter, state in optimizer.state.items()}
    return Run(losses, norms, model.state_dict(), states)


@pytest.mark.parametrize("kind", MODELS)
def test_every_stage_equals_one_process(kind: str) -> None:
    runs = [sharded(kind, stage) for stage in range(4)]
    assert_same_bits(runs)  # type: ignore[arg-type]
    if RANK != 0:
        return
    assert max(runs[0].norms) > 0.5, "nothing was clipped"
    plain = whole(kind, runs[0].norms)
    same = torch.equal if SIZE == 1 else close
    for run in runs:
        assert run.losses == pytest.approx(plain.losses, rel=1e-5)
        for name, value in run.state.items():
            assert same(value, plain.state[name]), name
        assert run.states.keys() == plain.states.keys()
        for name, state in run.states.items():
            assert state["step"] == plain.states[name]["step"] == 3
            for key in ("exp_avg", "exp_avg_sq"):
                assert same(state[key], plain.states[name][key]), (name, key)


def test_norms_are_bitwise_equal_across_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[set[tuple[float, ...]]] = []

    def spy(*args: float) -> float:
        norms[-1].add(args)
        return reference.trust_ratio(*args)

    monkeypatch.setattr(lamb, "trust_ratio", spy)
    for stage in range(4):
        norms.append(set())
        sharded("wide", stage)
    assert len(norms[0]) == 4 * 3
    for sets in norms[1:]:  # of the parameters of which this rank has a part
        assert sets
        assert sets <= norms[0]


def close(mine: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(mine, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("size", [1, 1000, 20_000, 10**9])
def test_sub_groups_change_no_bit(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sharded("wide", 2)
    sizes = []
    update = reference._lamb_update

    def spy(master: torch.Tensor, *others: Any) -> None:
        sizes.append(master.numel())
        update(master, *others)

    monkeypatch.setattr(reference, "_lamb_update", spy)
    assert_same_bits([before, sharded("wide", 2, sub_group_size=size)])  # type: ignore[list-item]
    assert max(sizes) <= max(64, size)


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_bf16_and_accumulation(accumulation: int) -> None:
    def run(stage: int, dtype: str = "bf16") -> Any:
        settings = config(stage, dtype, accumulation, clip=0.1, kind="Lamb")
        return train(TinyLM, lambda model, number: model(tokens(number)), settings)

    exact = run(0, "fp32")
    runs = [run(stage) for stage in range(4)]
    groups = [runs] if accumulation == 1 else [runs[:2], runs[2:]]
    for same in groups:
        assert_same_bits(same)
        assert same[0].losses == pytest.approx(exact.losses, rel=2e-2)


def test_a_skipped_step_moves_nothing() -> None:
    settings = {
        "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
        "optimizer": {"type": "Lamb", "params": {"lr": 1e-2}},
    }
    runs = []
    for stage in range(4):
        torch.manual_seed(0)
        engine = hpczero.Engine(TinyLM(), {**settings, "zero_optimization": {"stage": stage}})
        start = engine.full_state_dict()
        engine.backward(engine(tokens(RANK)) * (float("inf") if RANK == SIZE - 1 else 1.0))
        engine.step()
        assert all(torch.equal(start[n], value) for n, value in engine.full_state_dict().items())
        for step in range(1, 4):
            engine.backward(engine(tokens(step * SIZE + RANK)))
            engine.step()
        assert engine.skipped_steps == 1
        states = engine.full_optimizer_state()
        assert all(state["step"] == 3 for state in states.values())
        runs.append(Run([], [], engine.full_state_dict(), states))
    assert_same_bits(runs)  # type: ignore[arg-type]


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")])
def test_memory_is_adams_and_traffic_one_exchange_more(stage: int, dtype: str) -> None:
    found, calls = [], []
    for kind in ("AdamW", "Lamb"):
        settings = config(stage, dtype, kind=kind)
        engine = train(TinyLM, lambda m, number: m(tokens(number)), settings, steps=2).engine
        found.append([engine.memory()[key] for key in ("params", "grads", "states")])
        calls.append(engine.traffic()["by_purpose"]["exchange"]["calls"])
    assert found[1] == found[0]
    assert calls[1] == calls[0] + 1


@pytest.mark.parametrize("name", ["Lamb", "lamb", "FusedLamb"])
def test_by_name_class_and_function(name: str) -> None:
    params = {"lr": 1e-2, "weight_decay": 0.1, "bias_correction": False, "max_grad_norm": 0}
    settings = {
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": name, "params": params},
    }
    others: list[Any] = [
        None,
        lambda groups: hpczero.Lamb(
            [p for g in groups for p in g["params"]], 1e-2, False, weight_decay=0.1
        ),
        lambda groups: hpczero.Lamb(groups, **params),
    ]
    states = []
    for source in others:
        torch.manual_seed(0)
        engine = hpczero.Engine(TinyLM(), settings, optimizer=source)
        assert type(engine.optimizer) is hpczero.Lamb
        engine.backward(engine(tokens(RANK)))
        engine.step()
        states.append(engine.full_state_dict())
    for other in states[1:]:
        assert all(torch.equal(other[key], value) for key, value in states[0].items())
    torch.manual_seed(0)
    engine = hpczero.Engine(TinyLM(), {}, optimizer=hpczero.Lamb)
    assert engine.optimizer.param_groups[0]["max_coeff"] == 10.0


def test_what_only_looks_like_lamb_is_refused() -> None:
    class Mine(hpczero.Lamb):
        pass

    with pytest.raises(ValueError, match="Mine updates a matrix otherwise"):
        hpczero.Engine(TinyLM(), {}, optimizer=Mine)
    with pytest.raises(hpczero.ConfigError, match="unknown optimizer 'OneBitLamb'"):
        hpczero.Engine(TinyLM(), {"optimizer": {"type": "OneBitLamb"}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr: expected at least 0; found -1"),
        ({"betas": (0.9, 1.0)}, r"betas: .* found \(0.9, 1.0\)"),
        ({"eps": -1e-8}, "eps: "),
        ({"weight_decay": -0.1}, "weight_decay: "),
        ({"max_grad_norm": 1.0}, "max_grad_norm: expected 0: clip before the step; found 1"),
        ({"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff: .*at most max_coeff, 1.0; found 2.0"),
        ({"amsgrad": True}, "amsgrad: expected False"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=f"Lamb: {message}"):
        hpczero.Lamb([weight], **settings)
    with pytest.raises(ValueError, match=f"Lamb: {message}"):
        hpczero.Lamb([{"params": [weight], **settings}])


def test_a_plain_loop_takes_any_memory_order() -> None:
    torch.manual_seed(0)
    start, grad = torch.randn(5, 7), torch.randn(5, 7)
    straight = nn.Parameter(start.clone())
    transposed = nn.Parameter(start.t().contiguous().t())
    assert not transposed.is_contiguous()
    optimizer = hpczero.Lamb([straight, transposed, nn.Parameter(torch.ones(2))], lr=0.1)
    for _ in range(2):
        straight.grad, transposed.grad = grad.clone(), grad.t().contiguous().t()
        assert optimizer.step(lambda: torch.ones(1, requires_grad=True) * 3).item() == 3
    assert torch.equal(straight, transposed)
    assert not torch.equal(straight, start)
    assert len(optimizer.state) == 2, "no gradient, no state"


def test_a_plain_loop_refuses_sparse_and_16_bit() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"dense gradient.*sparse_coo.*\(5, 3\)"):
        hpczero.Lamb(embedding.parameters()).step()
    half = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    half.grad = torch.ones_like(half)
    with pytest.raises(RuntimeError, match=r"found torch\.bfloat16"):
        hpczero.Lamb([half]).step()
