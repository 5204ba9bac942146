"""Ranks of one node share memory: the same bits, fewer bytes, and no surprise."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import environment, launcher
from models import Squared, TinyLM, features, lm_loss, tokens
from mpi4py import MPI
from reference import assert_same_bits, config, train
from torch import nn

import hpczero
from hpczero import sizing
from hpczero.comm.world import World
from hpczero.errors import Disagreement
from hpczero.partition import arena

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
SHM = Path("/dev/shm")

one_node = pytest.mark.skipif(
    "HPCZERO_RANKS_PER_NODE" in os.environ, reason="these ranks pretend to be on several nodes"
)


SLOW = pytest.mark.slow
PRECISIONS = [
    ("fp32", 1),
    ("bf16", 2),
    *(pytest.param(dtype, number, marks=SLOW) for dtype, number in (("fp32", 2), ("bf16", 1))),
]


@pytest.mark.mpi
@pytest.mark.parametrize(("dtype", "accumulation"), PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_changes_no_bit(stage: int, dtype: str, accumulation: int) -> None:
    settings = config(stage, dtype, accumulation, clip=0.05)
    runs = [train(TinyLM, lm_loss, {**settings, "node_memory": use}) for use in (True, False)]
    assert_same_bits(runs)
    if "HPCZERO_RANKS_PER_NODE" not in os.environ:
        sent = [run.engine.traffic()["by_purpose"]["gradients"]["sent"] for run in runs]
        assert sent[0] == 0
        assert (sent[1] > 0) == (SIZE > 1)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("stage", "per_node"),
    [
        pytest.param(stage, n, marks=[] if (stage, n) in {(1, 2), (3, 1)} else SLOW)
        for stage in (0, 1, 2, 3)
        for n in (1, 2, 4)
    ],
)
def test_it_changes_no_bit_on_pretended_nodes(
    per_node: int, stage: int, world_comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCZERO_RANKS_PER_NODE", str(per_node))
    comm = world_comm.Dup()
    assert World.of(comm).nodes == -(-SIZE // per_node)
    for dtype in ("fp32", "bf16"):
        settings = config(stage, dtype, 2, clip=0.05)
        for each in (settings, {**settings, "gradient_accumulation_steps": 1}):
            runs = [
                train(TinyLM, lm_loss, {**each, "node_memory": use}, comm) for use in (True, False)
            ]
            assert_same_bits(runs)
            sent = [run.engine.traffic()["sent"] for run in runs]
            uses = World.of(comm).node_memory is not None
            assert uses == (per_node >= SIZE or (per_node > 1 and SIZE % per_node == 0))
            assert sent[0] < sent[1] if uses else sent[0] == sent[1]
    World.of(comm).close()


@pytest.mark.mpi(min_size=2)
def test_between_nodes_each_byte_crosses_once(
    world_comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    if SIZE % 2 or SIZE < 4:
        pytest.skip("two nodes of as many ranks need four or more")
    monkeypatch.setenv("HPCZERO_RANKS_PER_NODE", str(SIZE // 2))
    comm = world_comm.Dup()
    for dtype, item in (("fp32", 4), ("bf16", 2)):
        engine = train(TinyLM, lm_loss, config(3, dtype), comm).engine
        padded = sum(shape.padded for shape in engine.bucket_shapes())
        purposes = engine.traffic()["by_purpose"]
        sent = purposes["parameters"]["sent"] + purposes["gradients"]["sent"]
        # Two gathers in the dtype of compute and one exchange of sums in float32, by halves.
        assert sent == padded * (2 * item + 4) / SIZE
        for bucket in engine._runtime.buckets:  # between steps nothing is gathered
            assert not bucket.full.any()
    World.of(comm).close()


@pytest.fixture
def two_nodes(
    world_comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MPI.Intracomm]:
    """Give the ranks as two pretended nodes of two."""
    if SIZE != 4:
        pytest.skip("two nodes of two ranks need four")
    monkeypatch.setenv("HPCZERO_RANKS_PER_NODE", "2")
    comm = world_comm.Dup()
    yield comm
    World.of(comm).close()


@pytest.mark.mpi
def test_the_last_of_a_node_gives_pages_back(two_nodes: MPI.Intracomm) -> None:
    expected = train(TinyLM, lm_loss, config(3), two_nodes, steps=4).losses
    torch.manual_seed(0)
    engine = hpczero.Engine(TinyLM(), config(3), two_nodes)
    kept: list[torch.Tensor] = []
    losses = []

    def look(block: nn.Module, *_: object) -> None:
        if RANK % 2 and engine.global_steps == 0:
            kept.append(block.up.weight.detach())  # so this rank can't give its memory back
        elif RANK % 2 == 0 and engine.global_steps > 0:
            time.sleep(0.05)  # the neighbour releases first

    engine.module.blocks[1].register_forward_pre_hook(look)
    for step in range(4):
        loss = engine(tokens(step * SIZE + RANK))
        engine.backward(loss)
        engine.step()
        kept.clear()
        losses.append(engine.world.mean(loss.item()))
    assert losses == expected


@pytest.mark.mpi
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("scope", ["world", "node"])
def test_changes_of_weights_that_stay_gathered_are_seen(
    scope: str, frozen: bool, two_nodes: MPI.Intracomm
) -> None:
    losses, sent = [], []
    for threshold in (0, 10**9):
        torch.manual_seed(0)
        model = TinyLM()
        model.blocks.requires_grad_(not frozen)
        settings = config(3, "bf16")
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
        settings["zero_optimization"]["partition_scope"] = scope
        engine = hpczero.Engine(model, settings, two_nodes)
        for step in range(3):
            engine.backward(engine(tokens(step * SIZE + RANK)))
            engine.step()
            sent.append(engine.traffic()["by_purpose"].get("parameters", {}).get("sent", 0))
            with hpczero.GatheredParameters(model.blocks, modifier_rank=1):
                model.blocks[1].up.weight.data.fill_(RANK + step)
            losses.append(engine.world.mean(engine(tokens(RANK)).item()))
    assert losses[:3] == losses[3:]
    if scope == "node":
        assert sent[:3] == sent[3:]


def over_nodes(dtype: str = "fp32", **more: int) -> dict[str, Any]:
    settings = config(3, dtype, **more)
    settings["zero_optimization"]["partition_scope"] = "node"
    return settings


@pytest.mark.mpi
@pytest.mark.parametrize("per_node", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "accumulation"), PRECISIONS)
def test_parameters_may_be_sharded_over_the_node(
    accumulation: int,
    dtype: str,
    per_node: int,
    world_comm: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HPCZERO_RANKS_PER_NODE", str(per_node))
    comm = world_comm.Dup()
    world, settings = World.of(comm), over_nodes(dtype, accumulation=accumulation)
    if 1 < world.nodes < SIZE and world.node_memory is None:
        with pytest.raises(ValueError, match=r"expected node memory, found none .*use 'wor"):
            hpczero.Engine(TinyLM(), settings, comm)
        return
    run = train(TinyLM, lm_loss, settings, comm)
    assert_same_bits([run, train(TinyLM, lm_loss, config(3, dtype, accumulation), comm)])
    engine, shapes = run.engine, run.engine.bucket_shapes()
    measured, formula = engine.memory(), sizing.memory_formula(shapes, 3, SIZE, accumulation)
    item, local = 2 if dtype == "bf16" else 4, min(per_node, SIZE)
    elements = sum(shape.numel for shape in shapes)
    assert formula["params"] == pytest.approx(item * elements / local, abs=item * len(shapes))
    for kind in ("params", "grads", "states"):
        mean = engine.world.mean(measured[kind])
        assert mean == pytest.approx(formula[kind], abs=16 * len(shapes))
    assert sum(measured[kind] for kind in formula) <= sum(formula.values())
    if 1 < world.nodes < SIZE:
        multiples = sizing.traffic_multiples(3, accumulation, item, accumulation, over_nodes=True)
        traffic = engine.traffic()
        assert traffic["multiples"] == pytest.approx(multiples, abs=1e-9)
        padded = sum(shape.padded for shape in shapes)
        sent = padded * item * (world.nodes - 1) / SIZE  # the new weights once; no gather
        assert traffic["by_purpose"]["parameters"]["sent"] == sent
    world.close()


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_changes_and_checkpoints_reach_all_nodes(dtype: str, two_nodes: MPI.Intracomm) -> None:
    folder = Path(two_nodes.bcast(tempfile.mkdtemp() if RANK == 0 else ""))

    def model() -> TinyLM:
        torch.manual_seed(0)
        made = TinyLM()
        made.blocks[0].requires_grad_(False)
        return made

    def weights(engine: hpczero.Engine) -> list[torch.Tensor]:
        """Return what every rank sees, after rank 0's."""
        with hpczero.GatheredParameters(engine.module):
            mine = torch.cat([p.detach().float().flatten() for p in engine.module.parameters()])
        first = two_nodes.bcast(mine)
        return [first, mine]

    settings = over_nodes(dtype)
    engine = hpczero.Engine(model(), settings, two_nodes)
    engine.backward(engine(tokens(RANK)))
    engine.step()
    for weight in (engine.module.blocks[0].up.weight, engine.module.blocks[1].up.weight):
        with hpczero.GatheredParameters([weight], modifier_rank=3):
            weight.data.fill_(RANK)
        with hpczero.GatheredParameters([weight]):
            assert weight.eq(3).all()
    assert torch.equal(*weights(engine))
    engine.save_checkpoint(folder)
    again = hpczero.Engine(model(), settings, two_nodes)
    again.load_checkpoint(folder)
    found = [*weights(engine), *weights(again)]
    assert all(torch.equal(found[0], other) for other in found)
    for each in (engine, again):
        each.backward(each(tokens(RANK)))
        each.step()
    assert torch.equal(weights(engine)[1], weights(again)[1])
    engine.backward(engine(tokens(RANK)))
    engine.step()
    engine.load_checkpoint(folder)  # while the step's weights may still be on their way
    assert all(torch.equal(found[0], seen) for seen in weights(engine))
    if RANK == 0:
        shutil.rmtree(folder)


