"""What MPI says about itself, and its speed."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from hpczero.comm import probe
from hpczero.comm.world import World


def test_the_library_is_the_one_that_mpi4py_has() -> None:
    found = probe.library()
    assert found.vendor == MPI.get_vendor()[0]
    assert found.version == ".".join(map(str, MPI.get_vendor()[1]))
    assert found.thread_level == "multiple"
    assert found.paths
    assert "MPIX_Query_cuda_support" in found.gpu.answers


@pytest.mark.parametrize(
    ("queries", "kinds", "environ", "support", "decided_by"),
    [
        ({}, "", {}, "no", "nothing says yes"),
        ({"MPIX_Query_cuda_support": False}, "mpi,system", {}, "no", "nothing says yes"),
        ({"MPIX_Query_cuda_support": True}, "", {}, "yes", "MPIX_Query_cuda_support"),
        ({"MPIX_Query_cuda_support": False}, "mpi,system,cuda:device", {}, "yes", "mpi_memory"),
        ({}, "", {"MPICH_GPU_SUPPORT_ENABLED": "1"}, "maybe", "MPICH_GPU_SUPPORT_ENABLED in the"),
        ({}, "", {"MPICH_GPU_SUPPORT_ENABLED": "0"}, "no", "nothing says yes"),
        ({}, "", {"OMPI_MCA_opal_cuda_support": "true"}, "maybe", "OMPI_MCA_opal_cuda_support"),
        ({}, "", {"MV2_USE_CUDA": "1", "UCX_TLS": "tcp"}, "maybe", "MV2_USE_CUDA"),
    ],
)
def test_gpu_support_is_decided_by_what_says_yes(
    queries: dict[str, bool], kinds: str, environ: dict[str, str], support: str, decided_by: str
) -> None:
    found = probe.decide(queries, kinds, environ)
    assert found.support == support
    assert decided_by in found.decided_by
    assert len(found.answers) == len(queries) + bool(kinds) + len(environ.keys() - {"UCX_TLS"})


@pytest.mark.mpi
def test_places_number_the_ranks_of_a_node() -> None:
    comm = MPI.COMM_WORLD
    places = probe.gather(probe.place())
    assert (places is None) == (comm.rank > 0)
    if places is not None:
        assert [place.rank for place in places] == list(range(comm.size))
        assert [place.local_rank for place in places] == list(range(comm.size))
        assert {(place.node, place.size, place.local_size) for place in places} == {
            (0, comm.size, comm.size)
        }
    assert probe.share(comm.rank) == 0


@pytest.mark.mpi(min_size=2)
def test_bandwidth_is_the_same_figure_on_all_ranks(
    world_comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "BYTES", 1 << 16)
    world = World(world_comm)
    found = probe.bandwidth(world)
    assert list(found) == ["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
    assert all(speed > 0 for row in found.values() for speed in row.values())
    assert world_comm.bcast(found) == found
    world.close()
