"""Checkpoints through the engine: what is saved comes back, on any ranks, or an error says why."""

from __future__ import annotations

import gc
import json
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from models import WIDTH, Squared, TinyLM, feature_loss, lm_loss
from mpi4py import MPI
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import hpczero
from hpczero.checkpoints import checkpointer
from hpczero.checkpoints.consolidate import consolidate
from hpczero.checkpoints.reader import Checkpoint
from hpczero.errors import CheckpointError

pytestmark = pytest.mark.mpi

WORLD = MPI.COMM_WORLD
SIZE, RANK = WORLD.size, WORLD.rank


PARALLEL = h5py.get_config().mpi
SHARED = pytest.param("shared", marks=pytest.mark.skipif(not PARALLEL, reason="h5py has no MPI"))
LAYOUTS = pytest.mark.parametrize("layout", ["files", SHARED])


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all ranks see."""
    mine = str(tmp_path_factory.mktemp("checkpoints")) if RANK == 0 else None
    return Path(WORLD.bcast(mine))


def config(stage: int, dtype: str = "fp32", **keys: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 14, "loss_scale_window": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        **keys,
    }


class Odd(nn.Module):
    """Tied, frozen, ragged, empty and scalar parameters, buffers, and a name with a slash."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, 7)
        self.second = nn.Linear(7, width)
        self.tied = nn.Linear(width, 7, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.norm = nn.BatchNorm1d(7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.ragged = nn.Parameter(torch.randn(3, 5, 2))
        self.register_parameter("a/b%~", nn.Parameter(torch.randn(2, 2)))
        self.register_buffer("mask", torch.arange(5), persistent=False)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.frozen(self.first(x)))
        x = self.drop(self.tied(self.second(x)))
        extra = self.ragged.sum() + self._parameters["a/b%~"].square().sum()
        return x * self.scale + extra


def odd() -> nn.Module:
    torch.manual_seed(1)
    return Squared(Odd())


def lm() -> nn.Module:
    torch.manual_seed(1)
    return TinyLM()


def engine_of(
    make: Callable[[], nn.Module], settings: dict[str, Any], comm: Any = None, **more: Any
) -> hpczero.Engine:
    return hpczero.Engine(make(), settings, comm, **more)


def run(engine: hpczero.Engine, loss: Any, steps: int) -> list[float]:
    """Train; the batches follow from the engine's own count."""
    losses = []
    for _ in range(steps):
        for micro in range(engine.config.accumulation):
            number = engine.global_steps * engine.config.accumulation + micro
            value = loss(engine, number * engine.world_size + engine.rank)
            engine.backward(value)
            engine.step()
            losses.append(engine.world.mean(value.item()))
    return losses


def whole(engine: hpczero.Engine) -> dict[str, torch.Tensor]:
    """Return weights and optimizer states on rank 0, {} elsewhere."""
    states = {
        f"{name}.{kind}": torch.as_tensor(value)
        for name, state in engine.full_optimizer_state().items()
        for kind, value in state.items()
    }
    return {**engine.full_state_dict(), **states}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


# Going on #

LOSSES = {"odd": (odd, feature_loss), "lm": (lm, lm_loss)}
GRID = [
    (stage, dtype, accumulation)
    for stage in range(4)
    for dtype in ("fp32", "bf16", "fp16")
    for accumulation in (1, 2)
]
FAST = {(1, "fp32", 2), (2, "fp16", 2), (3, "bf16", 1)}


@pytest.mark.parametrize(
    ("stage", "dtype", "accumulation"),
    [pytest.param(*c, marks=[] if c in FAST else pytest.mark.slow) for c in GRID],
)
@pytest.mark.parametrize("model", LOSSES)
def test_a_resumed_run_is_the_run(
    model: str, stage: int, dtype: str, accumulation: int, folder: Path
) -> None:
    make, loss = LOSSES[model]
    settings = config(
        stage,
        dtype,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=0.5,
        scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 9}},
    )
    engine = engine_of(make, settings)
    run(engine, loss, 4)
    path = engine.save_checkpoint(folder, client_state={"epoch": 3, "best": (1, 2.5)})
    assert path == folder / "global_step4"
    through = run(engine, loss, 4)
    torch.manual_seed(99), np.random.seed(99), random.seed(99)
    again = engine_of(make, settings)
    assert again.load_checkpoint(folder) == (path, {"epoch": 3, "best": (1, 2.5)})
    assert again.global_steps == 4
    assert run(again, loss, 4) == through
    assert_equal(whole(engine), whole(again))
    for name in ("lr", "loss_scale", "skipped_steps", "global_steps", "micro_steps"):
        assert getattr(again, name) == getattr(engine, name)


