"""Time stage 3 on two nodes joined by a slow network, beside FSDP2 and DeepSpeed.

    python -m benchmarks.slow_network --rounds 3 --steps 10

As root, with MPICH; the nodes are network namespaces of this machine, 2 ranks on each (netns.py),
or --ranks; exits with 77 and the reason where there can't be any.
DeepSpeed is taken from this Python, or from --deepspeed-python. Every contender is a job of its
own; they take turns, so that a noisy machine troubles all alike. What crosses the wire is counted
by its device, for all contenders alike: bytes of both directions less headers, each step. The floor
trains alike without communication: what is above it is the price of the network.
Of ours also the part of the gathers' time in which no compute waited, of the rank that waited most.

In bf16 ours and FSDP2 reduce gradients in float32, DeepSpeed in bf16. All free what they gathered
after forward and gather it again for backward, unless --keep says that it stays.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import machine, netns
from benchmarks.contenders import (
    FLOOR,
    LR,
    Alone,
    Contender,
    deepspeed_engine,
    floor,
    gloo,
    launched_rank,
    loop,
    module,
    our_engine,
)

WARMUP = 2
ALL = 10**9  # elements: more than there are

# All imports below are late, as in contenders.py: a rank loads what its contender needs.


def alone(model: Any, half: bool, keep: bool) -> Contender:
    """Return a plain loop without communication."""
    gloo()  # to meet
    return floor(model, half)


def fsdp2(model: Any, half: bool, keep: bool) -> Contender:
    """Return torch's fully_shard of every block, with its fused AdamW."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    gloo()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
    return loop(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True))


def deepspeed(model: Any, half: bool, keep: bool) -> Contender:
    """Return DeepSpeed's stage 3."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if not keep:
        zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    return deepspeed_engine(model, half, zero)


def hpczero(model: Any, half: bool, keep: bool, scope: str = "world") -> Contender:
    """Return ours, with the parameters sharded over the world or over each node."""
    zero = {"stage": 3, "partition_scope": scope}
    return our_engine(model, half, {**zero, "stage3_max_reuse_distance": ALL if keep else 0})


CONTENDERS: dict[str, Callable[[Any, bool, bool], Contender]] = {
    FLOOR: alone,
    "FSDP2": fsdp2,
    "DeepSpeed": deepspeed,
    "hpczero": hpczero,
    "hpczero, parameters per node": partial(hpczero, scope="node"),
}


# ---- what a rank does


def rank_main(args: argparse.Namespace) -> None:
    """Write this rank's samples into args.out."""
    result = link(args.ranks) if args.rank_of == "link" else train(args)
    (args.out / f"rank{launched_rank()}.json").write_text(json.dumps(result))


def train(args: argparse.Namespace) -> dict[str, Any]:
    rank, size = launched_rank(), int(os.environ["WORLD_SIZE"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank % args.ranks)}
    data, gpt = module("data"), module("gpt")
    shape = gpt.PRESETS[args.model]
    batches = data.Batches(data.load(None, Alone()), seq=shape.seq, batch=args.batch, seed=0)
    contender = CONTENDERS[args.rank_of](gpt.GPT(shape, 0), args.dtypes == ["bf16"], args.keep)
    import torch.distributed

    world = None
    if args.rank_of.startswith("hpczero"):
        from hpczero.comm.world import World

        world = World.of()
        assert world.local_size == args.ranks

    def meet() -> None:
        if world is None:
            torch.distributed.barrier()
        else:
            world.mean(0.0)

    seconds, losses, crossed, warmed = [], [], [], {}
    before = netns.payload()
    for number in range(WARMUP + args.steps):
        if world is not None and number == WARMUP:
            warmed = world.timeline.totals()
        batch = batches.micro_batch(number * size + rank)
        meet()
        start = time.perf_counter()
        loss = contender.backward(*batch)
        contender.update()
        meet()  # all end with the slowest
        seconds.append(time.perf_counter() - start)
        now = netns.payload()  # whatever crosses from here on counts as the next step's
        crossed.append(now - before)
        before = now
        losses.append(float(loss.detach()))
    result = {"seconds": seconds, "losses": losses, "payload": crossed, "sent": contender.sent()}
    if world is not None:
        result["gathers_hidden"] = world.timeline.since(warmed).hidden
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return result


