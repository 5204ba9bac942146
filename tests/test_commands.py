"""The commands on checkpoints: what they show, what they write, and how they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from forged import build, deepspeed_names  # noqa: F401 - a fixture
from launch import mpiexec
from models import TinyLM, lm_loss
from mpi4py import MPI
from torch import nn

import hpczero
from hpczero import cli, commands

WORLD = MPI.COMM_WORLD
CONFIG = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}


def save(model: nn.Module, loss: Callable[[Any, int], torch.Tensor], folder: Path) -> Any:
    """Train for two steps, save after each, and return the engine."""
    engine = hpczero.Engine(model, CONFIG)
    for step in range(2):
        engine.backward(loss(engine, step))
        engine.step()
        engine.save_checkpoint(folder)
    return engine


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a folder of two checkpoints, and the weights of the newest."""
    torch.manual_seed(0)
    model = TinyLM()
    model.register_buffer("count", torch.arange(3))
    model.blocks[2].requires_grad_(False)
    folder = tmp_path / "checkpoints"
    return folder, save(model, lm_loss, folder).full_state_dict()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Return a function that gives a command's exit code, and what it prints."""
    monkeypatch.setattr(cli.watch, "release", lambda: None)

    def command(*argv: str | Path) -> tuple[int, str, str]:
        code = 0
        try:
            cli.main([*map(str, argv)])
        except SystemExit as error:
            code = int(error.code or 0)
        return code, *capsys.readouterr()

    return command


def fails(result: tuple[int, str, str], text: str, code: int = 1) -> None:
    """Check for one line that says it."""
    assert result[0] == code
    assert text in result[2]
    if code == 1:
        assert result[2].startswith("hpczero: ")
        assert result[2].count("\n") == 1
    assert result[1] == ""


# inspect #


def test_inspect_shows_the_newest(saved: Any, run: Any) -> None:
    folder, weights = saved
    code, out, _ = run("inspect", folder, "--verify")
    assert code == 0
    assert str(folder / "global_step2") in out
    assert "newest of 2: global_step1, global_step2" in out
    count = sum(t.numel() for name, t in weights.items() if name not in ("head.weight", "count"))
    assert f"step 2, 1 rank, stage 3, bf16, AdamW, {count:,} parameters" in out
    rows = [[*map(str.strip, line.split("│")[1:-1])] for line in out.splitlines()]
    kinds = "weights, exp_avg, exp_avg_sq"
    assert ["blocks.0.up.weight", "37x12", "float32", kinds, "0", f"{444 * 12:,}"] in rows
    assert ["blocks.2.up.weight", "37x12", "bfloat16", "weights", "0", "888"] in rows
    assert ["count", "3", "int64", "buffers", "0", "24"] in rows
    assert "head.weight is embed.weight" in out
    assert "rank_00000.h5" in out
    assert out.endswith("verified: every byte of 3 files is as it was saved\n")


def test_inspect_gives_json(saved: Any, run: Any) -> None:
    folder, weights = saved
    code, out, _ = run("inspect", folder / "global_step1", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["step"], found["world"], found["stage"], found["tags"]) == (1, 1, 3, [])
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert {*tensors, *found["tied"]} == {*weights}
    for name, tensor in tensors.items():
        assert tensor["shape"] == list(weights[name].shape)
    assert sum(found["files"].values()) == found["bytes"]
    sizes = {path.name: path.stat().st_size for path in (folder / "global_step1").iterdir()}
    assert found["files"] == sizes


def test_inspect_names_the_first_damage(saved: Any, run: Any, tmp_path: Path) -> None:
    folder, _ = saved
    path = folder / "global_step2" / "rank_00000.h5"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert run("inspect", folder)[0] == 0  # reads no tensors
    for flags in (["--verify"], ["--verify", "--json"]):
        fails(run("inspect", folder, *flags), f"{path}: dataset ")
    path.write_bytes(content[:-1])
    fails(run("inspect", folder), f"{path}: expected {len(content)} bytes, found ")
    path.unlink()
    fails(run("inspect", folder), f"{path}: No such file")
    (folder / "global_step2" / "manifest.json").write_text("{}")
    fails(run("inspect", folder), "manifest.json: expected a checkpoint's manifest")


