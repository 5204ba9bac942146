"""Time collectives beside raw mpi4py, gloo and plain copies of memory.

    mpiexec -n 2 python -m benchmarks.collectives --out collectives-2.json

The bytes are those of the full vector. Contenders take turns, and the slowest rank counts. MPI has
no bf16: raw mpi4py sums it as anybody would, through float32. Over node memory the time includes
writing what others look at: a rank's shard of the gathered vector, a copy of what is reduced. The
same reads and writes by ranks that wait for nobody are what memory allows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from mpi4py import MPI

from benchmarks import machine
from hpczero.comm.copies import copy_into
from hpczero.comm.sums import sum_into
from hpczero.comm.wire import Cargo, buffer
from hpczero.comm.world import World
from hpczero.train import share_cores

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MEGABYTES = [1, 4, 16, 64, 256]
MPI4PY, GLOO, ALONE = "mpi4py", "gloo", "unsynchronised"

Act = Callable[[], Any]
Allocator = Callable[[int, torch.dtype], torch.Tensor]


def private(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return memory of this process."""
    return torch.empty(count, dtype=dtype)


def on_node(kind: str, world: World) -> Allocator:
    """Return what takes memory of the node: the same for all ranks where they gather."""
    memory = world.node_memory
    assert memory is not None
    take = memory.shared if kind == "all_gather" and world.nodes == 1 else memory.empty
    return lambda count, dtype: take(count * dtype.itemsize).view(dtype)


class Vectors:
    """Hold a contender's vectors: the ranks' own values, and where results go."""

    def __init__(self, allocate: Allocator, count: int, dtype: torch.dtype, world: World) -> None:
        self.full = allocate(count, dtype)
        self.shard = private(count // world.size, dtype)
        self.own = self.full[world.rank * len(self.shard) : (world.rank + 1) * len(self.shard)]

    def fill(self, kind: str, rank: int) -> None:
        """Put rank + 1 wherever this rank's values are."""
        self.full.fill_(0 if kind == "all_gather" else rank + 1)
        self.own.fill_(rank + 1)
        self.shard.fill_(rank + 1)

    def check(self, kind: str, size: int) -> None:
        """Compare what came out.

        Raises:
            ValueError: it is wrong.
        """
        total = size * (size + 1) // 2
        if kind == "all_gather":
            wanted, found = torch.arange(1, size + 1), self.full.view(size, -1)[:, [0, -1]].T
        else:
            out = self.shard if kind == "reduce_scatter" else self.full
            wanted, found = torch.tensor(total), out[[0, -1]]
        if not bool((found == wanted).all()):
            raise ValueError(f"{kind}: expected {wanted.tolist()}, found {found.tolist()}")


def ours(kind: str, v: Vectors, world: World) -> Act:
    cargo = Cargo("benchmark", "vector", v.full.nbytes)
    if kind == "all_gather":
        return lambda: world.gathers.all_gather(cargo, v.full, v.own).result()
    if kind == "reduce_scatter":
        return lambda: world.reductions.reduce_scatter(cargo, v.full, v.shard).result()
    return lambda: world.reductions.all_reduce(cargo, v.full).result()


def ours_on_node(kind: str, v: Vectors, world: World) -> Act:
    """Write into the node's memory what a gather brings there or a reduction reads, and do that."""
    gathers = kind == "all_gather"
    source, target = (v.shard, v.own) if gathers else (torch.ones_like(v.full), v.full)
    act = ours(kind, v, world)
    if gathers and world.nodes == 1:  # all look at one vector
        act = lambda: world.gathers.meet("written").result()  # noqa: E731
    source.fill_(world.rank + 1)

    def written() -> None:
        copy_into(target, source)
        act()

    return written


def mpi4py(kind: str, v: Vectors, world: World) -> Act:
    comm = world.comm
    if kind == "all_gather":
        return lambda: comm.Allgather(MPI.IN_PLACE, buffer(v.full))
    half = v.full.dtype == torch.bfloat16

    def act() -> None:
        full = v.full.float() if half else v.full
        if kind == "all_reduce":
            comm.Allreduce(MPI.IN_PLACE, [buffer(full), MPI.FLOAT])
            out = v.full
        else:
            mine = torch.empty(len(v.shard)) if half else v.shard
            comm.Reduce_scatter_block([buffer(full), MPI.FLOAT], [buffer(mine), MPI.FLOAT])
            full, out = mine, v.shard
        if half:
            out.copy_(full)

    return act


def gloo(kind: str, v: Vectors, world: World) -> Act:
    dist = torch.distributed
    if kind == "all_gather":  # torch 2.13 has new names for these two
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda: gather(v.full, v.own)
    if kind == "reduce_scatter":
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return lambda: reduce(v.shard, v.full)
    return lambda: dist.all_reduce(v.full)


def alone(kind: str, v: Vectors, world: World) -> Act:
    """Read and write as much as `ours_on_node`, in this process's memory, with nobody."""
    source, slices = torch.ones_like(v.full), v.full.view(world.size, -1).unbind()
    others = [piece for piece in slices if piece.data_ptr() != v.own.data_ptr()]
    sums = world.reductions.staging.sums

    def act() -> None:
        if kind == "all_gather":
            copy_into(v.own, v.shard)
            return
        copy_into(v.full, source)
        sum_into(v.own if kind == "all_reduce" else v.shard, slices, sums)
        for piece in others if kind == "all_reduce" else ():
            copy_into(piece, v.own)

    return act


def meet_over_gloo(world: World) -> None:
    """Start torch.distributed between the ranks of this job."""
    host, port, store = "127.0.0.1" if world.nodes == 1 else world.hosts[0], 0, None
    if world.rank == 0:
        store = torch.distributed.TCPStore(
            host, 0, world.size, is_master=True, wait_for_workers=False
        )
        port = store.port
    port = world.comm.bcast(port)
    store = store or torch.distributed.TCPStore(host, port, world.size, is_master=False)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=world.rank, world_size=world.size
    )


