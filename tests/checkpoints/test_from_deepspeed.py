"""A DeepSpeed checkpoint becomes one of ours, and training goes on from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from continued import STEPS
from forged import STATES, build, deepspeed_names  # noqa: F401 - a fixture
from launch import ROOT, deepspeed, mpiexec, needs_deepspeed
from mpi4py import MPI
from torch import Tensor, nn

import hpczero
from hpczero.checkpoints import rankfile
from hpczero.checkpoints.deepspeed import DeepSpeedFolder
from hpczero.checkpoints.folder import Folder
from hpczero.checkpoints.from_deepspeed import import_deepspeed
from hpczero.checkpoints.reader import Checkpoint
from hpczero.errors import CheckpointError

WORLD = MPI.COMM_WORLD


class Forged(nn.Module):
    """A module with the names that forged.py writes."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"a": (3, 5), "b": (7,), "c": (2, 2, 2), "d": (1,)}.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        for name, shape in {"e": (3, 3), "f": (1,)}.items():
            frozen = nn.Parameter(torch.zeros(shape), requires_grad=False)
            self.register_parameter(name, frozen)
        self.tie = self.a
        self.register_buffer("buffer", torch.zeros(4, dtype=torch.int64))

    def forward(self) -> Tensor:
        return sum(parameter.float().square().sum() for parameter in self.parameters())


def engine_of(stage: int) -> hpczero.Engine:
    model = Forged()
    groups = [{"params": [model.a, model.b]}, {"params": [model.c, model.d]}]
    config = {
        "zero_optimization": {"stage": stage},
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "optimizer": {"type": "Adam", "params": {"lr": 1.0}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50}},
    }
    return hpczero.Engine(model, config, model_parameters=groups)


@pytest.mark.mpi
@pytest.mark.usefixtures("deepspeed_names")
@pytest.mark.parametrize(("theirs", "ours"), [(1, 3), (2, 1), (3, 3), (3, 0)])
def test_an_fp16_run_goes_on(
    theirs: int, ours: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("import")
    kinds: dict[str, dict[str, Tensor]] = {}
    if WORLD.rank == 0:
        kinds = build(folder / "theirs", theirs)
        imported = import_deepspeed(DeepSpeedFolder(folder / "theirs"), folder / "ours")
        assert imported == (folder / "ours" / "global_step40", [])
    folder, kinds = WORLD.bcast((folder, kinds))
    engine = engine_of(ours)
    path, client_state = engine.load_checkpoint(folder / "ours")
    assert path is not None
    assert path.name == "global_step40"
    assert client_state == {"mine": "client"}
    assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == (40, 320, 2)
    assert engine.loss_scale == 65536
    assert engine.lr_scheduler.state_dict() == {"last_batch_iteration": 39}
    weights, states = engine.full_state_dict(), engine.full_optimizer_state()
    if WORLD.rank == 0:
        assert weights.keys() == {*kinds["weights"], "tie"}
        for name, value in kinds["weights"].items():
            assert torch.equal(weights[name], value.to(weights[name].dtype)), name
        for kind in STATES:
            for name, value in kinds[kind].items():
                assert torch.equal(states[name][kind], value), name
        assert {float(state["step"]) for state in states.values()} == {38}
    engine.backward(engine())
    engine.step()
    assert engine.global_steps == 41


@pytest.mark.usefixtures("deepspeed_names")
def test_the_folder_is_one_of_ours(tmp_path: Path) -> None:
    kinds = build(tmp_path / "theirs", 3)
    told: list[tuple[int, int]] = []
    path, _ = import_deepspeed(
        DeepSpeedFolder(tmp_path / "theirs"), tmp_path, lambda *counts: told.append(counts)
    )
    assert told[-1][0] == told[-1][1] > 0
    assert (tmp_path / "latest").read_text() == "global_step40\n"
    with Checkpoint(path) as checkpoint:
        assert len(list(checkpoint.verify())) > 4
        assert checkpoint.manifest.precision == "fp16"
        groups = checkpoint.manifest.optimizer["groups"]
        assert [group["lr"] for group in groups] == [0.1, 0.2]
    with h5py.File(path / "index.h5") as file:
        for kind, tensors in kinds.items():
            for name, value in tensors.items():
                where = "buffers" if name == "buffer" else kind
                assert np.array_equal(file[where][name][()], value.numpy()), name


@pytest.mark.usefixtures("deepspeed_names")
def test_it_is_written_a_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rankfile, "BLOCK", 64)
    build(tmp_path / "theirs", 2)
    source, longest = DeepSpeedFolder(tmp_path / "theirs"), 0
    read = source.read

    def measured(kind: str, name: str, start: int, stop: int) -> Tensor:
        nonlocal longest
        longest = max(longest, stop - start)
        return read(kind, name, start, stop)

    monkeypatch.setattr(source, "read", measured)
    path, _ = import_deepspeed(source, tmp_path / "ours")
    assert longest <= 16
    with Checkpoint(path) as checkpoint:
        for name in source.names("weights"):
            assert torch.equal(checkpoint.read("weights", name), whole(source, name))