def test_inspect_refuses_what_is_foreign(run: Any, tmp_path: Path) -> None:
    fails(run("inspect", tmp_path / "none"), "none: expected a checkpoint of hpczero")
    fails(run("inspect", tmp_path), "found neither")
    (tmp_path / "latest").write_text("global_step5")
    (tmp_path / "global_step5").mkdir()
    fails(run("inspect", tmp_path), "expected checkpoint 'global_step5'")


@pytest.mark.slow
def test_inspect_says_which_ranks_hold_a_tensor(tmp_path: Path, run: Any) -> None:
    flags = "--layers 2 --hidden 64 --heads 2 --seq 16 --batch 2 --steps 1 --save-every 1"
    train = ["train", *flags.split(), "--out", str(tmp_path), "--no-progress"]
    job = mpiexec(3, "-m", "hpczero", *train)
    assert job.returncode == 0, job.stdout
    found = json.loads(run("inspect", tmp_path / "checkpoints", "--json", "--verify")[1])
    ranks = {tensor["name"]: tensor["ranks"] for tensor in found["tensors"]}
    assert found["world"] == 3
    assert ranks["embed.weight"] == [0, 1, 2]
    assert {rank for each in ranks.values() for rank in each} == {0, 1, 2}


def test_several_ranks_are_a_usage_error(tmp_path: Path) -> None:
    job = mpiexec(2, "-m", "hpczero", "consolidate", str(tmp_path), str(tmp_path / "out"))
    assert job.returncode == 2
    assert job.stdout.count("consolidate is for one process: run it without mpiexec") == 1
    assert not (tmp_path / "out").exists()


# consolidate #


def test_consolidate_writes_every_format(saved: Any, run: Any, tmp_path: Path) -> None:
    folder, weights = saved
    code, out, _ = run("consolidate", folder, tmp_path / "m.pt", "--format", "torch")
    assert (code, out.startswith("wrote ")) == (0, True)
    state = torch.load(tmp_path / "m.pt", weights_only=True)
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name].to(t.dtype), t) for name, t in weights.items())
    assert run("consolidate", folder, tmp_path / "m.h5", "--format", "hdf5")[0] == 0
    with h5py.File(tmp_path / "m.h5") as file:
        assert np.array_equal(file["norm.weight"][()], weights["norm.weight"].numpy())
    flags = ["--dtype", "fp16", "--max-shard-size", "2KB"]
    assert run("consolidate", folder / "global_step2", tmp_path / "m", *flags)[0] == 0
    assert len([*(tmp_path / "m").glob("model-*.safetensors")]) > 2
    engine = hpczero.Engine(TinyLM(), {})
    engine.load_safetensors(tmp_path / "m", strict=False)
    half = engine.full_state_dict()["norm.weight"]
    assert torch.equal(half, weights["norm.weight"].half().float())


def test_consolidate_refuses(saved: Any, run: Any, tmp_path: Path) -> None:
    folder, _ = saved
    index = folder / "global_step2" / "index.h5"
    before = index.read_bytes()
    fails(run("consolidate", folder, index, "--format", "hdf5"), "outside the checkpoint")
    assert index.read_bytes() == before
    fails(run("consolidate", folder, tmp_path, "--format", "torch"), "found the folder")
    fails(run("consolidate", tmp_path / "none", tmp_path / "x"), "expected a checkpoint")
    flags = ["--format", "torch", "--max-shard-size", "1GB"]
    fails(run("consolidate", folder, tmp_path / "x", *flags), "max_shard_bytes")
    flags = ["--max-shard-size", "many"]
    fails(run("consolidate", folder, tmp_path / "x", *flags), "a size such as 5GB", code=2)
    (folder / "global_step2" / "rank_00000.h5").unlink()
    fails(run("consolidate", folder, tmp_path / "x"), "No such file")
    assert not [*tmp_path.glob("x*")]