def measure(kind: str, megabytes: int, dtype: str, rounds: int, world: World) -> dict[str, Any]:
    """Time all contenders at one size, taking turns."""
    count = megabytes * 10**6 // DTYPES[dtype].itemsize // world.size * world.size
    makers: dict[str, tuple[Any, Allocator]] = {
        "hpczero, messages": (ours, private),
        MPI4PY: (mpi4py, private),
        GLOO: (gloo, private),
        ALONE: (alone, private),
    }
    if world.node_memory is not None:
        makers = {"hpczero, node memory": (ours_on_node, on_node(kind, world)), **makers}
    vectors, acts = {}, {}
    for name, (make, allocate) in makers.items():
        vectors[name] = Vectors(allocate, count, DTYPES[dtype], world)
        acts[name] = make(kind, vectors[name], world)
        world.comm.Barrier()
        vectors[name].fill(kind, world.rank)
        world.comm.Barrier()  # where memory is shared, all must have filled theirs
        acts[name]()
        if name != ALONE:
            vectors[name].check(kind, world.size)
        world.comm.Barrier()
        vectors[name].full.zero_()  # sums of sums would overflow
    seconds: dict[str, list[float]] = {name: [] for name in acts}
    for number in range(rounds):
        turn = number % len(acts)
        for name in [*acts][turn:] + [*acts][:turn]:
            world.comm.Barrier()
            start = time.perf_counter()
            acts[name]()
            mine = time.perf_counter() - start
            seconds[name].append(world.comm.allreduce(mine, MPI.MAX))
    nbytes = count * DTYPES[dtype].itemsize
    return {
        name: {
            "gigabytes_per_second": nbytes / statistics.median(taken) / 1e9,
            "median": statistics.median(taken),
            "seconds": taken,
        }
        for name, taken in seconds.items()
    }


def main() -> None:
    """Run the benchmark; all ranks call."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=MEGABYTES)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    world = World.of()
    share_cores(world)
    meet_over_gloo(world)
    rows = []
    for kind in KINDS:
        for dtype in args.dtypes:
            for megabytes in args.megabytes:
                row = measure(kind, megabytes, dtype, args.rounds, world)
                rows.append(
                    {"collective": kind, "dtype": dtype, "megabytes": megabytes, "contenders": row}
                )
                if world.rank == 0:
                    each = "  ".join(
                        f"{name} {x['gigabytes_per_second']:6.2f}" for name, x in row.items()
                    )
                    print(f"{kind:15}{dtype} {megabytes:4d} MB  GB/s: {each}", flush=True)
    torch.distributed.destroy_process_group()
    if args.out and world.rank == 0:
        result = machine.record(
            "collectives",
            rows,
            launched=world.size,
            ranks=world.size,
            nodes=world.nodes,
            threads_per_rank=torch.get_num_threads(),
        )
        machine.write(args.out, result)


if __name__ == "__main__":
    main()