def whole(source: DeepSpeedFolder, name: str) -> Tensor:
    numel = int(np.prod(source.shape("weights", name)))
    return source.read("weights", name, 0, numel)


@pytest.mark.usefixtures("deepspeed_names")
def test_what_json_cannot_hold_is_named(tmp_path: Path) -> None:
    build(tmp_path / "theirs", 1)
    source = DeepSpeedFolder(tmp_path / "theirs")
    source.counters.client_state.update(array=np.zeros(3), epoch=4)
    path, left_out = import_deepspeed(source, tmp_path / "ours")
    assert len(left_out) == 1
    assert left_out[0].startswith("client_state.array: expected numbers, text")
    with Checkpoint(path) as checkpoint:
        assert checkpoint.manifest.client_state == {"mine": "client", "epoch": 4}


@pytest.mark.usefixtures("deepspeed_names")
def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "theirs", 1)
    source = DeepSpeedFolder(tmp_path / "theirs")
    place = Folder(tmp_path / "ours", "other")
    with pytest.raises(CheckpointError, match="another job is saving"):
        import_deepspeed(source, tmp_path / "ours")
    place.close(failed=True)

    def damaged(*_: Any) -> Tensor:
        raise ValueError("damaged")

    monkeypatch.setattr(source, "read", damaged)
    with pytest.raises(ValueError, match="damaged"):
        import_deepspeed(source, tmp_path / "ours")
    assert [path.name for path in (tmp_path / "ours").iterdir()] == [".lock"]


# ---- as DeepSpeed writes them

RANKS = 2


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.timeout(400)
def test_training_goes_on_as_deepspeeds_own(tmp_path: Path) -> None:
    cases = {str(stage): {"zero_optimization": {"stage": stage}} for stage in (1, 2, 3)}
    script = Path(__file__).with_name("write_deepspeed.py")
    deepspeed(RANKS, script, str(tmp_path), json.dumps(cases), log=tmp_path / "log")
    for stage in cases:
        source = DeepSpeedFolder(tmp_path / stage)
        source.verify()
        ours = tmp_path / f"ours{stage}"
        _, left_out = import_deepspeed(source, ours)
        assert [line.split(":")[0] for line in left_out] == ["client_state.rng[1]"]
        job = mpiexec(
            RANKS, str(Path(__file__).with_name("continue_here.py")), str(ours), str(ours), stage,
            env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        )  # fmt: skip
        assert job.returncode == 0, job.stdout
        expected = torch.load(tmp_path / stage / "expected.pt")
        for rank in range(RANKS):
            told = json.loads((ours / f"{rank}.json").read_text())
            assert told["client_state"] == ["best", "epoch", "seen"]
            assert told["steps"] == [STEPS, STEPS * 4 * RANKS, 0]
            assert told["lrs"] == expected["lrs"]
            assert told["weight_decay"] == [0.1, 0]
            losses = json.loads((tmp_path / stage / f"losses{rank}.json").read_text())
            print(f"stage {stage}, rank {rank}: DeepSpeed {losses}, hpczero {told['losses']}")
            assert told["losses"] == pytest.approx(losses, rel=0, abs=1e-5)
            assert len({*losses}) == STEPS
