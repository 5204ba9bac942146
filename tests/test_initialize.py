"""DeepSpeed's names: a script of its shape runs with one changed import."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import TinyLM, tokens
from mpi4py import MPI
from torch import nn
from torch.utils.data import TensorDataset

import hpczero
import hpczero as deepspeed

pytestmark = pytest.mark.mpi

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.fc = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(F.relu(self.conv(x)).mean((2, 3)))


def pictures(count: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 3, 6, 6, generator=generator), torch.arange(count) % 4)


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 4 * SIZE,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 2000,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.999], "eps": 1e-8}},
        "zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_bucket_size": 5e7},
        "gradient_clipping": 1.0,
        **more,
    }


def script(stage: int, path: Path) -> tuple[list[float], Any]:
    """A training script as DeepSpeed's examples are written."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)  # scripts add it, deepspeed doesn't
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    deepspeed.init_distributed()
    torch.manual_seed(0)
    net = Classifier()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    engine, optimizer, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=pictures()
    )
    assert loader is not None
    losses = []
    for _ in range(2):
        for inputs, labels in loader:
            loss = F.cross_entropy(engine(inputs.to(engine.device)), labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    assert optimizer is engine.optimizer
    return losses, engine


def test_a_deepspeed_script(tmp_path: Path) -> None:
    runs = []
    for stage in (0, 1, 2, 3):
        path = tmp_path / f"ds{stage}.json"
        path.write_text(json.dumps(settings(stage)))
        runs.append(script(stage, path))
    assert runs[0][0] == runs[1][0]
    assert runs[2][0] == runs[3][0]
    engine = runs[3][1]
    assert engine.train_micro_batch_size_per_gpu() == 2
    assert engine.gradient_accumulation_steps() == 2
    assert engine.train_batch_size() == 4 * SIZE
    assert engine.global_steps == engine.micro_steps // 2
    assert engine.get_lr() == [0.01]
    assert engine.get_global_grad_norm() == engine.grad_norm > 0
    assert (engine.global_rank, engine.local_rank) == (RANK, engine.world.local_rank)


def test_the_loader_gives_each_sample_once_per_epoch_in_another_order() -> None:
    data = TensorDataset(torch.arange(8 * SIZE))
    model = nn.Linear(1, 1)
    config = {"train_micro_batch_size_per_gpu": 2}
    _, _, loader, _ = hpczero.initialize(model=model, training_data=data, config=config)
    assert loader is not None
    epochs = [[int(x) for (batch,) in loader for x in batch] for _ in range(2)]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        everyone = [x for part in MPI.COMM_WORLD.allgather(epoch) for x in part]
        assert sorted(everyone) == list(range(8 * SIZE))


def test_boundary_and_modes() -> None:
    engine = hpczero.Engine(TinyLM(), {"gradient_accumulation_steps": 2})
    seen = []
    for number in range(4):
        seen.append(engine.is_gradient_accumulation_boundary())
        engine.backward(engine(tokens(number)))
        engine.step()
    assert seen == [False, True, False, True]
    assert engine.global_steps == 2
    assert not engine.eval().module.training
    assert engine.train().module.training


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync_accumulates_on_this_rank(stage: int) -> None:
    def norm(apart: bool) -> tuple[float, float]:
        torch.manual_seed(0)
        engine = hpczero.Engine(TinyLM(), {"zero_optimization": {"stage": stage}})
        with engine.no_sync() if apart else pytest.MonkeyPatch.context():
            for number in range(3):
                engine.backward(engine(tokens(10 * number + RANK)))
        engine.backward(engine(tokens(99 + RANK)))
        engine.step()
        return engine.grad_norm, engine.traffic()["by_purpose"]["gradients"]["multiples"]

    together, apart = norm(False), norm(True)
    assert apart[0] == pytest.approx(together[0], rel=1e-5)
    assert apart[1] == together[1] / 4


@pytest.mark.parametrize("stage", [2, 3])
def test_no_sync_is_refused_where_gradients_are_sharded(stage: int) -> None:
    engine = hpczero.Engine(TinyLM(), {"zero_optimization": {"stage": stage}})
    with pytest.raises(RuntimeError, match="stages 2 and 3"), engine.no_sync():
        pass


def test_full_grads_and_optimizer_state() -> None:
    reference = TinyLM()
    for stage in (0, 1, 2, 3):
        torch.manual_seed(0)
        engine = hpczero.Engine(TinyLM(), {"zero_optimization": {"stage": stage}})
        with pytest.raises(RuntimeError, match="without an engine"):
            engine.full_grads()
        engine.backward(engine(tokens(RANK)))
        grads = engine.full_grads()
        engine.step()
        state = engine.full_optimizer_state()
        if RANK != 0:
            assert grads == state == {}
            continue
        torch.manual_seed(0)
        reference = TinyLM()
        optimizer = torch.optim.AdamW(reference.parameters())
        for rank in range(SIZE):
            (reference(tokens(rank)) / SIZE).backward()
        optimizer.step()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-3, atol=1e-6)
            for key in ("exp_avg", "exp_avg_sq"):
                expected = optimizer.state[parameter][key]
                torch.testing.assert_close(state[name][key], expected, rtol=1e-3, atol=1e-6)
            assert state[name]["step"] == 1