def link(ranks: int) -> dict[str, Any]:
    """Measure what MPI makes of the wire and of a node: by ping-pong, and by one all-gather."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)  # freed at the end of the job
    assert node.size == ranks, f"{node.size} ranks on this node, not {ranks}"
    large = np.zeros(1 << 26, np.uint8)

    def ping_pong(peer: int, nbytes: int, repeats: int) -> list[float]:
        """Return the seconds of one way between rank 0 and another."""
        samples = []
        world.Barrier()
        for _ in range(repeats):
            start = time.perf_counter()
            if world.rank == 0:
                world.Send(large[:nbytes], peer)
                world.Recv(large[:nbytes], peer)
            elif world.rank == peer:
                world.Recv(large[:nbytes], 0)
                world.Send(large[:nbytes], 0)
            samples.append((time.perf_counter() - start) / 2)
        return samples

    result: dict[str, Any] = {}
    for where, peer in (("inside a node", 1), ("across", ranks))[ranks == 1 :]:
        ping_pong(peer, 8, 100)
        result[where] = {
            "seconds_of_8_bytes": statistics.median(ping_pong(peer, 8, 200)),
            "bytes_per_second_of_64_MiB": large.nbytes
            / statistics.median(ping_pong(peer, large.nbytes, 5)),
        }
    gathers = result["all_gather_of_64_MiB"] = []
    for _ in range(3):
        world.Barrier()
        before, start = netns.payload(), time.perf_counter()
        world.Barrier()
        world.Allgather(MPI.IN_PLACE, large)
        world.Barrier()
        seconds = time.perf_counter() - start
        gathers.append({"seconds": seconds, "payload": netns.payload() - before})
        assert gathers[-1]["payload"] >= large.nbytes, "MPI found a way past the wire"
    return result


# ---- the jobs


def launch(nodes: netns.Nodes, each: int, python: str, *argv: str) -> list[dict[str, Any]]:
    """Run this file with so many ranks on each node, and return what each rank wrote.

    Raises:
        RuntimeError: the job failed or was late; with the end of what it printed.
    """
    root = str(Path(__file__).parents[1])
    ranks = each * len(nodes.names)
    env = {
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "WORLD_SIZE": str(ranks),
        "DS_ACCELERATOR": "cpu",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it misses the names of the nodes
    }
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        log, command = Path(folder, "log"), [python, "-m", "benchmarks.slow_network", *argv]
        try:
            nodes.run(each, *command, "--ranks", str(each), "--out", folder, env=env, log=log)
        except subprocess.SubprocessError as error:
            raise RuntimeError(f"{argv} failed:\n{log.read_text()[-4000:]}") from error
        return [json.loads(Path(folder, f"rank{n}.json").read_text()) for n in range(ranks)]


def row(rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the figures of one contender from its rounds; times and payload are rank 0's."""
    seconds = [x for ranks in rounds for x in ranks[0]["seconds"][WARMUP:]]
    crossed = [x for ranks in rounds for x in ranks[0]["payload"][WARMUP:]]
    sent = [rank["sent"] for rank in rounds[0]]
    hidden = [x["gathers_hidden"] for ranks in rounds for x in ranks if "gathers_hidden" in x]
    return {
        "median": statistics.median(seconds),
        "min": min(seconds),
        "max": max(seconds),
        "payload_per_step": statistics.median(crossed),
        "sent_by_all_ranks_per_step": None if None in sent else sum(sent),
        "gathers_hidden": min(hidden) if hidden else None,
        "losses": [statistics.mean(x) for x in zip(*(r["losses"] for r in rounds[0]), strict=True)],
        "rounds": [
            {
                "seconds": ranks[0]["seconds"],
                "payload": ranks[0]["payload"],
                "losses_of_ranks": [rank["losses"] for rank in ranks],
            }
            for ranks in rounds
        ],
    }


def main() -> None:
    """Run the benchmark, or one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="small")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=[*CONTENDERS])
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=machine.dtypes())
    parser.add_argument("--ranks", type=int, default=2, help="on each node")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a rank in a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of a contender in a round")
    parser.add_argument("--keep", action="store_true", help="gathered parameters until backward")
    parser.add_argument("--rate", default="1gbit", help="of each direction, in tc's words")
    parser.add_argument("--deepspeed-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--out", type=Path, default=machine.RESULTS / "slow_network.json")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        rank_main(args)
        return

    pythons = dict.fromkeys(args.contenders, sys.executable)
    if "DeepSpeed" in pythons:
        pythons["DeepSpeed"] = args.deepspeed_python
        deepspeed_version = version(args.deepspeed_python)
        if deepspeed_version is None:
            print(f"DeepSpeed is left out: {args.deepspeed_python} hasn't got it")
            del pythons["DeepSpeed"]
    size = ["--model", args.model, "--batch", str(args.batch), "--steps", str(args.steps)]
    turns = [(name, dtype) for dtype in args.dtypes for name in pythons]
    samples: dict[str, list[list[dict[str, Any]]]] = {f"{n} {d}": [] for n, d in turns}
    with netns.two_nodes(args.rate) as nodes:
        wire = {
            "tc": nodes.wire(),
            **launch(nodes, args.ranks, sys.executable, "--rank-of", "link")[0],
        }
        for number in range(args.rounds):
            first = number % len(turns)  # none is always first
            for name, dtype in turns[first:] + turns[:first]:
                more = ["--rank-of", name, "--dtypes", dtype, *(["--keep"] if args.keep else [])]
                found = launch(nodes, args.ranks, pythons[name], *size, *more)
                samples[f"{name} {dtype}"].append(found)
    rows = {name: row(rounds) for name, rounds in samples.items()}
    for name, figures in rows.items():
        print(
            f"{name:16} {figures['median']:.3f} s ({figures['min']:.3f} .. {figures['max']:.3f})  "
            f"{figures['payload_per_step'] / 1e6:6.1f} MB on the wire  "
            f"loss {figures['losses'][0]:.4f} -> {figures['losses'][-1]:.4f}"
        )
    gpt = module("gpt")
    result = machine.record(
        "slow_network",
        rows,
        model=args.model,
        parameters=sum(p.numel() for p in gpt.GPT(gpt.PRESETS[args.model], 0).parameters()),
        nodes=len(nodes.names),
        ranks_per_node=args.ranks,
        threads_per_rank=1,
        micro_batch=args.batch,
        keeps_gathered=args.keep,
        warmup_steps_per_round=WARMUP,
        wire=wire,
    )
    if "DeepSpeed" in pythons:
        result["versions"]["deepspeed"] = deepspeed_version
    machine.write(args.out, result)


def version(python: str) -> str | None:
    """Return the version of a Python's DeepSpeed, None if it has none."""
    code = "import importlib.metadata as m; print(m.version('deepspeed'))"
    told = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return told.stdout.strip() or None


if __name__ == "__main__":
    try:
        main()
    except netns.CannotError as error:
        print(error, file=sys.stderr)
        sys.exit(netns.CANNOT)