def test_random_states_come_back(folder: Path) -> None:
    engine = engine_of(lm, config(3))
    torch.manual_seed(RANK), np.random.seed(RANK), random.seed(RANK)
    random.gauss(0, 1), np.random.normal()
    engine.save_checkpoint(folder)

    def draw() -> list[Any]:
        return [torch.rand(3).tolist(), np.random.normal(size=3).tolist(), random.gauss(0, 1)]

    drawn = draw()
    assert draw() != drawn
    engine.load_checkpoint(folder)
    assert draw() == drawn
    assert len({str(d) for d in WORLD.allgather(drawn)}) == SIZE


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-4, momentum=0.9),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, centered=True),
    "Lamb": lambda groups: hpczero.Lamb(groups, lr=0.01, weight_decay=0.1),
    "AMSGrad": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
}


FAST_PAIRS = {"SGD": (0, 3), "RMSprop": (2, 1), "Lamb": (0, 3), "AMSGrad": (2, 1)}


@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        pytest.param(kind, stages, marks=[] if FAST_PAIRS.get(kind) == stages else pytest.mark.slow)
        for kind in OPTIMIZERS
        for stages in ((0, 3), (2, 1))
    ],
)
def test_any_optimizer_goes_on_at_another_stage(
    kind: str, stages: tuple[int, int], folder: Path
) -> None:
    settings = [{**config(stage, "bf16"), "optimizer": None} for stage in stages]
    groups = [engine_of(odd, s, optimizer=OPTIMIZERS[kind]) for s in settings]
    engine, again = groups
    run(engine, feature_loss, 2)
    engine.save_checkpoint(folder)
    through = run(engine, feature_loss, 2)
    again.load_checkpoint(folder)
    assert run(again, feature_loss, 2) == through
    assert_equal(whole(engine), whole(again))


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4], 0.5),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(o, 6),
        ],
        [2],
    ),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
}


@pytest.mark.parametrize(
    "kind",
    [k if k == "SequentialLR" else pytest.param(k, marks=pytest.mark.slow) for k in SCHEDULERS],
)
def test_torch_schedulers_go_on(kind: str, folder: Path) -> None:
    engine, again = (engine_of(lm, config(1), lr_scheduler=SCHEDULERS[kind]) for _ in range(2))
    run(engine, lm_loss, 3)
    engine.save_checkpoint(folder)
    again.load_checkpoint(folder)
    for _ in range(4):
        assert again.lr == engine.lr
        assert run(again, lm_loss, 1) == run(engine, lm_loss, 1)


def test_parameter_groups_keep_what_changed(folder: Path) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
        others = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
        return [{"params": decayed, "weight_decay": 0.3}, {"params": others, "lr": 0.1}]

    def make() -> hpczero.Engine:
        model = odd()
        return hpczero.Engine(model, config(3), model_parameters=groups(model))

    engine, again = make(), make()
    engine.optimizer.param_groups[1]["lr"] = 0.25
    run(engine, feature_loss, 2)
    engine.save_checkpoint(folder)
    through = run(engine, feature_loss, 2)
    again.load_checkpoint(folder)
    assert again.get_lr() == [1e-2, 0.25]
    assert run(again, feature_loss, 2) == through


def test_a_persistent_bucket_and_frozen_weights_are_not_stale(folder: Path) -> None:
    settings = config(3)
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 10**6
    engine, again = (engine_of(odd, settings) for _ in range(2))
    with torch.no_grad(), hpczero.GatheredParameters(engine.module, modifier_rank=0):
        for parameter in engine.module.parameters():
            parameter.add_(1)
    run(again, feature_loss, 1)  # everything is gathered now, with the old weights
    engine.save_checkpoint(folder)
    through = run(engine, feature_loss, 2)
    again.load_checkpoint(folder)
    assert run(again, feature_loss, 2) == through


# Any ranks, stage, precision #


def communicators() -> Iterator[tuple[int, Any]]:
    """Yield how many ranks, and their communicator (None on those outside)."""
    for size in range(1, SIZE + 1):
        comm = WORLD.Split(0 if size > RANK else MPI.UNDEFINED, RANK)
        yield size, comm if comm != MPI.COMM_NULL else None