def test_a_scheduler_acts_and_skipped_steps_leave_it_alone() -> None:
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    config = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    engine, same, _, scheduler = hpczero.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3),
        config=config,
    )
    assert same is optimizer
    rates = []
    for step in range(4):
        rates.append(engine.lr)
        infinite = float("inf") if step == 1 and RANK == SIZE - 1 else 1.0
        engine.backward(engine(tokens(step)) * infinite)
        engine.step()
    assert rates == pytest.approx([0.05, 0.2, 0.2, 0.35])
    assert engine.skipped_steps == 1
    assert scheduler.last_epoch == 3


def test_the_configs_scheduler() -> None:
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": 0, "warmup_max_lr": 0.1, "warmup_num_steps": 4,
                "warmup_type": "linear",
            },
        },
    }  # fmt: skip
    engine, _, _, scheduler = hpczero.initialize(model=TinyLM(), config=config)
    rates = []
    for step in range(6):
        engine.backward(engine(tokens(step)))
        engine.step()
        rates.append(engine.lr)
    assert scheduler is engine.lr_scheduler
    assert rates[-1] == pytest.approx(0.1)
    assert rates == sorted(rates)


def test_what_initialize_refuses() -> None:
    with pytest.raises(TypeError, match="expected a model"):
        hpczero.initialize(config={})
    with pytest.raises(hpczero.ConfigError, match="found 0"):
        hpczero.initialize(model=TinyLM())
    with pytest.raises(hpczero.ConfigError, match="found 2"):
        hpczero.initialize(model=TinyLM(), config={}, config_params={})
    with pytest.raises(NotImplementedError, match="tensor parallelism"):
        hpczero.initialize(model=TinyLM(), config={}, mpu=object())
    with pytest.raises(hpczero.ConfigError, match="did you mean 'AdamW'"):
        hpczero.initialize(model=TinyLM(), config={"optimizer": {"type": "AdanW"}})


@pytest.mark.parametrize("kind", ["Adam", "Lamb", "SGD"])
def test_an_idle_max_grad_norm_and_bias_correction(kind: str) -> None:
    params = {"lr": 0.01, "max_grad_norm": 0.0, "bias_correction": True}
    hpczero.initialize(model=TinyLM(), config={"optimizer": {"type": kind, "params": params}})
    settings = {"optimizer": {"type": kind, "params": {"bias_correction": False}}}
    if kind == "Lamb":
        hpczero.initialize(model=TinyLM(), config=settings)
    else:
        with pytest.raises(
            hpczero.ConfigError, match=r"optimizer.params.bias_correction: only LAMB's"
        ):
            hpczero.initialize(model=TinyLM(), config=settings)
