"""A model on the meta device becomes, bucket by bucket, what its initial values say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import TinyLM, tokens
from mpi4py import MPI
from torch import Tensor, nn

import hpczero
from hpczero.gpt import GPT, GPTConfig

pytestmark = pytest.mark.mpi

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
SHAPE = GPTConfig(layers=3, hidden=24, heads=2, seq=16, vocabulary=40)


def config(stage: int, dtype: str, **zero: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **zero}, dtype: {"enabled": True}}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_seed_gives_the_same_weights_on_meta(stage: int, dtype: str) -> None:
    whole = hpczero.Engine(GPT(SHAPE, 7), config(stage, dtype)).full_state_dict()
    with torch.device("meta"):
        model = GPT(SHAPE)
    engine = hpczero.Engine(model, config(stage, dtype), initialise=model.initialiser(7))
    found = engine.full_state_dict()
    assert whole.keys() == found.keys()
    for name, values in whole.items():
        assert torch.equal(values, found[name]), name
    assert model.head.weight is model.embed.weight
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_it_trains_with_an_optimizer_of_its_own(tmp_path: Path) -> None:
    """The parameters stay the objects that the optimizer has; some are frozen, some real."""
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = TinyLM()
        model.blocks[0].norm = nn.LayerNorm(model.blocks[0].norm.normalized_shape)
        model.blocks[1].requires_grad_(False)

        def fill(name: str, values: Tensor) -> None:
            generator = torch.Generator().manual_seed(len(name))
            with torch.no_grad():
                values.normal_(0, 0.1, generator=generator)

        for name, parameter in model.named_parameters():
            if device == "cpu" and not name.startswith("blocks.0.norm"):
                fill(name, parameter)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        engine = hpczero.Engine(
            model, {"zero_optimization": {"stage": 3}}, optimizer=optimizer, initialise=fill
        )
        for step in range(3):
            engine.backward(engine(tokens(step * SIZE + RANK)))
            engine.step()
        found.append(engine.full_state_dict())
    for name, values in found[0].items():
        assert torch.equal(values, found[1][name]), name


def test_each_value_is_made_as_float32_and_once(tmp_path: Path) -> None:
    seen: list[tuple[str, torch.dtype, tuple[int, ...]]] = []

    def fill(name: str, values: Tensor) -> None:
        seen.append((name, values.dtype, tuple(values.shape)))
        values.zero_()

    with torch.device("meta"):
        model = GPT(SHAPE)
    hpczero.Engine(model, config(3, "bf16"), initialise=fill)
    expected = [(n, torch.float32, tuple(p.shape)) for n, p in GPT(SHAPE).named_parameters()]
    if seen:  # where the ranks of a node share a bucket, one of them makes it
        assert sorted(seen) == sorted(expected)
    everyone = MPI.COMM_WORLD.allgather(len(seen))
    assert max(everyone) == len(expected)


def test_what_is_missing_is_said() -> None:
    with torch.device("meta"):
        model = TinyLM()
    with pytest.raises(ValueError, match=r"'embed.weight' is on the meta device.*initialise"):
        hpczero.Engine(model, {})
    with torch.device("meta"):
        norm = nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match="buffer 'running_mean' is on the meta device"):
        hpczero.Engine(norm, {}, initialise=lambda name, values: None)