@LAYOUTS
@pytest.mark.parametrize(
    "stages", [(3, 3), *(pytest.param(s, marks=pytest.mark.slow) for s in ((0, 2), (2, 1)))]
)
def test_any_number_of_ranks_to_any_other(
    stages: tuple[int, int], layout: Any, folder: Path
) -> None:
    saved = {}
    comms = dict(communicators())
    for size, comm in comms.items():
        if comm is not None:
            engine = engine_of(odd, config(stages[0], "bf16"), comm)
            run(engine, feature_loss, 2)
            engine.save_checkpoint(folder, f"from{size}", layout=layout)
            saved[size] = whole(engine)
    WORLD.Barrier()
    for comm in comms.values():
        for size in comms if comm is not None else ():
            engine = engine_of(odd, config(stages[1], "bf16"), comm)
            engine.load_checkpoint(folder, f"from{size}")
            again = whole(engine)
            if RANK == 0:
                assert_equal(again, saved[size])
            losses = run(engine, feature_loss, 1)
            assert all(np.isfinite(losses))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("bf16", "fp32"),
        *(pytest.param(b, "bf16", marks=pytest.mark.slow) for b in ("fp32", "fp16")),
    ],
)
def test_another_precision_keeps_the_masters(before: str, after: str, folder: Path) -> None:
    engine = engine_of(lm, config(3, before))
    run(engine, lm_loss, 2)
    engine.save_checkpoint(folder)
    again = engine_of(lm, config(1, after))
    again.load_checkpoint(folder)
    assert_equal(whole(engine), whole(again))
    run(again, lm_loss, 1)


def test_a_new_rank_seeds_itself(folder: Path) -> None:
    if RANK == 0:
        alone = engine_of(lm, config(3), MPI.COMM_SELF)
        alone.save_checkpoint(folder)
    WORLD.Barrier()
    draws = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        engine_of(lm, config(3)).load_checkpoint(folder)
        draws.append(WORLD.allgather(torch.rand(2).tolist()))
    assert draws[0] == draws[1]
    assert len({str(d) for d in draws[0]}) == SIZE


@pytest.mark.parametrize("frozen_first", [False, True])
def test_frozen_or_unfrozen_since(frozen_first: bool, folder: Path) -> None:
    def make(frozen: bool) -> nn.Module:
        model = lm()
        model.blocks[1].requires_grad_(not frozen)
        model.norm.requires_grad_(not frozen)
        return model

    engine = hpczero.Engine(make(frozen_first), config(3))
    run(engine, lm_loss, 3)
    engine.save_checkpoint(folder)
    again = hpczero.Engine(make(not frozen_first), config(2))
    again.load_checkpoint(folder)
    assert_equal(engine.full_state_dict(), again.full_state_dict())
    states = again.full_optimizer_state()
    if RANK == 0 and frozen_first:
        assert states["blocks.1.up.weight"]["step"] == 0
        assert states["norm.weight"]["step"] == 0
        assert states["embed.weight"]["step"] == 3
        assert not states["blocks.1.up.weight"]["exp_avg"].any()
        assert states["blocks.0.up.weight"]["exp_avg"].any()
    run(again, lm_loss, 2)


