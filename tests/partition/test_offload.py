"""States on any tier: the bits of an all-device run, through checkpoints, faults and many steps."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import pytest
import torch
from models import TinyLM, tokens
from mpi4py import MPI
from torch import nn

import hpczero
from hpczero import sizing
from hpczero.infinity.filetier import FileTier
from hpczero.infinity.tier import CUT
from hpczero.partition import update

pytestmark = pytest.mark.mpi

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank

SLOW = pytest.mark.slow
KINDS = ("master", "exp_avg", "exp_avg_sq")
QUICK = {(2, 4, "fp16"), (3, 1, "bf16")}

TIERS: dict[str, dict[str, Any]] = {
    "host": {"states": "cpu"},
    "states in a file": {"states": "nvme", "grads": "none"},
    "states and gradients in a file": {"states": "nvme"},
    "most states in a file": {"states": "nvme", "grads": "none", "ratio": 0.6},
    "gradients in a file": {"states": "none", "grads": "nvme"},
    "parameters in a file": {"params": "nvme"},
    "all in a file": {"params": "nvme", "states": "nvme"},
    "parameters on the host, states in a file": {"params": "cpu", "states": "nvme"},
}


@pytest.fixture
def shared_tmp(tmp_path: Path) -> Path:
    """Return a folder that all ranks see."""
    return Path(MPI.COMM_WORLD.bcast(str(tmp_path)))


def zero(
    folder: Path,
    stage: int,
    params: str = "none",
    grads: str | None = None,
    states: str = "none",
    ratio: float = 1.0,
) -> dict[str, Any]:
    """Return a config's section."""
    optimizer: dict[str, Any] = {"device": states, "nvme_path": str(folder), "ratio": ratio}
    if grads is not None and stage >= 2:
        optimizer["gradients"] = grads
    section: dict[str, Any] = {"stage": stage, "offload_optimizer": optimizer}
    if stage == 3:
        section["offload_param"] = {"device": params, "nvme_path": str(folder)}
    return section


class Run(NamedTuple):
    engine: hpczero.Engine
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    states: dict[str, dict[str, Any]]


def engine_of(section: dict[str, Any], dtype: str = "fp32", **more: Any) -> hpczero.Engine:
    torch.manual_seed(0)
    config = {"zero_optimization": section, "gradient_clipping": 0.5, **more}
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if dtype == "fp16":
        config[dtype] |= {"initial_scale_power": 17, "hysteresis": 1}
    return hpczero.Engine(TinyLM(), config)


def train(engine: hpczero.Engine, steps: int = 4, backwards: int = 1) -> tuple[list[float], ...]:
    losses, norms = [], []
    for _ in range(steps):
        for _ in range(engine.config.accumulation):
            for number in range(backwards):
                loss = engine(tokens(engine.micro_steps * SIZE + RANK + 100 * number))
                engine.backward(loss)
                losses.append(loss.item())
            engine.step()
        norms.append(engine.grad_norm)
    return losses, norms


def run(section: dict[str, Any], dtype: str = "fp32", backwards: int = 1, **more: Any) -> Run:
    engine = engine_of(section, dtype, **more)
    losses, norms = train(engine, backwards=backwards)
    return Run(engine, losses, norms, engine.full_state_dict(), engine.full_optimizer_state())


def assert_same(one: Run, other: Run) -> None:
    assert one.losses == other.losses
    assert [repr(norm) for norm in one.norms] == [repr(norm) for norm in other.norms]
    assert one.weights.keys() == other.weights.keys()
    for name, values in one.weights.items():
        assert torch.equal(values, other.weights[name]), name
    for name, kinds in one.states.items():
        for kind, value in kinds.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.states[name][kind]))


@pytest.mark.parametrize(
    ("stage", "accumulation", "dtype"),
    [
        pytest.param(
            stage, accumulation, dtype, marks=[] if (stage, accumulation, dtype) in QUICK else SLOW
        )
        for stage in (1, 2, 3)
        for accumulation in (1, 4)
        for dtype in ("fp32", "bf16", "fp16")  # fp16 overflows at first
    ],
)
def test_every_tier_gives_the_same_bits(
    tmp_path: Path, stage: int, accumulation: int, dtype: str
) -> None:
    more = {"gradient_accumulation_steps": accumulation}
    expected = run({"stage": stage}, dtype, **more)
    for name, tiers in TIERS.items():
        if stage == 3 or "params" not in tiers:
            found = run(zero(tmp_path, stage, **tiers), dtype, **more)
            assert_same(found, expected)
            assert found.engine.skipped_steps == expected.engine.skipped_steps, name
    assert (expected.engine.skipped_steps > 0) == (dtype == "fp16")


