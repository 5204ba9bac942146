"""Time checkpoints beside dd, fio, torch.save and torch.distributed.checkpoint.

    mpiexec -n 2 python -m benchmarks.checkpoint --dir /scratch/x --out checkpoint.json

All write what the Engine's ranks write at stage 3 (weights and two moments in float32: 1 GB for the
medium GPT), all flush it to the disk, and all read it with the page cache dropped; they take turns,
so that a noisy machine troubles all alike. What counts are the ratios of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import hpczero
from benchmarks import machine
from hpczero.checkpoints.reader import Checkpoint
from hpczero.comm.world import World
from hpczero.gpt import GPT, PRESETS
from hpczero.train import share_cores

SETTINGS = {
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
SEQ = 64

Act = Callable[[], object]  # collective; may return the seconds that count
State = dict[str, torch.Tensor]


class Contender:
    """Write this rank's part into a folder, and read it back."""

    def __init__(self, save: Act, load: Act) -> None:
        self.save, self.load = save, load


def torch_save(path: Path, state: State) -> Contender:
    def save() -> None:
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    return Contender(save, lambda: torch.load(path, weights_only=True))


def torch_distributed(folder: Path, state: State) -> Contender:
    """Return DCP as it comes: a file per rank, fsync, gloo; sharded tensors, loaded in place."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    sharded = {
        name: DTensor.from_local(tensor, mesh, [Shard(0)])
        for name, tensor in state.items()
        if name.split("/")[0] in ("weights", "exp_avg", "exp_avg_sq")
    }
    return Contender(
        lambda: dcp.save(sharded, checkpoint_id=folder),
        lambda: dcp.load(sharded, checkpoint_id=folder),
    )


def dd(source: Path, target: Path) -> Contender:
    return Contender(
        lambda: command("dd", f"if={source}", f"of={target}", "bs=16M", "conv=fsync"),
        lambda: command("dd", f"if={target}", "of=/dev/null", "bs=16M"),
    )


def fio(target: Path, nbytes: int) -> Contender:
    def job(kind: str) -> float:
        """Return the seconds that fio counts, without its own start."""
        block = min(1 << 24, nbytes & -4096)  # it refuses blocks larger than the file
        common = [f"--filename={target}", f"--size={nbytes}", f"--bs={block}", "--ioengine=psync"]
        how = [f"--rw={kind}", "--end_fsync=1", "--invalidate=0", "--output-format=json"]
        told = json.loads(command("fio", "--name=x", *common, *how))
        return float(told["jobs"][0]["job_runtime"]) / 1000

    return Contender(lambda: job("write"), lambda: job("read"))


def command(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def drop_cache(folder: Path) -> None:
    """Let the system forget the pages of all files, which are on the disk already."""
    for path in folder.rglob("*"):
        if path.is_file():
            number = os.open(path, os.O_RDONLY)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(number)


def resident(folder: Path) -> int:
    """Return the bytes of a folder's files in the page cache."""
    files = [str(path) for path in folder.rglob("*") if path.is_file()]
    told = command("fincore", "--bytes", "--noheadings", "--output", "RES", *files)
    return sum(int(line) for line in told.split())


class Clock:
    """Time what all ranks do together, to the end of the slowest."""

    def __init__(self, world: World) -> None:
        self.world = world

    def time(self, act: Act) -> float:
        """Return the seconds; those that `act` returns, if it measures itself."""
        self.world.mean(0.0)  # all start together
        start = time.perf_counter()
        told = act()
        mine = told if isinstance(told, float) else time.perf_counter() - start
        return max(self.world.gathers.exchange_objects("seconds", mine).result())


def stall(engine: hpczero.Engine, step: Act, root: Path, tag: str, clock: Clock) -> dict[str, Any]:
    """Return how long an asynchronous save blocks, and how long steps take during it and without.

    Steps without a save come before and after, since the first one after a load is slower.
    """
    step()
    plain = [clock.time(step) for _ in range(2)]
    blocked = clock.time(lambda: engine.save_checkpoint(root, tag, asynchronous=True))
    steps = []
    while clock.world.mean(float((root / tag).exists())) == 0:
        steps.append(clock.time(step))
    plain += [clock.time(step) for _ in range(2)]
    return {"blocked": blocked, "steps": steps, "plain_steps": plain}