def test_weights_alone(folder: Path) -> None:
    engine = engine_of(lm, config(3))
    run(engine, lm_loss, 2)
    engine.save_checkpoint(folder)
    again = engine_of(lm, {**config(3), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    with pytest.raises(CheckpointError, match="SGD here, AdamW in the checkpoint: load_optim"):
        again.load_checkpoint(folder)
    again.load_checkpoint(folder, load_optimizer_states=False)
    assert_equal(engine.full_state_dict(), again.full_state_dict())
    run(again, lm_loss, 1)


def test_the_position_in_the_data_goes_on(folder: Path) -> None:
    data = TensorDataset(torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(0)))
    settings = config(3, train_micro_batch_size_per_gpu=2)

    def start() -> tuple[hpczero.Engine, Any]:
        engine, _, loader, _ = hpczero.initialize(model=odd(), config=settings, training_data=data)
        return engine, loader

    def epoch(engine: hpczero.Engine, loader: Any, steps: int | None = None) -> list[list[float]]:
        seen = []
        for (x,) in loader:
            engine.backward(engine(x))
            engine.step()
            seen.append(x.flatten().tolist())
            if len(seen) == steps:
                break
        return seen

    engine, loader = start()
    epoch(engine, loader)
    epoch(engine, loader, 3)
    engine.save_checkpoint(folder)
    loader.load_state_dict(loader.state_dict())
    through = [epoch(engine, loader), epoch(engine, loader)]
    again, other = start()
    again.load_checkpoint(folder)
    assert again.global_samples == (len(loader) + 3) * 2 * SIZE
    assert [epoch(again, other), epoch(again, other)] == through
    assert_equal(whole(engine), whole(again))


# Errors #


def test_everything_that_does_not_match_is_listed(folder: Path) -> None:
    engine = engine_of(odd, config(3))
    run(engine, feature_loss, 1)
    engine.save_checkpoint(folder)

    class Other(Odd):
        def __init__(self) -> None:
            super().__init__()
            self.ragged = nn.Parameter(torch.zeros(3, 5, 3))
            self.more = nn.Parameter(torch.zeros(4))
            del self.scale
            self.scale = 1.5  # type: ignore[assignment]
            self.register_buffer("count", torch.zeros(2))

    again = hpczero.Engine(Squared(Other()), config(2))
    before = again.full_state_dict()
    with pytest.raises(CheckpointError) as caught:
        again.load_checkpoint(folder)
    for line in (
        "4 entries don't match",
        "other shape: parameter 'inner.ragged' is (3, 5, 3) here, (3, 5, 2) there",
        "missing: parameter 'inner.more' (4,)",
        "unexpected: 'inner.scale' ()",
        "missing: buffer 'inner.count' (2,)",
    ):
        assert line in str(caught.value)
    assert_equal(again.full_state_dict(), before)
    again.load_checkpoint(folder, strict=False)
    mine, saved = again.full_state_dict(), engine.full_state_dict()
    if RANK == 0:
        assert torch.equal(mine["inner.first.weight"], saved["inner.first.weight"])
        assert not mine["inner.ragged"].any()
    run(again, feature_loss, 1)


def test_what_was_not_loaded_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine_of(lm, config(3)).save_checkpoint(folder)
    again = engine_of(lambda: TinyLM(blocks=2), config(3))
    with caplog.at_level(logging.WARNING, "hpczero"):
        again.load_checkpoint(folder, strict=False)
    lines = [r.message for r in caplog.records if "not loaded: unexpected" in r.message]
    assert len(lines) == (6 if RANK == 0 else 0)


def test_a_folder_without_checkpoints_is_no_error(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(lm, config(3))
    with caplog.at_level(logging.WARNING, "hpczero"):
        assert engine.load_checkpoint(folder / "no") == (None, {})
    assert ("nothing loaded" in caplog.text) == (RANK == 0)
    engine.save_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"'mine' .*\(asked for\), found: global_step0"):
        engine.load_checkpoint(folder, "mine")


def test_saving_in_the_middle_is_refused(folder: Path) -> None:
    engine = engine_of(lm, config(1, gradient_accumulation_steps=2))
    loss = lm_loss(engine, 0)
    engine.backward(loss)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"save_checkpoint\(\) at micro-step"):
            engine.save_checkpoint(folder)
        with pytest.raises(RuntimeError, match=r"load_checkpoint\(\) at micro-step"):
            engine.load_checkpoint(folder)
        if engine.micro_steps == 0:
            engine.step()
    engine.backward(lm_loss(engine, 1))
    engine.step()
    with (
        pytest.raises(RuntimeError, match="GatheredParameters"),
        hpczero.GatheredParameters(engine.module),
    ):
        engine.save_checkpoint(folder)
    assert not any(folder.iterdir())


def test_files_of_others_are_not_replaced(folder: Path) -> None:
    if RANK == 0:
        (folder / "global_step0").mkdir()
        (folder / "global_step0" / "mine.txt").write_text("dear")
    WORLD.Barrier()
    engine = engine_of(lm, config(3))
    with pytest.raises(CheckpointError, match=r"global_step0: .* found other files, which stay"):
        engine.save_checkpoint(folder)
    assert (folder / "global_step0" / "mine.txt").read_text() == "dear"
    engine.save_checkpoint(folder, "free")