@pytest.mark.mpi(min_size=2)
@one_node
def test_the_weights_are_there_once(
    world_comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, layers = 512, 8
    memory = World.of(world_comm).node_memory
    assert memory is not None

    def held() -> int:
        world_comm.Barrier()
        blocks = os.fstat(memory.file).st_blocks
        world_comm.Barrier()
        return blocks * 512

    def build() -> hpczero.Engine:
        blocks = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        return hpczero.Engine(Squared(blocks), config(3, "bf16"), world_comm)

    monkeypatch.setattr(arena, "PATIENCE_SECONDS", 60.0)  # no third slot on a slow machine
    gc.collect()
    World.of(world_comm).reclaim_node_memory()
    before = held()
    engine = build()
    weights = 2 * width * width * layers
    rounding = layers * mmap.PAGESIZE
    assert 0 <= held() - before - weights <= rounding
    for _ in range(2):
        engine.backward(engine(features(RANK, width)))
        engine.step()
    slots = held() - before - weights
    # Of gradients there are at most two in flight and one being filled.
    assert 0 < slots <= SIZE * 3 * (2 * width * width + mmap.PAGESIZE) + rounding
    assert engine.memory()["params"] == pytest.approx(weights / SIZE, rel=0.01)
    assert engine.memory()["buffers"] - engine.memory()["params"] < weights  # nothing is gathered
    del engine
    gc.collect()
    again = build()
    assert 0 <= held() - before - weights <= rounding  # what the first one had is given back
    del again


@pytest.mark.mpi
def test_weights_are_read_only_outside_gathered_parameters() -> None:
    for use in (True, False):
        engine = hpczero.Engine(TinyLM(), {**config(3), "node_memory": use})
        weight = engine.module.norm.weight
        with pytest.raises(RuntimeError, match=r"'norm.weight'.* wrap the access in"):
            weight.data.mul_(2)
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"'norm.weight'.* wrap"):
            weight.mul_(2)