@pytest.mark.parametrize("stage", [2, 3])
def test_several_backwards_per_step(tmp_path: Path, stage: int) -> None:
    expected = run({"stage": stage}, "bf16", backwards=3)
    section = zero(tmp_path, stage, params="nvme", states="nvme") | {"offload_checksums": True}
    assert_same(run(section, "bf16", backwards=3), expected)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Cut inside buckets, and of course not where chunks are cut."""
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": vectors, "weight_decay": 0.0, "lr": 3e-3},
    ]


class Wide(nn.Module):
    """Buckets of many chunks, odd ones, a scalar, an empty and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        wide = 97 * SIZE  # so that a rank's shard is several chunks
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(97, wide, bias=bool(i % 2)), nn.Linear(wide, 97))
            for i in range(3)
        )
        self.frozen = nn.Parameter(torch.ones(97), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.frozen
        return (x * self.scale).float().square().mean()


@pytest.mark.parametrize("kind", [pytest.param(torch.optim.Adam, marks=SLOW), torch.optim.AdamW])
def test_chunks_cut_neither_groups_nor_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[torch.optim.Optimizer]
) -> None:
    """Each rank's shard of a bucket is several chunks, the last one ragged."""

    def trained(section: dict[str, Any]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Wide()
        optimizer = kind(groups(model), lr=1e-2, weight_decay=0.1)
        config = {"zero_optimization": section, "bf16": {"enabled": True}}
        engine = hpczero.Engine(model, config, optimizer=optimizer)
        for step in range(3):
            x = torch.randn(5, 97, generator=torch.Generator().manual_seed(step * SIZE + RANK))
            engine.backward(engine(x.bfloat16()))
            engine.step()
        return engine.full_state_dict()

    expected = trained({"stage": 3})
    monkeypatch.setattr(update, "STREAMED", 1)  # as few as a chunk can have: 4096
    calls = []
    inner = update.adam_
    monkeypatch.setattr(
        update, "adam_", lambda *args: (calls.append(len(args[0])), inner(*args))[1]
    )
    found = trained(zero(tmp_path, 3, params="nvme", states="nvme"))
    assert max(calls) <= CUT < sum(calls) / 3 / 4
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_go_from_tier_to_tier(
    tmp_path: Path, shared_tmp: Path, asynchronous: bool
) -> None:
    file = zero(tmp_path, 3, params="nvme", states="nvme")
    sections = [file, {"stage": 3}, file, zero(tmp_path, 2, states="cpu")]
    reference = engine_of({"stage": 3}, "bf16")
    expected = train(reference, 2 * len(sections))[0]
    losses: list[float] = []
    for number, section in enumerate(sections):
        engine = engine_of(section, "bf16")
        if number:
            engine.load_checkpoint(shared_tmp)
        losses += train(engine, 2)[0]
        engine.save_checkpoint(shared_tmp, asynchronous=asynchronous)
        engine.wait_for_checkpoint()
    assert losses == expected


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
def test_recomputation_and_late_gradients(tmp_path: Path, recompute: str) -> None:
    """Tied weights get a gradient when their bucket's reduction has been posted."""
    found = []
    for section in ({"stage": 3}, zero(tmp_path, 3, params="nvme", states="nvme")):
        torch.manual_seed(0)
        model = TinyLM(recompute=recompute)
        engine = hpczero.Engine(model, {"zero_optimization": section, "bf16": {"enabled": True}})
        found.append((train(engine), engine.full_state_dict()))
    assert found[0][0] == found[1][0]
    for name, values in found[0][1].items():
        assert torch.equal(values, found[1][1][name]), name


LIMITS: dict[str, dict[str, Any]] = {
    "all stay gathered": {"stage3_param_persistence_threshold": 450},
    "reused": {"stage3_max_reuse_distance": 10_000},
    "foreseen far": {"stage3_prefetch_bucket_size": 10_000},
    "on demand": {"stage3_prefetch_bucket_size": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_limits_change_nothing(tmp_path: Path, limits: dict[str, Any]) -> None:
    expected = run({"stage": 3}, "bf16")
    section = zero(tmp_path, 3, params="nvme", states="nvme") | limits
    assert_same(run(section, "bf16"), expected)


def test_ranks_that_send_messages(tmp_path: Path) -> None:
    expected = run({"stage": 3}, "bf16", node_memory=False)
    section = zero(tmp_path, 3, params="nvme", states="nvme")
    assert_same(run(section, "bf16", node_memory=False), expected)


def test_float64_and_a_frozen_bucket(tmp_path: Path) -> None:
    found = []
    for section in ({"stage": 3}, zero(tmp_path, 3, params="nvme", states="nvme")):
        torch.manual_seed(0)
        model = TinyLM().double()
        model.blocks[1].requires_grad_(False)
        engine = hpczero.Engine(model, {"zero_optimization": section})
        losses, norms = train(engine)
        found.append(Run(engine, losses, norms, engine.full_state_dict(), {}))
        assert found[-1].weights.keys() == found[0].weights.keys()
    assert_same(found[1], found[0])


def test_evaluation_between_a_step_and_the_next(tmp_path: Path) -> None:
    found = []
    for section in ({"stage": 3}, zero(tmp_path, 3, params="nvme", states="nvme")):
        engine = engine_of(section, "bf16")
        losses = []
        for _ in range(3):
            losses += train(engine, 1)[0]
            with torch.no_grad():
                losses.append(engine(tokens(7)).item())
            with hpczero.GatheredParameters(engine.module, modifier_rank=None):
                losses.append(engine.module.blocks[2].down.weight.float().sum().item())
        found.append(losses)
    assert found[0] == found[1]


def test_gradients_can_be_looked_at(tmp_path: Path) -> None:
    found = []
    for section in ({"stage": 3}, zero(tmp_path, 3, params="nvme", states="nvme")):
        engine = engine_of(section, "bf16")
        engine.backward(engine(tokens(RANK)))
        found.append(engine.full_grads())
    assert found[0].keys() == found[1].keys()
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name])


def test_weights_can_be_changed(tmp_path: Path) -> None:
    found = []
    for section in ({"stage": 3}, zero(tmp_path, 3, params="nvme", states="nvme")):
        engine = engine_of(section, "bf16")
        train(engine, 1)
        weight = engine.module.blocks[1].up.weight
        with hpczero.GatheredParameters(weight, modifier_rank=SIZE - 1):
            if RANK == SIZE - 1:
                with torch.no_grad():
                    weight[3].mul_(2)
        train(engine, 1)
        found.append(engine.full_state_dict())
    for name, values in found[0].items():
        assert torch.equal(values, found[1][name]), name


@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
@pytest.mark.parametrize("accumulation", [1, pytest.param(3, marks=SLOW)])
def test_memory_and_io_are_the_formulas(
    tmp_path: Path, tiers: dict[str, Any], accumulation: int
) -> None:
    section = zero(tmp_path, 3, **tiers)
    engine = engine_of(section, "bf16", gradient_accumulation_steps=accumulation)
    train(engine, 3)
    engine.synchronize()
    measured, formula = engine.memory(), engine.memory_formula()
    for tier in ("device", "host", "file"):
        for kind in ("params", "grads", "states"):
            found = engine.world.mean(measured["tier"][tier][kind])  # the last ranks have padding
            told = formula["tier"][tier][kind]
            assert abs(found - told) <= 16 * 64 * len(engine.bucket_shapes()), (tier, kind)
    for tier in ("host", "file"):  # padding included
        assert sum(measured["tier"][tier].values()) == sum(formula["tier"][tier].values())
    blocks = 4096 * 5 * len(engine.bucket_shapes())  # each array ends within a block
    assert measured["buffers"] <= formula["buffers"] + blocks
    least = engine.io_minimum()
    times = 2 * accumulation + 2  # how often any array comes or goes
    for way, nbytes in engine.io().items():
        assert nbytes <= 3 * (least[way] + times * blocks)
        assert nbytes >= 3 * 0.99 * least[way]
    files = "nvme" in tiers.values()
    assert (least["read"] > 0) == files


def test_a_rank_reads_and_writes_its_own_part_only(tmp_path: Path) -> None:
    """Of the model's bytes each rank moves 1/N (ZeRO-Infinity, section 6.1)."""
    engine = engine_of(zero(tmp_path, 3, params="nvme", states="nvme"), "bf16")
    shapes, world = engine.bucket_shapes(), engine.world_size
    one, mine = (sizing.io_minimum(shapes, n, 1, 1, engine.memory_on) for n in (1, world))
    numel = sum(shape.numel for shape in shapes)
    read, written = (2 * 2 + 2 + 12) * numel, (2 + 2 + 12) * numel
    assert one == {"read": read, "written": written, "to_host": 0, "from_host": 0}
    for way in one:
        assert mine[way] == pytest.approx(one[way] / world, rel=0.01)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_nothing_moves_twice(
    tmp_path: Path, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = zero(tmp_path, 3, params="nvme", states="nvme")
    engine = engine_of(section, "bf16", gradient_accumulation_steps=accumulation)
    train(engine, 1)
    engine.synchronize()
    calls: Counter[tuple[str, str]] = Counter()
    move = FileTier.move

    def count(tier: FileTier, memory: memoryview, offset: int, name: str, *, out: bool) -> None:
        calls[name.split("/")[-1], "written" if out else "read"] += 1
        move(tier, memory, offset, name, out=out)

    monkeypatch.setattr(FileTier, "move", count)
    train(engine, 1)
    engine.synchronize()
    buckets = len(engine.bucket_shapes())
    assert {key: number / buckets for key, number in calls.items()} == {
        ("weights", "read"): 2 * accumulation,
        ("weights", "written"): 1,
        ("gradients", "written"): accumulation,
        ("gradients", "read"): accumulation,
        **{(kind, way): 1 for kind in KINDS for way in ("read", "written")},
    }


def test_the_states_of_some_blocks_stay(tmp_path: Path) -> None:
    """Root and first block are 0.43 of the model."""
    engine = engine_of(zero(tmp_path, 2, states="nvme", ratio=0.5), "bf16")
    shapes = engine.bucket_shapes()
    assert [shape.states_stay for shape in shapes] == [True, True, False, False]
    for shape, bucket in zip(shapes, engine._runtime.buckets, strict=True):
        states = [array for array in bucket.task().states.values() if array.tensor.numel()]
        assert all(array.resident == shape.states_stay for array in states)
        assert bucket.states_on == ("device" if shape.states_stay else "file")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_go_to_the_host_and_weights_come_back(tmp_path: Path, stage: int) -> None:
    """4M bytes in 16 bits, over all ranks (ZeRO-Offload, section 4.1), at every stage."""
    engine = engine_of(zero(tmp_path, stage, states="cpu"), "bf16")
    train(engine, 3)
    padded = sum(shape.padded for shape in engine.bucket_shapes())
    for way in ("to_host", "from_host"):
        total = engine.world.mean(engine.io()[way]) * SIZE / 3
        assert total == pytest.approx(2 * padded), way
    assert engine.io()["read"] == engine.io()["written"] == 0


@pytest.mark.parametrize(("stage", "grads"), [(1, None), (2, None), (2, "none"), (3, "cpu")])
@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1), hpczero.Lamb])
def test_only_adam_streams(
    tmp_path: Path, make: Callable[[Any], Any], stage: int, grads: str | None
) -> None:
    """In fp32 weights are their own masters, so that an update may need nothing of a file."""
    model = TinyLM()
    section = zero(tmp_path, stage, grads=grads, states="nvme")
    with pytest.raises(ValueError, match="expected Adam or AdamW"):
        hpczero.Engine(model, {"zero_optimization": section}, optimizer=make(model.parameters()))


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), hpczero.Lamb])
def test_any_optimizer_keeps_states_on_the_host(tmp_path: Path, make: Callable[[Any], Any]) -> None:
    found = []
    host, part = (zero(tmp_path, 2, states="cpu", ratio=ratio) for ratio in (1.0, 0.5))
    for section in ({"stage": 2}, host, part):
        torch.manual_seed(0)
        model = TinyLM()
        optimizer = make(model.parameters())
        engine = hpczero.Engine(model, {"zero_optimization": section}, optimizer=optimizer)
        found.append((train(engine)[0], engine.memory()))
    assert found[0][0] == found[1][0] == found[2][0]
    states = found[0][1]["states"]
    where = [[memory["tier"][tier]["states"] for tier in ("device", "host")] for _, memory in found]
    assert where[:2] == [[states, 0], [0, states]]
    assert sum(where[2]) == states
    stay, all_states = (engine.world.mean(nbytes) for nbytes in (where[2][0], states))
    assert stay == pytest.approx(0.43 * all_states, rel=0.1)