@pytest.mark.parametrize("tag", ["", "../x", "a/b", ".hidden", "latest"])
def test_a_tag_is_a_plain_name(tag: str, folder: Path) -> None:
    engine = engine_of(lm, config(0))
    with pytest.raises(CheckpointError, match="expected a tag that is a plain folder name"):
        engine.save_checkpoint(folder, tag)
    engine.save_checkpoint(folder, "good")


def test_client_state_is_json(folder: Path) -> None:
    engine = engine_of(lm, config(0))
    for asynchronous in (False, True):
        state = {"model": nn.Linear(1, 1) if RANK == SIZE - 1 else 1}
        with pytest.raises(
            CheckpointError, match=rf"rank {SIZE - 1} .*client_state\.model: .* Linear"
        ):
            engine.save_checkpoint(folder, None, state, asynchronous)
    with pytest.raises(ValueError, match="keep_last: expected at least 1, found 0"):
        engine.save_checkpoint(folder, keep_last=0)


# The folder #


def test_the_newest_stay(folder: Path) -> None:
    engine = engine_of(lm, config(2))
    for step in range(4):
        run(engine, lm_loss, 1)
        engine.save_checkpoint(folder, keep_last=2)
        WORLD.Barrier()
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        expected = [f"global_step{n}" for n in (step, step + 1) if n]
        assert names == [*expected, "latest"]
        assert (folder / "latest").read_text() == f"global_step{step + 1}\n"
        WORLD.Barrier()


def test_the_same_tag_again_replaces(folder: Path) -> None:
    engine = engine_of(lm, config(2))
    for _ in range(2):
        run(engine, lm_loss, 1)
        engine.save_checkpoint(folder, "best")
    again = engine_of(lm, config(2))
    again.load_checkpoint(folder)
    assert again.global_steps == 2
    assert_equal(whole(engine), whole(again))


@LAYOUTS
def test_plain_h5py_reads_the_model(layout: Any, folder: Path) -> None:
    engine = engine_of(odd, config(3, "bf16"))
    run(engine, feature_loss, 2)
    path = engine.save_checkpoint(folder, layout=layout)
    masters, states = engine.full_state_dict(), engine.full_optimizer_state()
    if RANK != 0:
        return
    names = {name.replace("~", "~0").replace("/", "~1"): name for name in masters}
    moved = path.rename(folder / "moved")
    with h5py.File(moved / "index.h5") as file:
        weights, buffers = file["weights"], file["buffers"]
        assert {*weights, *buffers} == {*names}
        for key, name in names.items():
            found = (weights if key in weights else buffers)[key]
            assert found.shape == tuple(masters[name].shape)
            assert np.array_equal(found[()], masters[name].float().numpy()), name
        for name, state in states.items():
            if masters[name].numel():
                key = name.replace("~", "~0").replace("/", "~1")
                assert np.array_equal(file["exp_avg"][key][()], state["exp_avg"].numpy()), name
        assert file["weights/inner.frozen.weight"].id.get_type().get_size() == 2  # bfloat16
    manifest = json.loads((moved / "manifest.json").read_text())
    assert manifest["tied"] == {"inner.tied.weight": "inner.first.weight"}
    with Checkpoint(moved) as checkpoint:
        files = [name.split(":")[0] for name, _ in checkpoint.verify()]
    own = {f"rank_{rank:05d}.h5" for rank in range(SIZE)}
    assert {*files} == {"index.h5", *(own if layout == "files" else {"shared.h5"})}
    assert {*files, "manifest.json"} == {path.name for path in moved.iterdir()}


@pytest.mark.skipif(PARALLEL, reason="h5py has MPI")
def test_a_shared_file_takes_an_h5py_with_mpi(folder: Path) -> None:
    engine = engine_of(lm, config(3))
    with pytest.raises(RuntimeError, match=r"layout='shared': .* without: build one .*layout='fi"):
        engine.save_checkpoint(folder, layout="shared")
    with pytest.raises(ValueError, match="expected 'files' or 'shared', found 'one'"):
        engine.save_checkpoint(folder, layout="one")  # type: ignore[arg-type]
    assert engine.save_checkpoint(folder).is_dir()


