"""The World: who is there, and the launcher that isn't ours."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from hpczero.comm.windows import columns
from hpczero.comm.world import World, check_launcher

SIZES = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS"]


@pytest.mark.mpi
def test_world_is_made_once_per_communicator(world_comm: MPI.Intracomm) -> None:
    world = World.of(world_comm)
    assert World.of(world_comm) is world
    assert (world.rank, world.size) == (world_comm.rank, world_comm.size)
    node = int(os.environ.get("HPCZERO_RANKS_PER_NODE", world.size))
    assert world.nodes == -(-world.size // node)
    assert world.local_rank == world.rank % node
    assert world.local_size == min(node, world.size - world.rank // node * node)
    assert (world.node_memory is not None) == columns(world.node_ranks)
    assert len(world.hosts) == world.size
    assert world.mean(float(world.rank)) == sum(range(world.size)) / world.size
    objects = world.gather_objects(("rank", world.rank))
    assert objects == ([("rank", r) for r in range(world.size)] if world.rank == 0 else None)
    tensor = torch.full((3,), world.rank)
    world.broadcast(tensor, "test")
    assert tensor.tolist() == [0, 0, 0]
    world.close()


@pytest.mark.mpi
def test_after_the_leave_nothing_is_carried_and_a_new_world_is_made(
    world_comm: MPI.Intracomm,
) -> None:
    world = World.of(world_comm)
    world.close()
    with pytest.raises(RuntimeError, match=r"after this rank has taken leave"):
        world.mean(1.0)
    again = World.of(world_comm)
    assert again is not world
    assert again.mean(1.0) == 1.0
    again.close()


@pytest.mark.mpi
def test_a_timeline_of_all_ranks_or_an_error_of_rank_0(
    world_comm: MPI.Intracomm, tmp_path: Path
) -> None:
    world = World.of(world_comm)
    world.timeline.restart(True)
    world.mean(1.0)
    fails = pytest.raises(FileNotFoundError) if world.rank == 0 else contextlib.nullcontext()
    with fails:
        world.write_timeline(tmp_path / "missing" / "trace.json")
    world.timeline.restart(True)
    world.mean(1.0)  # goes on
    world.write_timeline(tmp_path / "trace.json")
    if world.rank == 0:
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        bars = [event for event in events if event["ph"] == "X"]
        assert {bar["pid"] for bar in bars} == set(range(world.size))
        assert "mean" in {bar["name"] for bar in bars}
        assert not [bar for bar in bars if "clock" in bar["name"] or "timeline" in bar["name"]]
    world.close()


def test_world_of_self_is_one_rank() -> None:
    world = World(MPI.COMM_SELF)
    assert (world.rank, world.size, world.nodes) == (0, 1, 1)
    assert world.mean(3.0) == 3.0
    world.close()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [*SIZES, "MV2_COMM_WORLD_SIZE", "PALS_SIZE"]:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("name", SIZES)
def test_one_rank_under_a_launcher_of_more(environment: pytest.MonkeyPatch, name: str) -> None:
    environment.setenv(name, "4")
    check_launcher(4)
    with pytest.raises(RuntimeError, match=rf"{name}=4.*--mpi=p"):
        check_launcher(1)


def test_one_rank_where_one_was_started(environment: pytest.MonkeyPatch) -> None:
    check_launcher(1)
    environment.setenv("PMI_SIZE", "1")
    environment.setenv("SLURM_STEP_NUM_TASKS", "2")  # hydra's proxies, not ranks
    check_launcher(1)