@pytest.mark.parametrize(
    ("text", "count"),
    [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("2KiB", 2048), ("7", 7), ("1t", 10**12)],
)
def test_sizes(text: str, count: int) -> None:
    assert cli._bytes(text) == count


def tiny_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=37,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
        )
    )


def tiny_gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 37}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    )


def causal_loss(model: Any, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number + 10 * WORLD.rank)
    words = torch.randint(0, 37, (2, 9), generator=generator)
    loss: torch.Tensor = model(input_ids=words, labels=words).loss
    return loss


@pytest.mark.mpi
@pytest.mark.parametrize("make", [pytest.param(tiny_gpt2, marks=pytest.mark.slow), tiny_llama])
def test_transformers_and_back(
    make: Callable[[], Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = Path(WORLD.bcast(str(tmp_path_factory.mktemp("saved")) if WORLD.rank == 0 else None))
    torch.manual_seed(0)
    model = make()
    kind, config = type(model), model.config
    engine = save(model, causal_loss, folder / "ours")
    weights = engine.full_state_dict()
    if WORLD.rank == 0:
        commands.consolidate(folder / "ours", folder / "out", "safetensors", None, 9000)
        config.save_pretrained(folder / "out")
        theirs = kind.from_pretrained(folder / "out", dtype=torch.float32)
        state = theirs.state_dict()
        assert state.keys() == weights.keys()
        assert all(torch.equal(state[name], weights[name]) for name in weights)
        theirs.save_pretrained(folder / "back", max_shard_size="9KB")
    WORLD.Barrier()
    again = hpczero.Engine(make(), CONFIG)
    again.load_safetensors(folder / "back")
    back = again.full_state_dict()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


# import-deepspeed #


@pytest.mark.usefixtures("deepspeed_names")
def test_import_deepspeed(run: Any, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    kinds = build(theirs, 2)
    before = {path: path.stat() for path in theirs.rglob("*")}
    code, out, _ = run("import-deepspeed", theirs, ours)
    assert code == 0
    assert out == f"wrote {theirs / 'global_step40'} to {ours / 'global_step40'}\n"
    found = json.loads(run("inspect", ours, "--json", "--verify")[1])
    assert (found["step"], found["precision"], found["optimizer"]) == (40, "fp16", "AdamW")
    assert {tensor["name"] for tensor in found["tensors"]} == {*kinds["weights"]}
    # Once more, under the other way to name it.
    assert run("import-deepspeed", theirs, ours, "--tag", "global_step40")[0] == 0
    fails(run("import-deepspeed", theirs, theirs), "expected another folder")
    fails(run("import-deepspeed", theirs, ours, "--tag", "none"), "expected the folder of a check")
    fails(run("import-deepspeed", ours, tmp_path / "more"), "found none: is this the folder of a Z")
    (tmp_path / "taken" / "global_step40").mkdir(parents=True)
    fails(run("import-deepspeed", theirs, tmp_path / "taken"), "to replace, or nothing")
    assert {path: path.stat() for path in theirs.rglob("*")}.keys() == before.keys()


@pytest.mark.usefixtures("deepspeed_names")
def test_import_refuses_a_flipped_bit(run: Any, tmp_path: Path) -> None:
    build(tmp_path / "theirs", 1)
    path = next(tmp_path.glob("theirs/*/*optim_states.pt"))
    content = path.read_bytes()
    place = content.index(torch.tensor(38.0).numpy().tobytes())
    path.write_bytes(content[:place] + b"\1" + content[place + 1 :])
    fails(run("import-deepspeed", tmp_path / "theirs", tmp_path / "ours"), "checksum")
    assert not (tmp_path / "ours").exists()
