"""Time the file tier beside DeepSpeed's aio, fio, and an update beside its reading and writing.

    mpiexec -n 2 python -m benchmarks.tiers --out tiers.json

- disk: GB/s of reading and writing one file by one process, past the system's cache, from memory
  that was filled before. DeepSpeed's handle and fio have their best of several settings in one
  round, and take turns with ours then.
- update: a step of Adam on states, gradients and weights in files, beside the same reading and
  writing without computing, and the same update in memory.
- slices: every rank reads its part of a bucket and all gather it (ZeRO-Infinity, section 6.1),
  beside one rank that reads all and broadcasts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from hpczero.comm.wire import Cargo
from hpczero.comm.world import World
from hpczero.gpu.adam import adam_
from hpczero.gpu.reference import AdamStep
from hpczero.infinity.filetier import FileTier
from hpczero.infinity.stream import Chunk, Use, parts, stream
from hpczero.infinity.tier import Array, Memory, Tier
from hpczero.sizing import STREAMED
from hpczero.train import share_cores

Act = Callable[[], object]
WAYS = ("write", "read")
CONSTANTS = AdamStep(1e-3, 0.9, 0.999, 1e-8, 0.0, True, 1)


def walk(array: Array, way: str) -> None:
    """Read or write a whole array, part by part."""
    for _ in stream(parts(array, reads=way == "read")):
        pass


def timed(acts: dict[str, Act], rounds: int) -> dict[str, list[float]]:
    """Time acts that take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in acts}
    for number in range(rounds):
        turn = number % len(acts)
        for name in [*acts][turn:] + [*acts][:turn]:
            start = time.perf_counter()
            acts[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


# ---- disk


def deepspeed(path: Path, nbytes: int, tries: list[tuple[int, int, int]]) -> dict[str, Act]:
    """Return reading and writing by DeepSpeed's handle at its best block, depth and threads."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    module = AsyncIOBuilder().load(verbose=False)
    path.write_bytes(b"")
    with path.open("r+b") as file:
        file.truncate(nbytes)
    best: dict[str, Act] = {}
    handles = [module.aio_handle(block, depth, False, True, n) for block, depth, n in tries]
    buffer = handles[0].new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    for way in WAYS:
        acts: dict[str, Act] = {}
        for handle, setting in zip(handles, tries, strict=True):
            call = handle.sync_pwrite if way == "write" else handle.sync_pread
            acts[str(setting)] = partial(call, buffer, str(path), 0)
        found = timed(acts, 1)
        best[way] = acts[min(found, key=lambda name: found[name][0])]
    return best


def fio(path: Path, nbytes: int, way: str, block: str, depth: int) -> float:
    """Return the seconds of fio's libaio with O_DIRECT."""
    told = subprocess.run(
        [
            *("fio", "--name=t", f"--filename={path}", f"--size={nbytes}", f"--rw={way}"),
            *(f"--bs={block}", f"--iodepth={depth}", "--ioengine=libaio", "--direct=1"),
            *("--output-format=json", "--thread", "--allow_file_create=1"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(json.loads(told.stdout)["jobs"][0][way]["bw_bytes"])


def disk(folder: Path, nbytes: int, rounds: int, quick: bool) -> dict[str, Any]:
    """Return GB/s by contender and way."""
    tier = FileTier(folder, 0)
    array = tier.zeros("a", nbytes // 4, torch.float32)
    seconds: dict[str, dict[str, list[float]]] = {"hpczero": {"write": [], "read": []}}

    acts: dict[str, dict[str, Act]] = {"hpczero": {way: partial(walk, array, way) for way in WAYS}}
    if not quick and importlib.util.find_spec("deepspeed") is not None:
        tries = [(1 << 20, 32, 1), (1 << 20, 32, 4), (1 << 23, 8, 4), (1 << 20, 128, 8)]
        acts["DeepSpeed aio"] = deepspeed(folder / "theirs", nbytes, tries)
        seconds["DeepSpeed aio"] = {"write": [], "read": []}
    best: dict[str, tuple[str, int]] = {}
    if shutil.which("fio") is not None:
        tried = [("4M", 4)] if quick else [(b, d) for b in ("1M", "4M") for d in (1, 4, 32)]
        for way in WAYS:
            best[way] = max(tried, key=lambda t: fio(folder / "fio", nbytes, way, *t))
        seconds["fio"] = {"write": [], "read": []}
    for _ in range(rounds):
        for way in WAYS:
            for name, ways in acts.items():
                if (name, way) == ("hpczero", "write"):
                    array.tensor.fill_(1.0)  # it gives its memory back with every writing
                start = time.perf_counter()
                ways[way]()
                seconds[name][way].append(time.perf_counter() - start)
            if best:
                seconds["fio"][way].append(nbytes / fio(folder / "fio", nbytes, way, *best[way]))
    direct = tier.direct
    tier.close()
    return {
        name: {
            way: {
                "gigabytes_per_second": nbytes / statistics.median(spent) / 1e9,
                "seconds": spent,
                **({"setting": "{}, depth {}".format(*best[way])} if name == "fio" else {}),
            }
            for way, spent in ways.items()
        }
        | ({"direct": direct} if name == "hpczero" else {})
        for name, ways in seconds.items()
    }


# ---- update


def update(folder: Path, numel: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of an update in files, of its reading and writing, and in memory."""

    def arrays(tier: Tier) -> dict[str, Array]:
        dtypes = {"gradient": torch.bfloat16, "weights": torch.bfloat16}
        names = ("gradient", "master", "exp_avg", "exp_avg_sq", "weights")
        made = {name: tier.zeros(name, numel, dtypes.get(name, torch.float32)) for name in names}
        for array in made.values():
            with array.anew() as values:
                values.fill_(0.01)
        return made

    def step(made: dict[str, Array], computes: bool) -> None:
        chunks = []
        for lo in range(0, numel, STREAMED):
            hi = min(lo + STREAMED, numel)
            uses = [
                Use(array, lo, hi, name != "weights", name != "gradient")
                for name, array in made.items()
            ]
            chunks.append(Chunk(slice(lo, hi), uses))
        for place in stream(chunks):
            if computes:
                t = {name: array.tensor[place] for name, array in made.items()}
                adam_(
                    t["weights"],
                    t["master"],
                    t["gradient"],
                    t["exp_avg"],
                    t["exp_avg_sq"],
                    CONSTANTS,
                )

    tier = FileTier(folder, 0)
    on_file, in_memory = arrays(tier), arrays(Memory("device"))
    acts: dict[str, Act] = {
        "in files": lambda: step(on_file, True),
        "reading and writing alone": lambda: step(on_file, False),
        "in memory": lambda: step(in_memory, True),
    }
    seconds = timed(acts, rounds)
    tier.close()
    medians = {name: statistics.median(spent) for name, spent in seconds.items()}
    bound = max(medians["reading and writing alone"], medians["in memory"])
    return {
        "parameters": numel,
        "over_the_slower": medians["in files"] / bound,
        "seconds": seconds,
    }


# ---- slices


def slices(folder: Path, world: World, nbytes: int, rounds: int) -> dict[str, Any]:
    """Return the seconds until all ranks have a bucket, by the way it is read; all ranks call."""
    numel = nbytes // 2 // world.size * world.size
    tier = FileTier(folder, world.rank)
    part = tier.zeros("part", numel // world.size, torch.bfloat16)
    whole = tier.zeros("whole", numel if world.rank == 0 else 0, torch.bfloat16)
    take = None if world.node_memory is None else world.node_memory.shared
    full = (
        torch.empty(numel, dtype=torch.bfloat16)
        if take is None
        else take(2 * numel).view(torch.bfloat16)
    )
    private = torch.empty(numel, dtype=torch.bfloat16)
    cargo = Cargo("benchmark", "bucket", nbytes)

    def own() -> None:
        world.gathers.all_gather(cargo, full, part.tensor, within=part.coming()).result()

    def owner() -> None:
        with whole.here() as values:
            if world.rank == 0:
                private.copy_(values)
        world.gathers.broadcast(cargo, private).result()

    acts: dict[str, Act] = {"each its part, then gather": own, "one all, then broadcast": owner}
    seconds: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(rounds):
        for name, act in acts.items():
            world.comm.Barrier()
            start = time.perf_counter()
            act()
            seconds[name].append(max(world.comm.allgather(time.perf_counter() - start)))
    tier.close()
    return {"bytes": nbytes, "seconds": seconds}


def main() -> None:
    """Run the benchmark; all ranks call."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="without DeepSpeed, fio at one setting"
    )
    parser.add_argument("--folder", type=Path, help="(a temporary one)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    world = World.of()
    share_cores(world)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder, nbytes = Path(name), args.mebibytes << 20
        rows: dict[str, Any] = {"slices": slices(folder, world, nbytes // 8, args.rounds)}
        if world.rank == 0:
            rows["disk"] = disk(folder, nbytes, args.rounds, args.quick)
            rows["update"] = update(folder, nbytes // 32, args.rounds)
        world.gathers.meet("the end").result()
    if world.rank != 0:
        return
    for name, row in rows["disk"].items():
        told = "  ".join(f"{w} {row[w]['gigabytes_per_second']:.2f}" for w in WAYS)
        print(f"{name:16}{told} GB/s", flush=True)
    for kind in ("update", "slices"):
        for name, spent in rows[kind]["seconds"].items():
            print(f"{name:32}{statistics.median(spent):.3f} s", flush=True)
    print(
        f"update over the slower of its parts: {rows['update']['over_the_slower']:.2f}", flush=True
    )
    if args.out:
        result = machine.record(
            "tiers",
            rows,
            launched=world.size,
            ranks=world.size,
            bytes=nbytes,
            threads_per_rank=torch.get_num_threads(),
        )
        machine.write(args.out, result)


if __name__ == "__main__":
    main()