class Branching(nn.Module):
    """Skip a block where asked."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: torch.Tensor, skipped: int) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index != skipped:
                x = block(x)
        return x.square().mean()


@pytest.mark.mpi(min_size=2)
@one_node
def test_an_odd_branch_is_named_before_any_weight_changes(world_comm: MPI.Intracomm) -> None:
    comm = world_comm.Dup()  # the error breaks its World
    torch.manual_seed(0)
    engine = hpczero.Engine(Branching(), config(3), comm)
    before = engine.full_state_dict()
    weight = engine.module.blocks[2].weight
    start = time.monotonic()
    engine.backward(engine(features(RANK), 1 if RANK == SIZE - 1 else -1))
    with pytest.raises(Disagreement, match=r"step 1, entry 2\).*\n.*blocks.1 in forward") as raised:
        engine.step()
    assert time.monotonic() - start < (2 if SIZE <= 2 else 5)  # cores may be two
    assert f"rank {SIZE - 1}: blocks.2 in forward" in str(raised.value)
    engine._runtime._gather(engine._runtime.buckets[2])
    bucket = next(b for b in engine._runtime.buckets if b.name == "blocks.2")
    found = bucket.full[: weight.numel()].view(weight.shape)
    if RANK == 0:
        assert torch.equal(found, before["blocks.2.weight"])


@pytest.mark.mpi
def test_a_node_without_it_sends_messages_and_says_so(
    world_comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    none = (None, "no file in memory: no room" if RANK == SIZE - 1 else "")
    monkeypatch.setattr("hpczero.comm.world.open_node_memory", lambda node: none)
    comm = world_comm.Dup()
    with caplog.at_level(logging.WARNING, "hpczero"):
        run = train(TinyLM, lm_loss, config(3), comm)
    told = "all ranks send messages: no node memory (no file in memory: no room)"
    assert caplog.messages == [told] * (RANK == 0)
    monkeypatch.undo()
    assert World.of(comm).node_memory is None
    assert_same_bits([run, train(TinyLM, lm_loss, config(3))])
    World.of(comm).close()


def test_pretended_nodes_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("0", "-1", "two", ""):
        monkeypatch.setenv("HPCZERO_RANKS_PER_NODE", text)
        with pytest.raises(ValueError, match="HPCZERO_RANKS_PER_NODE: expected a positive number"):
            World(MPI.COMM_SELF.Dup())


PROGRAM = """
import torch, hpczero
from torch import nn
engine = hpczero.Engine(nn.Linear(300, 300), {"zero_optimization": {"stage": 3}})
while True:
    engine.backward(engine(torch.randn(8, 300)).square().mean())
    engine.step()
    if engine.global_steps == 3 and engine.rank == 0:
        print("trains", flush=True)
"""


@pytest.mark.timeout(60)
def test_a_killed_run_leaves_nothing_behind() -> None:
    program = f"{PROGRAM}# {uuid.uuid4()}"
    job = subprocess.Popen(
        [launcher(), "-n", "2", sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment({}),
        start_new_session=True,
    )
    assert job.stdout is not None
    while "trains" not in (line := job.stdout.readline()):
        assert line, "the job has ended"
    mine = sharing(program)
    assert len(mine) >= 2
    for process in mine:
        os.kill(process, signal.SIGKILL)
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate()
    while any(process in mine for process in sharing(program)):
        time.sleep(0.01)
    assert [path.name for path in SHM.iterdir() if "hpczero" in path.name] == []


def sharing(source: str) -> set[int]:
    """Return the processes that run a program and have its node memory open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            program = (process / "cmdline").read_bytes()
            files = [os.readlink(file) for file in (process / "fd").iterdir()]  # noqa: PTH115
        except OSError:
            continue
        if source.encode() in program and any("memfd:hpczero" in file for file in files):
            found.add(int(process.name))
    return found
