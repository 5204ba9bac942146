"""Weights from safetensors go straight into the shards, or one error on all ranks says why not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from models import TinyLM, lm_loss
from mpi4py import MPI
from sources import Memory
from torch import Tensor, nn

import hpczero
from hpczero.checkpoints import safetensors
from hpczero.checkpoints.safetensors import SafetensorsFolder
from hpczero.errors import CheckpointError

pytestmark = pytest.mark.mpi

WORLD = MPI.COMM_WORLD
SIZE, RANK = WORLD.size, WORLD.rank


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all ranks see."""
    mine = str(tmp_path_factory.mktemp("weights")) if RANK == 0 else None
    return Path(WORLD.bcast(mine))


class Model(TinyLM):
    """A tied model with a frozen block and a buffer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.register_buffer("count", torch.full((3,), seed))


def engine_of(stage: int, dtype: str = "fp32", model: nn.Module | None = None) -> hpczero.Engine:
    keys: dict[str, Any] = {"zero_optimization": {"stage": stage}, "bf16": {}}
    keys["zero_optimization"]["stage3_param_persistence_threshold"] = 100  # the norms stay gathered
    keys["bf16"]["enabled"] = dtype == "bf16"
    return hpczero.Engine(Model(1) if model is None else model, keys)


def train(engine: hpczero.Engine, steps: int = 2) -> list[float]:
    losses = []
    for step in range(steps):
        loss = lm_loss(engine, step * SIZE + RANK)
        engine.backward(loss)
        engine.step()
        losses.append(engine.world.mean(loss.item()))
    return losses


def write(path: Path, tensors: dict[str, Tensor], **keys: Any) -> None:
    """Write a file or a folder on rank 0."""
    if RANK == 0:
        writer = safetensors.write_file if path.suffix else safetensors.write_folder
        writer(Memory({name: tensor.detach() for name, tensor in tensors.items()}), path, **keys)
    WORLD.Barrier()


def untied(name: str = "head.weight") -> dict[str, Tensor]:
    """Return a model's state without one of the two names of its embedding."""
    return {key: value for key, value in Model(2).state_dict().items() if key != name}


def assert_loaded(engine: hpczero.Engine, expected: dict[str, Tensor]) -> None:
    found = engine.full_state_dict()
    if RANK == 0:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value.to(found[name].dtype)), name


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_come_into_the_shards(stage: int, dtype: str, folder: Path) -> None:
    write(folder / "several", untied(), max_shard_bytes=4000)
    engine = engine_of(stage, dtype)
    train(engine)  # what stays gathered is gathered now
    engine.load_safetensors(folder / "several")
    expected = Model(2)
    if dtype == "bf16":
        expected.blocks[1].bfloat16()  # frozen: no master copy
    assert_loaded(engine, expected.state_dict())
    assert torch.equal(engine.module.count, torch.full((3,), 2))
    fresh = engine_of(stage, dtype, Model(2))
    with torch.no_grad():
        losses = [engine.world.mean(lm_loss(e, 9 + RANK).item()) for e in (engine, fresh)]
    assert losses[0] == losses[1]  # the compute copies follow on all ranks


def test_the_optimizer_stays_as_it_is(folder: Path) -> None:
    write(folder / "model.safetensors", untied("embed.weight"))
    engine = engine_of(3)
    train(engine)
    before = engine.full_optimizer_state()
    engine.load_safetensors(folder)
    assert engine.global_steps == 2
    after = engine.full_optimizer_state()
    for name, state in before.items():
        assert all(torch.equal(value, after[name][kind]) for kind, value in state.items())
    train(engine, 1)


def test_a_rank_reads_its_own_runs_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder / "x.safetensors", untied())
    engine = engine_of(3)
    elements = []
    read = SafetensorsFolder.read

    def counting(self: Any, kind: str, name: str, start: int, stop: int) -> Tensor:
        elements.append(stop - start)
        return read(self, kind, name, start, stop)

    monkeypatch.setattr(SafetensorsFolder, "read", counting)
    engine.load_safetensors(folder / "x.safetensors")
    assert WORLD.allreduce(sum(elements)) == engine.parameters_count + 3 * SIZE


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_numbers_take_the_dtype_here(dtype: torch.dtype, folder: Path) -> None:
    floats = {name: value.half() for name, value in untied().items() if name != "count"}
    count = {"count": Model(2).count}
    write(folder, {**{name: value.to(dtype) for name, value in floats.items()}, **count})
    engine = engine_of(3)
    engine.load_safetensors(folder)
    assert_loaded(engine, {**floats, **count, "head.weight": floats["embed.weight"]})


def test_both_names_of_a_tied_weight_must_agree(folder: Path) -> None:
    both = {**untied(), "head.weight": Model(2).embed.weight}
    write(folder / "good.safetensors", both)
    engine = engine_of(1)
    engine.load_safetensors(folder / "good.safetensors")
    assert_loaded(engine, Model(2).state_dict())
    write(folder / "bad.safetensors", {**both, "head.weight": both["head.weight"] + 1})
    with pytest.raises(CheckpointError, match=r"'head.weight' is tied to 'embed.weight' here, but"):
        engine.load_safetensors(folder / "bad.safetensors")


def test_all_that_does_not_match_is_one_error_on_all_ranks(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {name: value for name, value in untied().items() if name != "norm.bias"}
    tensors |= {"norm.weight": torch.zeros(5), "more": torch.zeros(2, 3), "count": torch.ones(3)}
    tensors["blocks.0.up.bias"] = torch.ones(37, dtype=torch.int64)
    write(folder, tensors)
    engine = engine_of(3)
    before = engine.full_state_dict()
    with pytest.raises(CheckpointError) as caught:
        engine.load_safetensors(folder)
    for line in (
        "5 entries don't match the model",
        "missing: parameter 'norm.bias' (12,)",
        "other shape: parameter 'norm.weight' is (12,) here, (5,) there",
        "other type: parameter 'blocks.0.up.bias' is of torch.float32 here, of torch.int64 there",
        "other type: buffer 'count' is of torch.int64 here, of torch.float32 there",
        "unexpected: 'more' (2, 3)",
        "strict=False",
    ):
        assert line in str(caught.value)
    assert len({*WORLD.allgather(str(caught.value))}) == 1
    assert_loaded(engine, before)
    with caplog.at_level(logging.WARNING, "hpczero"):
        engine.load_safetensors(folder, strict=False)
    assert caplog.text.count("not loaded: ") == (5 if RANK == 0 else 0)
    found = engine.full_state_dict()
    if RANK == 0:
        assert torch.equal(found["embed.weight"], tensors["embed.weight"])
        assert torch.equal(found["norm.weight"], before["norm.weight"])


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_file_is_one_error_on_all_ranks(damage: str, folder: Path) -> None:
    path = folder / "model.safetensors"
    if damage == "truncated":
        write(path, untied())
        if RANK == 0:
            path.write_bytes(path.read_bytes()[:-1])
        WORLD.Barrier()
    engine = engine_of(3)
    message = {"missing": "model.safetensors", "truncated": "the file is truncated"}[damage]
    with pytest.raises(CheckpointError, match=f"the weights can't be loaded: rank 0.*{message}"):
        engine.load_safetensors(folder)
    train(engine, 1)
