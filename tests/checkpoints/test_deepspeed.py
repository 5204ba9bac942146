"""DeepSpeed's checkpoints: real ones (slow), and ones of the same structure built here."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forged import (
    STATES,
    DynamicLossScaler,
    ZeroStageEnum,
    build,
    deepspeed_names,  # noqa: F401 - a fixture
    example,
)
from launch import deepspeed, needs_deepspeed
from sources import same
from torch import Tensor

from hpczero.checkpoints.consolidate import consolidate
from hpczero.checkpoints.deepspeed import DeepSpeedFolder
from hpczero.checkpoints.source import numel


def whole(folder: DeepSpeedFolder, kind: str, name: str) -> Tensor:
    flat = folder.read(kind, name, 0, numel(folder, kind, name))
    return flat.view(folder.shape(kind, name))


# ---- as DeepSpeed writes them

BF16 = {"bf16": {"enabled": True}}
CASES: dict[str, dict[str, Any]] = {
    f"stage {stage} {kind}": {"zero_optimization": {"stage": stage}, **extra}
    for stage in (1, 2, 3)
    for kind, extra in (("fp32", {}), ("bf16", BF16))
} | {
    "alignment": {"zero_optimization": {"stage": 2, "parameter_alignment": True}, **BF16},
    "elastic": {"zero_optimization": {"stage": 2, "elastic_checkpoint": True}, **BF16},
    "round robin": {"zero_optimization": {"stage": 1, "round_robin_gradients": True}},
    "sub-groups": {"zero_optimization": {"stage": 3, "sub_group_size": 40}},
    "BF16_Optimizer": {
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
        **BF16,
    },
}


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder in which DeepSpeed has written all cases."""
    folder = tmp_path_factory.mktemp("deepspeed")
    script = Path(__file__).with_name("write_deepspeed.py")
    deepspeed(request.param, script, str(folder), json.dumps(CASES), log=folder / "log")
    return folder


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_reads_what_deepspeed_writes(written: Path, case: str) -> None:
    folder = DeepSpeedFolder(written / case)
    folder.verify()
    # 0.19.8 gives wrong full tensors under round robin, whose training is that of plain stage 1
    # but for Adam's rounding, which depends on where the run is cut.
    oracle, equal = (case, same) if case != "round robin" else ("stage 1 fp32", torch.allclose)
    expected = torch.load(written / oracle / "expected.pt")
    assert folder.kinds() == ["weights", *STATES]
    for kind in folder.kinds():
        assert set(expected[kind]) == set(folder.names(kind)) - {*folder.buffers, *folder.frozen}
        for name, tensor in expected[kind].items():
            assert equal(whole(folder, kind, name), tensor), (kind, name)
    assert expected["exp_avg"]["one"].abs().sum() > 0  # it did train
    consolidated = torch.load(written / case / "expected.pt").get("consolidated", {})
    for name, tensor in consolidated.items():
        found = whole(folder, "weights", folder.tied().get(name, name)).float()
        assert same(found, tensor.float()), name
    assert folder.tied() == {"head.weight": "emb.weight"}
    assert folder.buffers == ["count", "scale"]
    assert same(whole(folder, "weights", "count"), torch.tensor(5))
    assert folder.frozen == ["frozen.weight", "frozen.bias"]
    assert folder.names("exp_avg")[:3] == ["one", "emb.weight", "norm.weight"]
    counters = folder.counters
    assert counters.stage == CASES[case]["zero_optimization"]["stage"]
    assert (counters.global_steps, counters.skipped_steps, counters.optimizer_steps) == (3, 0, 3)
    assert counters.lr_scheduler == {"last_batch_iteration": 2}
    client = counters.client_state
    assert (client["epoch"], client["best"], client["seen"]) == (7, 0.25, {1, 2})
    assert np.array_equal(client["rng"][1], np.random.RandomState(3).get_state()[1])
    if case != "elastic":
        assert [group["lr"] for group in counters.param_groups] == expected["lrs"]
        assert [group["weight_decay"] for group in counters.param_groups] == [0.1, 0]
        names = [sorted(group["params"]) for group in counters.param_groups]
        assert names[0] == ["down.weight", "emb.weight", "up.weight"]
        assert names[1] == ["down.bias", "norm.bias", "norm.weight", "one", "up.bias"]


