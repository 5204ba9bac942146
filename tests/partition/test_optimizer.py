"""Any elementwise torch optimizer on the shards equals it on whole parameters."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import TinyLM, tokens
from mpi4py import MPI
from torch import nn
from torch.optim import Optimizer

import hpczero
from hpczero.gpu import adam, reference

pytestmark = pytest.mark.mpi

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank

Make = Callable[[Any], Optimizer]

ELEMENTWISE: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.9)),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
}


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """No decay for vectors, and another lr for blocks: three groups, some empty on some ranks."""
    vectors = [p for p in model.parameters() if p.ndim < 2]
    blocks = [p for n, p in model.named_parameters() if p.ndim > 1 and "blocks" in n]
    rest = [p for n, p in model.named_parameters() if p.ndim > 1 and "blocks" not in n]
    return [
        {"params": rest},
        {"params": vectors, "weight_decay": 0.0},
        {"params": blocks, "lr": 3e-3},
    ]


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, **more}


def sharded(
    stage: int, optimizer: Callable[[nn.Module], Any], steps: int = 3, decay: float = 1.0
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = TinyLM()
    engine = hpczero.Engine(model, settings(stage), optimizer=optimizer(model))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, decay)
    for step in range(steps):
        engine.backward(engine(tokens(step * SIZE + RANK)))
        engine.step()
        scheduler.step()
    return engine.full_state_dict()


def whole(
    optimizer: Callable[[nn.Module], Any], steps: int = 3, decay: float = 1.0
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = TinyLM()
    inner = optimizer(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, decay)
    for step in range(steps):
        for rank in range(SIZE):
            (model(tokens(step * SIZE + rank)) / SIZE).backward()
        inner.step()
        inner.zero_grad()
        scheduler.step()
    return model.state_dict()


def assert_same(mine: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    for name, value in mine.items():
        torch.testing.assert_close(value, plain[name], rtol=2e-3, atol=2e-4, msg=name)


OFTEN = {"SGD with momentum", "Adam", "AdamW", "NAdam", "Adagrad"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in OFTEN else pytest.mark.slow) for n in ELEMENTWISE]
)
def test_instance_equals_plain_torch(name: str) -> None:
    make = ELEMENTWISE[name]

    def optimizer(model: nn.Module) -> Optimizer:
        return make(grouped(model))

    runs = [sharded(stage, optimizer, decay=0.5) for stage in range(4)]
    if RANK == 0:
        for run in runs[1:]:
            assert all(torch.equal(run[key], value) for key, value in runs[0].items())
        assert_same(runs[0], whole(optimizer, decay=0.5))


def test_a_class_is_built_on_the_shards() -> None:
    run = sharded(3, lambda model: torch.optim.RMSprop)
    if RANK == 0:
        assert_same(run, whole(lambda model: torch.optim.RMSprop(model.parameters())))


def test_groups_as_model_parameters() -> None:
    torch.manual_seed(0)
    model = TinyLM()
    engine = hpczero.Engine(
        model,
        settings(3, optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}),
        model_parameters=grouped(model),
    )
    for step in range(3):
        engine.backward(engine(tokens(step * SIZE + RANK)))
        engine.step()
    state = engine.full_state_dict()
    assert [group["lr"] for group in engine.optimizer.param_groups] == [1e-2, 1e-2, 3e-3]
    if RANK == 0:
        plain = whole(lambda m: torch.optim.AdamW(grouped(m), lr=1e-2, weight_decay=0.1))
        assert_same(state, plain)


def test_one_group_per_parameter_with_some_frozen() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = TinyLM()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("up" not in name)
        return model

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [
            {"params": [parameter], "lr": 1e-3 * (1 + index)}
            for index, parameter in enumerate(model.parameters())
        ]

    model = build()
    engine = hpczero.Engine(model, settings(3), optimizer=torch.optim.AdamW(groups(model)))
    for step in range(3):
        engine.backward(engine(tokens(step * SIZE + RANK)))
        engine.step()
    state = engine.full_state_dict()
    if RANK == 0:
        plain = build()
        optimizer = torch.optim.AdamW(groups(plain))
        for step in range(3):
            for rank in range(SIZE):
                (plain(tokens(step * SIZE + rank)) / SIZE).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(state, plain.state_dict())


def stepped(size: int | str, optimizer: Any) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    """Return weights and states, and the elements of the gradients in each call."""
    torch.manual_seed(0)
    model = TinyLM()
    zero = {"stage": 1, "sub_group_size": size}
    settings = {"zero_optimization": zero, "gradient_clipping": 0.1}
    engine = hpczero.Engine(model, settings, optimizer=optimizer(model))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)
    calls = []

    def count(inner: Optimizer, *_: Any) -> None:
        params = [p for group in inner.param_groups for p in group["params"]]
        calls.append([p.numel() for p in params if p.grad is not None])

    engine.optimizer.register_step_pre_hook(count)
    for step in range(3):
        engine.backward(engine(tokens(step * SIZE + RANK)))
        engine.step()
        scheduler.step()
    result = engine.full_state_dict()
    for name, state in engine.full_optimizer_state().items():
        result |= {f"{name} {key}": torch.as_tensor(value) for key, value in state.items()}
    return result, calls


def assert_same_tensors(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == other.keys()
    for name, value in mine.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(
    ("name", "how", "size"),
    [
        ("SGD with momentum", "instance", 1),
        ("Adagrad", "instance", 200),
        ("Adagrad", "function", 200),
        ("NAdam", "instance", 10**9),
        ("AdamW amsgrad", "function", 200),
    ],
)
def test_sub_groups_bound_the_gradients_of_a_call(name: str, how: str, size: int) -> None:
    make = ELEMENTWISE[name]

    def optimizer(model: nn.Module) -> Any:
        return make(grouped(model)) if how == "instance" else make

    before, _ = stepped("auto", optimizer)
    after, calls = stepped(size, optimizer)
    assert_same_tensors(after, before)
    totals = [sum(call) for call in calls]
    assert max(totals) <= max(64, size)
    if size == 10**9:
        assert len(calls) == 3 * 4, "a call for each bucket: the root and three blocks"


@pytest.mark.parametrize("size", [1, 200])
def test_sub_groups_bound_the_tiles_of_adams_twin(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def optimizer(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(grouped(model), lr=1e-2)

    before, _ = stepped("auto", optimizer)
    sizes = []
    tile = reference._adam_tile

    def spy(master: torch.Tensor, *others: Any) -> None:
        sizes.append(master.numel())
        tile(master, *others)

    monkeypatch.setattr(adam, "_kernel", lambda name: None)  # which needs no temporary memory
    monkeypatch.setattr(reference, "_adam_tile", spy)
    after, _ = stepped(size, optimizer)
    assert_same_tensors(after, before)
    assert max(sizes) <= max(64, size)


def test_states_of_foreign_optimizers_are_accounted() -> None:
    model = TinyLM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = hpczero.Engine(model, settings(3), optimizer=optimizer)
    engine.backward(engine(tokens(RANK)))
    engine.step()
    padded = sum(shape.padded for shape in engine.bucket_shapes())
    assert engine.memory()["states"] == 4 * padded // SIZE


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_what_is_not_elementwise_is_refused(name: str) -> None:
    kind = getattr(torch.optim, name, None)
    if kind is None:
        pytest.skip(f"this torch has no {name}")
    model = nn.Linear(4, 6, bias=False)
    with pytest.raises(ValueError, match=rf"{name}.*only elementwise updates"):
        hpczero.Engine(model, settings(1), optimizer=kind(model.parameters()))


def test_a_used_optimizer_is_refused() -> None:
    model = nn.Linear(4, 6)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="without state, found state of 2 parameters"):
        hpczero.Engine(model, settings(1), optimizer=optimizer)


def test_missing_and_foreign_parameters_are_named() -> None:
    model = nn.Linear(4, 6)
    with pytest.raises(ValueError, match=r"miss 1 of 2 trainable parameters, first 'bias'"):
        hpczero.Engine(model, settings(1), optimizer=torch.optim.SGD([model.weight], lr=1))
    stranger = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), stranger], lr=1)
    with pytest.raises(ValueError, match=r"1 parameters that the model hasn't.*\(3,\)"):
        hpczero.Engine(model, settings(1), optimizer=optimizer)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, hpczero.Lamb])
def test_state_dicts_of_the_optimizer(kind: Any, stage: int) -> None:
    """A rank's own, as in a plain loop."""

    def step(engine: hpczero.Engine) -> float:
        loss = engine(tokens(engine.global_steps * SIZE + RANK))
        engine.backward(loss)
        engine.step()
        return loss.item()

    def made() -> hpczero.Engine:
        torch.manual_seed(0)
        model = TinyLM()
        return hpczero.Engine(model, settings(stage), optimizer=kind(model.parameters(), lr=1e-2))

    def moments(engine: hpczero.Engine) -> list[torch.Tensor]:
        states = engine.full_optimizer_state()
        return [state["exp_avg"] for state in states.values() if "exp_avg" in state]

    engine, other = made(), made()
    fresh = deepcopy(other.optimizer.state_dict())
    for one in (engine, other):
        step(one), step(one)
    trained = deepcopy(engine.optimizer.state_dict())
    other.optimizer.load_state_dict(fresh)
    assert all(not moment.any() for moment in moments(other))
    other.optimizer.load_state_dict(trained)
    assert all(map(torch.equal, moments(engine), moments(other)))
    assert [step(other), step(other)] == [step(engine), step(engine)]


def test_states_in_files_are_in_no_state_dict(tmp_path: Path) -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    engine = hpczero.Engine(TinyLM(), {"zero_optimization": zero, "optimizer": {"type": "Adam"}})
    with pytest.raises(RuntimeError, match=r"in files .* engine.full_optimizer_state\(\)"):
        engine.optimizer.state_dict()
    with pytest.raises(RuntimeError, match=r"load_checkpoint\(\)"):
        engine.optimizer.load_state_dict({"state": {}, "param_groups": []})