def through_h5py(path: Path, names: list[str]) -> dict[str, torch.Tensor]:
    """Read an index, where slashes in names are escaped, or a file with all names at its root."""
    found = {}
    with h5py.File(path) as file:
        for name in names:
            key = name.replace("~", "~0").replace("/", "~1")
            kinds = [kind for kind in ("weights", "buffers") if key in file.get(kind, ())]
            found[name] = torch.from_numpy(np.asarray(file[f"{kinds[0]}/{key}" if kinds else name]))
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_exit_gives_what_the_engine_gives(dtype: str, folder: Path) -> None:
    engine = engine_of(odd, config(3, dtype))
    run(engine, feature_loss, 2)
    path = engine.save_checkpoint(folder)
    expected, states = engine.full_state_dict(), engine.full_optimizer_state()
    if RANK != 0:
        return
    with Checkpoint(path) as checkpoint:
        for name, form in [("x.safetensors", "safetensors"), ("x.pt", "torch"), ("x.h5", "hdf5")]:
            consolidate(checkpoint, folder / name, form)
        consolidate(checkpoint, folder / "split", "safetensors", max_shard_bytes=300)
        consolidate(checkpoint, folder / "moments.pt", "torch", kind="exp_avg_sq")
        tied = checkpoint.tied()
    parts = sorted((folder / "split").glob("*.safetensors"))
    exits = {
        "index.h5": through_h5py(path / "index.h5", [*expected]),
        "hdf5": through_h5py(folder / "x.h5", [*expected]),
        "torch": torch.load(folder / "x.pt", weights_only=True),
        "safetensors": load_file(folder / "x.safetensors"),
        "split": {name: tensor for part in parts for name, tensor in load_file(part).items()},
    }
    assert len(parts) > 1 and tied == {"inner.tied.weight": "inner.first.weight"}
    for name in ("safetensors", "split"):  # which keep one name of each tensor
        exits[name] |= {alias: exits[name][first] for alias, first in tied.items()}
    for name, found in exits.items():
        assert found.keys() == expected.keys(), name
        for key, tensor in found.items():
            assert tensor.shape == expected[key].shape, (name, key)
            assert torch.equal(tensor.to(expected[key].dtype), expected[key]), (name, key)
    frozen = engine.module.get_parameter("inner.frozen.weight")
    assert exits["torch"]["inner.frozen.weight"].dtype == frozen.dtype
    found = torch.load(folder / "moments.pt", weights_only=True)
    for name, state in states.items():
        if expected[name].numel():
            assert torch.equal(found[name], state["exp_avg_sq"]), name
    assert "inner.frozen.weight" not in found