def test_the_file_stays_if_asked_and_is_hdf5(tmp_path: Path) -> None:
    section = zero(tmp_path, 3, params="nvme", states="nvme") | {"offload_keep_files": True}
    engine = engine_of(section, "bf16")
    train(engine)
    engine.synchronize()
    kept = {
        bucket.name: (bucket.own_weights.values(0, bucket.layout.shard), bucket.own_states)
        for bucket in engine._runtime.buckets
    }
    moments = {name: states["exp_avg"].values(0, 64) for name, (_, states) in kept.items()}
    (path,) = tmp_path.iterdir()
    assert path.name.endswith(f"-rank{RANK:05d}.h5")
    with h5py.File(path) as file:
        for name, (master, _) in kept.items():
            assert file[name]["master"].attrs["numel"] == master.numel()
            found = torch.from_numpy(file[name]["master"][: master.numel()])
            assert torch.equal(found, master)
            assert torch.equal(torch.from_numpy(file[name]["exp_avg"][:64]), moments[name])
            rounded = torch.from_numpy(file[name]["weights"][: master.numel()])
            assert torch.equal(rounded.float(), master.bfloat16().float())


def test_nothing_is_left_of_an_engine(tmp_path: Path) -> None:
    section = zero(tmp_path, 3, params="nvme", states="nvme")
    train(engine_of(section), 1)
    gc.collect()
    threads, files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        train(engine_of(section), 1)
        gc.collect()
    assert not list(tmp_path.iterdir())
    until = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.01)  # the threads of updates end by themselves
    assert threading.active_count() <= threads
    assert len(list(Path("/proc/self/fd").iterdir())) <= files


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_five_hundred_steps_leak_nothing(tmp_path: Path) -> None:
    engine = engine_of(
        zero(tmp_path, 3, params="nvme", states="nvme") | {"offload_keep_files": True}
    )

    def state() -> tuple[int, int, int]:
        gc.collect()
        (path,) = tmp_path.iterdir()
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        return path.stat().st_size, threading.active_count(), descriptors

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    train(engine, 20)
    before, pages = state(), resident()
    train(engine, 480)
    assert state() == before
    assert (resident() - pages) * 4096 < 8 << 20