# ---- as they are built here: fp16, which DeepSpeed refuses on CPUs, and damaged ones


class Evil:
    """Write a file when it's unpickled."""

    def __init__(self, function: Callable[[str], object], argument: str) -> None:
        self.call = function, (argument,)

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return self.call


def change(folder: Path, pattern: str, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Edit the content of the file that fits a pattern."""
    (path,) = folder.glob(f"*/{pattern}")
    content = torch.load(path, weights_only=False)
    edit(content)
    torch.save(content, path)
    return path


@pytest.mark.usefixtures("deepspeed_names")
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_reads_fp16_checkpoints(tmp_path: Path, stage: int, ranks: int) -> None:
    kinds = build(tmp_path, stage, ranks)
    folder = DeepSpeedFolder(tmp_path)
    folder.verify()
    for kind, tensors in kinds.items():
        assert folder.names(kind) == list(tensors)
        for name, tensor in tensors.items():
            assert same(whole(folder, kind, name), tensor), (kind, name)
    assert folder.tied() == {"tie": "a"}
    assert (folder.frozen, folder.buffers) == (["e", "f"], ["buffer"])
    counters = folder.counters
    assert (counters.stage, counters.ranks, counters.global_steps) == (stage, ranks, 40)
    assert (counters.skipped_steps, counters.optimizer_steps) == (2, 38)
    assert counters.loss_scale == vars(DynamicLossScaler())
    assert counters.param_groups == [
        {"lr": 0.1, "params": ["a", "b"]},
        {"lr": 0.2, "params": ["c", "d"]},
    ]
    assert counters.client_state == {"mine": "client"}
    assert DeepSpeedFolder(tmp_path, "global_step40").counters == counters
    assert DeepSpeedFolder(tmp_path / "global_step40").counters == counters


@pytest.mark.usefixtures("deepspeed_names")
def test_becomes_a_state_dict(tmp_path: Path) -> None:
    kinds = build(tmp_path, 3)
    folder = DeepSpeedFolder(tmp_path)
    consolidate(folder, tmp_path / "x.pt", "torch")
    found = torch.load(tmp_path / "x.pt")
    assert list(found) == [*kinds["weights"], "tie"]
    assert all(same(found[name], tensor) for name, tensor in kinds["weights"].items())
    assert found["tie"].data_ptr() == found["a"].data_ptr()
    consolidate(folder, tmp_path / "m.pt", "torch", kind="exp_avg")
    moments = torch.load(tmp_path / "m.pt")
    assert all(same(moments[name], tensor) for name, tensor in kinds["exp_avg"].items())


@pytest.mark.usefixtures("deepspeed_names")
@pytest.mark.parametrize("stage", [2, 3])
def test_reads_any_run(tmp_path: Path, stage: int) -> None:
    flat = build(tmp_path, stage, 3)["exp_avg"]["a"].flatten()
    folder = DeepSpeedFolder(tmp_path)
    for start in range(16):
        for stop in range(start, 16):
            assert same(folder.read("exp_avg", "a", start, stop), flat[start:stop])
    for start, stop in [(-1, 2), (3, 2), (0, 16)]:
        with pytest.raises(ValueError, match=r"15 elements of 'a'"):
            folder.read("exp_avg", "a", start, stop)
    with pytest.raises(KeyError, match="exp_avg 'e'"):  # frozen
        folder.read("exp_avg", "e", 0, 1)
    with pytest.raises(KeyError, match="momentum"):
        folder.names("momentum")
    with pytest.raises(KeyError, match="'tie'"):
        folder.shape("weights", "tie")


@pytest.mark.usefixtures("deepspeed_names")
def test_reads_a_checkpoint_without_optimizer_states(tmp_path: Path) -> None:
    build(tmp_path, 2, 1)
    state = "optimizer_state_dict", "base_optimizer_state", "state"
    change(tmp_path, "*optim*", lambda content: content[state[0]][state[1]][state[2]].clear())
    folder = DeepSpeedFolder(tmp_path)
    assert folder.kinds() == ["weights"] and folder.counters.optimizer_steps is None


@pytest.mark.usefixtures("deepspeed_names")
@pytest.mark.parametrize("where", ["*rank_1*optim*", "mp_rank*"])
@pytest.mark.parametrize("function", [os.system, eval])
def test_refuses_code_and_runs_none(
    tmp_path: Path, where: str, function: Callable[[str], object]
) -> None:
    proof = tmp_path / "proof"
    code = f"touch {proof}" if function is os.system else f"open({str(proof)!r}, 'w').close()"
    build(tmp_path, 2)
    path = change(tmp_path, where, lambda content: content.update(x=Evil(function, code)))
    with pytest.raises(ValueError, match=r"found the class or function \S*(system|eval)") as caught:
        DeepSpeedFolder(tmp_path)
    assert str(path) in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert not proof.exists()
    torch.load(path, weights_only=False)
    assert proof.exists()  # it would have


class Mine:
    """A user's own class in client_state."""


class Attribute:
    """Be pickled as what Python 3.11.0 to 3.11.3 make of an enum's member."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, tuple[Any, str]]:
        return getattr, (ZeroStageEnum, self.name)


@pytest.mark.usefixtures("deepspeed_names")
def test_reads_stages_as_every_python_pickles_them(tmp_path: Path) -> None:
    build(tmp_path, 2)

    def set_stage(name: str) -> Callable[[dict[str, Any]], None]:
        stage = Attribute(name)
        return lambda content: content["optimizer_state_dict"].update(zero_stage=stage)

    change(tmp_path, "*rank_1*optim*", set_stage("gradients"))
    DeepSpeedFolder(tmp_path)
    change(tmp_path, "*rank_1*optim*", set_stage("__class__"))
    with pytest.raises(ValueError, match=r"found the attribute '__class__'"):
        DeepSpeedFolder(tmp_path)


@pytest.mark.usefixtures("deepspeed_names")
def test_refuses_classes_until_told(tmp_path: Path) -> None:
    build(tmp_path, 2)
    change(tmp_path, "mp_rank*", lambda content: content.update(mine=Mine()))
    with pytest.raises(ValueError, match=r"Mine.*add_safe_globals"):
        DeepSpeedFolder(tmp_path)
    with torch.serialization.safe_globals([Mine]):
        assert isinstance(DeepSpeedFolder(tmp_path).counters.client_state["mine"], Mine)


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04", pickle.dumps({"a": 1}), b"\x80\x02" * 500, b"cposix\nsystem\n(S'x'\ntR."],
)
@pytest.mark.usefixtures("deepspeed_names")
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_refuses_files_that_are_none(tmp_path: Path, content: bytes) -> None:
    build(tmp_path, 1)
    path = tmp_path / "global_step40" / "mp_rank_00_model_states.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"expected") as caught:
        DeepSpeedFolder(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.usefixtures("deepspeed_names")
def test_refuses_damage(tmp_path: Path) -> None:
    build(tmp_path, 3)
    (path,) = tmp_path.glob("*/*rank_1*optim*")
    whole_file = path.read_bytes()
    path.write_bytes(whole_file[: len(whole_file) // 2])
    with pytest.raises(ValueError, match="rank_1"):
        DeepSpeedFolder(tmp_path)
    first = example()["weights"]["a"].flatten()[8:10].numpy().tobytes()  # in rank 1's part
    assert whole_file.count(first) == 1
    path.write_bytes(whole_file.replace(first, first[::-1]))
    folder = DeepSpeedFolder(tmp_path)
    with pytest.raises(ValueError, match=r"checksum of .*data/\d+' in .*rank_1"):
        folder.verify()


def state_of(content: dict[str, Any]) -> dict[str, Any]:
    return content["optimizer_state_dict"]


def shorten(flats: list[Tensor]) -> None:
    flats[0] = flats[0][:-3].clone()


EDITS: dict[str, tuple[int, str, Callable[[dict[str, Any]], object], str]] = {
    "another world": (
        2,
        "*rank_1*optim*",
        lambda content: state_of(content).update(partition_count=[4, 4]),
        r"optim_states of \[2, 4\] ranks.*found 2 files",
    ),
    "another step": (
        2,
        "*rank_1*optim*",
        lambda content: state_of(content)["base_optimizer_state"]["state"][0].update(step=7),
        r"one step.*\[7, 38\]",
    ),
    "another engine step": (
        3,
        "*rank_1*model*",
        lambda content: content.update(global_steps=41),
        r"one global_steps.*\[40, 41\]",
    ),
    "another stage": (
        2,
        "*rank_1*optim*",
        lambda content: state_of(content).update(zero_stage=ZeroStageEnum(1)),
        r"one zero_stage",
    ),
    "short master weights": (
        2,
        "*pp_rank_0*optim*",
        lambda content: shorten(state_of(content)["single_partition_of_fp32_groups"]),
        r"expected 22 elements in flat group 0.*found 19",
    ),
    "short master weights, stage 3": (
        3,
        "*rank_1*optim*",
        lambda content: shorten(state_of(content)["fp32_flat_groups"]),
        r"expected 17 elements in the flat groups of rank 1.*found 14",
    ),
    "short moments": (
        3,
        "*pp_rank_0*optim*",
        lambda content: state_of(content)["optimizer_state_dict"]["state"][1].update(
            exp_avg=torch.ones(2)
        ),
        r"found",
    ),
    "moments cut otherwise": (
        2,
        "*pp_rank_0*optim*",
        lambda content: state_of(content)["base_optimizer_state"]["state"][0].update(
            exp_avg=torch.ones(13)
        ),
        r"found",
    ),
    "tensor parallel": (
        2,
        "mp_rank*",
        lambda content: content.update(mp_world_size=2),
        r"ZeRO alone.*convert it with DeepSpeed",
    ),
    "stage 0": (2, "mp_rank*", lambda content: content.update(param_shapes=None), r"stage 0"),
    "a negative shape": (
        2,
        "mp_rank*",
        lambda content: content["param_shapes"][0].update(a=(-3, -5)),
        r"'a', found",
    ),
    "a short frozen part": (
        3,
        "*rank_1*model*",
        lambda content: content["frozen_param_fragments"].update(e=torch.ones(2).half()),
        r"5 elements of the frozen 'e' \[3, 3\] from each of 2 ranks, found \[5, 2\]",
    ),
    "a missing key": (2, "mp_rank*", lambda content: content.pop("module"), r"KeyError: 'module'"),
    "no dict": (
        2,
        "*rank_1*optim*",
        lambda content: content.update(optimizer_state_dict=[1]),
        r"another structure",
    ),
}


@pytest.mark.usefixtures("deepspeed_names")
@pytest.mark.parametrize("edit", EDITS)
def test_refuses_files_that_dont_fit(tmp_path: Path, edit: str) -> None:
    stage, pattern, change_it, message = EDITS[edit]
    build(tmp_path, stage)
    change(tmp_path, pattern, change_it)
    with pytest.raises(ValueError, match=message):
        DeepSpeedFolder(tmp_path)


@pytest.mark.usefixtures("deepspeed_names")
def test_refuses_folders_that_arent_whole(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"optim_states.*found none"):
        DeepSpeedFolder(tmp_path)
    build(tmp_path, 2)
    files = tmp_path / "global_step40"
    first = files / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    for name, message in [
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "found both"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "no model parallelism"),
        ("layer_00-model_00-model_states.pt", "a pipeline or of experts"),
    ]:
        shutil.copy(first, files / name)
        with pytest.raises(ValueError, match=message):
            DeepSpeedFolder(tmp_path)
        (files / name).unlink()
    first.unlink()
    with pytest.raises(FileNotFoundError, match=r"ranks 0 to 1.*found those of \[1\]"):
        DeepSpeedFolder(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no '.*global_step9'"):
        DeepSpeedFolder(tmp_path, "global_step9")
    (tmp_path / "latest").write_text("../..")
    with pytest.raises(ValueError, match=r"name of a folder in .*found '\.\./\.\.'"):
        DeepSpeedFolder(tmp_path)