def damage_bit(path: Path) -> None:
    path = path.with_name("rank_00000.h5")  # the last rank's part may be all padding
    with Checkpoint(path.parent) as checkpoint:
        entry = checkpoint.file(int(path.stem[-5:])).entries["weights/root"]
    content = bytearray(path.read_bytes())
    content[entry.offset + entry.nbytes // 2] ^= 4
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (lambda path: path.unlink(), "No such file"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "truncated"),
    "flipped": (damage_bit, r"dataset 'weights/root', block 0: expected checksum"),
    "manifest": (
        lambda path: (path.parent / "manifest.json").write_text("{}"),
        r"manifest\.json: expected a checkpoint's manifest",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_error_on_all_ranks(kind: str, folder: Path) -> None:
    engine = engine_of(lm, config(3))
    run(engine, lm_loss, 1)
    old = engine.save_checkpoint(folder)
    run(engine, lm_loss, 1)
    path = engine.save_checkpoint(folder)
    damage, message = DAMAGE[kind]
    if RANK == 0:
        damage(path / f"rank_{SIZE - 1:05d}.h5")
    WORLD.Barrier()
    with pytest.raises(CheckpointError, match=message) as caught:
        engine.load_checkpoint(folder)
    assert len({str(text) for text in WORLD.allgather(str(caught.value))}) == 1
    assert engine.load_checkpoint(folder, old.name)[0] == old
    run(engine, lm_loss, 1)


# In a thread #


@LAYOUTS
def test_an_asynchronous_save_is_of_the_moment_of_the_call(layout: Any, folder: Path) -> None:
    engine = engine_of(odd, config(3, "bf16"))
    run(engine, feature_loss, 2)
    engine.save_checkpoint(folder, "now")
    engine.save_checkpoint(folder, "thread", asynchronous=True, layout=layout)
    through = run(engine, feature_loss, 3)
    engine.save_checkpoint(folder, "then")  # waits for the one in flight
    found = []
    for tag in ("now", "thread"):
        again = engine_of(odd, config(3, "bf16"))
        again.load_checkpoint(folder, tag)
        found.append(whole(again))
        assert run(again, feature_loss, 3) == through
    assert_equal(*found)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_two_engines_save_one_after_the_other(
    asynchronous: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share a courier, though one's disk is slow on one rank."""
    inner = checkpointer.save

    def slow(root: Path, *args: Any) -> None:
        time.sleep(0.3 * (RANK == SIZE - 1 and root.name == "first"))
        inner(root, *args)

    monkeypatch.setattr(checkpointer, "save", slow)
    engines = [engine_of(lm, config(stage)) for stage in (1, 3)]
    for engine, name in zip(engines, ("first", "second"), strict=True):
        run(engine, lm_loss, 1)
        (folder / name).mkdir(exist_ok=True)
    engines[0].save_checkpoint(folder / "first", asynchronous=True)
    engines[1].save_checkpoint(folder / "second", asynchronous=asynchronous)
    engines[0].wait_for_checkpoint()
    engines[1].load_checkpoint(folder / "first")
    assert_equal(whole(engines[0]), whole(engines[1]))
    engines[0].load_checkpoint(folder / "second")


def test_an_engine_that_has_saved_asynchronously_is_gone_when_dropped(folder: Path) -> None:
    engine = engine_of(lm, config(3))
    run(engine, lm_loss, 1)
    engine.save_checkpoint(folder, asynchronous=True)
    assert engine._checkpointer is not None
    writing, alive = engine._checkpointer._writing, weakref.ref(engine._runtime.buckets[0])
    assert writing is not None
    writing.result()
    del engine
    for thread in threading.enumerate():
        if thread.name == "hpczero-checkpoint":
            thread.join()
    gc.collect()
    engine_of(lm, config(3))  # nobody carries anything of the first one
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("kind", ["NAdam", "AMSGrad"])
def test_parameters_in_several_segments_go_on(kind: str, folder: Path) -> None:
    settings = config(1, optimizer=None)
    settings["zero_optimization"]["sub_group_size"] = 64
    engine, again = (engine_of(lm, settings, optimizer=OPTIMIZERS[kind]) for _ in range(2))
    run(engine, lm_loss, 2)
    engine.save_checkpoint(folder)
    again.load_checkpoint(folder)
    assert run(again, lm_loss, 3) == run(engine, lm_loss, 3)
    assert_equal(whole(engine), whole(again))


def test_states_that_could_not_be_read_leave_a_whole_optimizer() -> None:
    engine = engine_of(lm, config(2))
    run(engine, lm_loss, 1)
    optimizer = engine._optimizer
    names = [name for name, p in engine.module.named_parameters() if p.requires_grad]
    saved = {
        name: (("exp_avg", "exp_avg_sq"), {"step": torch.tensor(float(number % 3))})
        for number, name in enumerate(names)
    }

    def broken(*_: object) -> torch.Tensor:
        raise OSError("damaged")

    with pytest.raises(OSError, match="damaged"):
        optimizer.restore(saved, broken)
    run(engine, lm_loss, 1)
    optimizer.restore(saved, lambda kind, name, start, stop: torch.ones(stop - start))
    found = engine.full_optimizer_state()
    for number, name in enumerate(names if RANK == 0 else []):
        assert found[name]["step"] == number % 3
        assert found[name]["exp_avg"].eq(1).all()
    run(engine, lm_loss, 1)


def test_a_failed_asynchronous_save_is_raised_by_a_step_on_all_ranks(folder: Path) -> None:
    engine = engine_of(lm, config(3))
    target = folder / "file"
    if RANK == 0:
        target.write_text("no folder")
    WORLD.Barrier()
    engine.save_checkpoint(target, "bad", asynchronous=True)
    with pytest.raises(CheckpointError, match=r"'bad' was not saved; .*rank 0.*: .*file"):
        run(engine, lm_loss, 1000)
    assert len({*WORLD.allgather(engine.global_steps)}) == 1
    engine.save_checkpoint(target, "bad", asynchronous=True)
    with pytest.raises(CheckpointError, match=r"'bad' was not saved; .*rank 0.*: .*file"):
        engine.wait_for_checkpoint()
    engine.wait_for_checkpoint()
    engine.save_checkpoint(folder, "good", asynchronous=True)
    engine.wait_for_checkpoint()
    assert (folder / "latest").read_text() == "good\n"