def test_a_forward_begins_while_the_update_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block is updated only after the first has run (GreedySnake's overlap)."""
    engine = engine_of(zero(tmp_path, 3, params="nvme", states="nvme"), "bf16")
    train(engine, 1)
    ran, order = threading.Event(), []
    inner = update.adam_

    def slow(weights: torch.Tensor, *rest: Any) -> None:
        bucket = next(b for b in engine._runtime.buckets if _inside(b.weights, weights))
        if bucket.name == "blocks.2":
            ran.wait(20)
        order.append(bucket.name)
        inner(weights, *rest)

    monkeypatch.setattr(update, "adam_", slow)

    def note(*_: object) -> None:
        order.append("forward")
        ran.set()

    engine.module.blocks[0].register_forward_hook(note)
    engine.backward(engine(tokens(RANK)))
    order.clear()
    ran.clear()
    engine.step()
    engine.backward(engine(tokens(RANK)))
    engine.synchronize()
    assert order.index("forward") < order.index("blocks.2")


def _inside(whole: torch.Tensor, part: torch.Tensor) -> bool:
    begin = whole.data_ptr()
    return begin <= part.data_ptr() < begin + max(1, whole.nbytes)


def test_an_update_that_fails_is_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(zero(tmp_path, 2, states="nvme"), "bf16")
    train(engine, 1)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    engine.backward(engine(tokens(RANK)))
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="reading 'root/") as caught:
        engine.step()
    assert str(tmp_path) in str(caught.value)