def rounds(args: argparse.Namespace, world: World, folder: Path) -> Iterator[dict[str, Any]]:
    shape = PRESETS[args.model]
    engine = hpczero.Engine(GPT(shape, 0), SETTINGS)
    tokens = torch.randint(0, 256, (1, SEQ + 1), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.step()

    step()
    ours = folder / "ours"
    engine.save_checkpoint(ours, "first")
    with Checkpoint(ours / "first") as checkpoint:
        file = checkpoint.file(world.rank)
        state = {name: file.read(name) for name in file.entries}
        total = sum(seal.size for seal in checkpoint.manifest.files)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    source = Path(tempfile.mkdtemp(dir="/dev/shm")) / "bytes"
    with source.open("wb") as file:
        for tensor in state.values():
            file.write(tensor.view(torch.uint8).numpy())
    rank = f"rank{world.rank}"
    contenders = {
        "hpczero": Contender(
            lambda: engine.save_checkpoint(ours, "it"), lambda: engine.load_checkpoint(ours, "it")
        ),
        "dd": dd(source, folder / "dd" / rank),
        "torch.save": torch_save(folder / "torch.save" / rank, state),
        "torch.distributed.checkpoint": torch_distributed(folder / "dcp", state),
    }
    if shutil.which("fio"):
        contenders["fio"] = fio(folder / "fio" / rank, nbytes)
    folders = {name: folder / name for name in contenders} | {
        "hpczero": ours,
        "torch.distributed.checkpoint": folder / "dcp",
    }
    clock = Clock(world)
    try:
        for number in range(1 + args.rounds):
            result: dict[str, Any] = {"bytes": total}
            turn = number % len(contenders)
            names = [*contenders][turn:] + [*contenders][:turn]  # none is always first
            for name in names:
                contender, place = contenders[name], folders[name]
                if world.rank == 0:
                    shutil.rmtree(place, ignore_errors=True)
                    place.mkdir()
                    os.sync()  # whatever others wrote must not be waited for here
                seconds = {"save": clock.time(contender.save)}
                if world.rank == 0:
                    drop_cache(place)
                    seconds["resident"] = resident(place)
                seconds["load"] = clock.time(contender.load)
                world.mean(0.0)
                result[name] = seconds
                if world.rank == 0:
                    shutil.rmtree(place)
            result["asynchronous"] = stall(engine, step, ours, "it", clock)
            if number:  # the first warms up
                yield result
    finally:
        shutil.rmtree(source.parent)


def table(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians, and each against dd's of the same round."""
    gigabytes = samples[0]["bytes"] / 1e9
    names = [name for name, value in samples[0].items() if name not in ("bytes", "asynchronous")]
    rows: dict[str, Any] = {}
    for name in names:
        rows[name] = {}
        for what in ("save", "load"):
            seconds = [sample[name][what] for sample in samples]
            ratios = [sample["dd"][what] / sample[name][what] for sample in samples]
            rows[name][what] = {
                "gigabytes_per_second": gigabytes / statistics.median(seconds),
                "median_seconds": statistics.median(seconds),
                "speed_over_dd": statistics.median(ratios),
                "seconds": seconds,
            }
        rows[name]["resident_bytes_before_load"] = [sample[name]["resident"] for sample in samples]
    shares, slowed = [], []
    for sample in samples:
        lost = sample["asynchronous"]
        usual = statistics.median(lost["plain_steps"])
        more = sum(seconds - usual for seconds in lost["steps"])
        shares.append(lost["blocked"] / sample["hpczero"]["save"])
        slowed.append((lost["blocked"] + more) / sample["hpczero"]["save"])
    rows["asynchronous"] = {
        "blocked_over_synchronous": statistics.median(shares),
        "blocked_and_slower_steps_over_synchronous": statistics.median(slowed),
        "samples": [sample["asynchronous"] for sample in samples],
    }
    return rows


def main() -> None:
    """Run the benchmark; all ranks call."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=PRESETS, default="medium")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path(), help="on the disk to be measured")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    world = World.of()
    share_cores(world)
    mine = tempfile.mkdtemp(dir=args.dir) if world.rank == 0 else None
    folder = Path(world.gathers.exchange_objects("folder", mine).result()[0])
    torch.distributed.init_process_group(
        "gloo", f"file://{folder.absolute()}/meet", rank=world.rank, world_size=world.size
    )
    try:
        samples = list(rounds(args, world, folder))
    finally:
        world.mean(0.0)
        if world.rank == 0:
            shutil.rmtree(folder)
    torch.distributed.destroy_process_group()
    if world.rank:
        return
    rows = table(samples)
    for name, row in rows.items():
        if name != "asynchronous":
            print(f"{name:30}", end="")
            for what in ("save", "load"):
                each = row[what]
                print(
                    f"  {what} {each['gigabytes_per_second']:5.2f} GB/s"
                    f" {each['speed_over_dd']:5.2f} x dd",
                    end="",
                )
            print()
    lost = rows["asynchronous"]
    print(
        f"asynchronous save: blocks for {lost['blocked_over_synchronous']:.0%} of a synchronous one"
        f", with the slower steps {lost['blocked_and_slower_steps_over_synchronous']:.0%}"
    )
    if args.out:
        result = machine.record(
            "checkpoint",
            rows,
            launched=world.size,
            model=args.model,
            stage=3,
            bytes=samples[0]["bytes"],
            ranks=world.size,
            threads_per_rank=torch.get_num_threads(),
            flushed="all saves end with fsync of every file",
            page_cache="dropped before every load (posix_fadvise), as resident bytes show; what "
            "the host of a virtual disk caches is unknown",
            file_system=file_system(args.dir),
        )
        machine.write(args.out, result)


def file_system(path: Path) -> str:
    """Return the kind of file system and its device."""
    found = command("findmnt", "--noheadings", "--output", "FSTYPE,SOURCE", "--target", str(path))
    return " ".join(found.split())


if __name__ == "__main__":
    main()
