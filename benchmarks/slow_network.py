"""Time stage 3 on two nodes joined by a slow network, beside FSDP2 and DeepSpeed.

    python benchmarks/slow_network.py --rounds 5 --steps 10 --out slow_network.json

As root, with MPICH; the nodes are network namespaces of this machine, 2 ranks on each (netns.py).
DeepSpeed is taken from this Python, or from --deepspeed-python. Every contender is a job of its
own; they take turns, so that a noisy machine troubles all alike. What crosses the wire is counted
by its device, for all contenders alike: bytes of both directions less headers, each step.

In bf16 ours and FSDP2 reduce gradients in float32, DeepSpeed in bf16. All free what they gathered
after forward and gather it again for backward, unless --keep says that it stays.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import netns
import torch
from machine import cpu
from torch import distributed as dist

from hpczero import data
from hpczero.gpt import GPT, PRESETS

LR = 1e-4
WARMUP = 2
RANKS = 2  # on each node
ALL = 10**9  # elements: more than there are
HERE = Path(__file__).parent

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Contender:
    """One way to train, as one rank sees it."""

    step: Step
    """Return the loss of this rank."""
    meet: Callable[[], object]
    """Wait for all ranks."""
    sender: data.Sender
    version: str
    traffic: Callable[[], object] = lambda: None
    """Return what the contender itself says that the last step moved."""


class Peers:
    """Send by torch.distributed."""

    def __init__(self) -> None:
        os.environ |= {
            "RANK": os.environ["PMI_RANK"],
            "WORLD_SIZE": os.environ["PMI_SIZE"],
            "LOCAL_RANK": os.environ["MPI_LOCALRANKID"],
        }
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()

    def broadcast(self, tensor: torch.Tensor, purpose: str) -> None:
        """Copy a flat tensor from rank 0 to all ranks."""
        dist.broadcast(tensor, 0)


def hpczero(model: GPT, half: bool, keep: bool) -> Contender:
    """Return ours."""
    import hpczero
    from hpczero.comm.world import World

    world = World.of()
    zero = {"stage": 3, "stage3_max_reuse_distance": ALL if keep else 0}
    engine = hpczero.Engine(
        model,
        {
            "zero_optimization": zero,
            "bf16": {"enabled": half},
            "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        },
    )

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss

    version = f"{hpczero.__version__}, {world.library}"
    return Contender(step, lambda: world.mean(0.0), world, version, engine.traffic)


def fsdp2(model: GPT, half: bool, keep: bool) -> Contender:
    """Return torch's fully_shard of every block, with its fused AdamW."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    peers = Peers()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(tokens, targets)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Contender(step, dist.barrier, peers, torch.__version__)


def deepspeed(model: GPT, half: bool, keep: bool) -> Contender:
    """Return DeepSpeed, with torch's fused AdamW, as its own would be compiled first."""
    ops: Any = importlib.import_module("deepspeed.ops")
    ops.__compatible_ops__ = {}  # nor is its all-reduce
    module = importlib.import_module("deepspeed")
    peers = Peers()
    module.init_distributed("gloo")
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if not keep:
        zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "bf16": {"enabled": half},
        "gradient_clipping": 0.0,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    engine = module.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss

    return Contender(step, dist.barrier, peers, module.__version__)


CONTENDERS: dict[str, Callable[[GPT, bool, bool], Contender]] = {
    "hpczero": hpczero,
    "fsdp2": fsdp2,
    "deepspeed": deepspeed,
}


# One rank #


def rank_main(args: argparse.Namespace) -> None:
    """Train, and write this rank's samples into args.out."""
    if args.rank_of == "link":
        result, rank = link()
    else:
        result, rank = train(args)
    (args.out / f"rank{rank}.json").write_text(json.dumps(result))


def train(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    shape = PRESETS[args.model]
    contender = CONTENDERS[args.rank_of](GPT(shape, 0), args.dtypes == ["bf16"], args.keep)
    rank, size = contender.sender.rank, int(os.environ["PMI_SIZE"])
    batches = data.Batches(
        data.load(None, contender.sender), seq=shape.seq, batch=args.batch, seed=0
    )
    seconds, losses, crossed = [], [], []
    for number in range(WARMUP + args.steps):
        batch = batches.micro_batch(number * size + rank)
        before = netns.payload()  # the others wait for this rank
        contender.meet()
        start = time.perf_counter()
        loss = contender.step(*batch)
        contender.meet()  # all end with the slowest
        seconds.append(time.perf_counter() - start)
        crossed.append(netns.payload() - before)
        losses.append(float(loss.detach()))
    result = {
        "seconds": seconds,
        "losses": losses,
        "payload": crossed,
        "version": contender.version,
        "traffic": contender.traffic(),
        "threads": torch.get_num_threads(),
    }
    if dist.is_initialized():
        dist.destroy_process_group()
    return result, rank


def link() -> tuple[dict[str, Any], int]:
    """Measure what MPI makes of the wire and of a node: by ping-pong, and by one all-gather."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    assert node.size == RANKS, f"{node.size} ranks on this node, not {RANKS}"
    large = torch.zeros(1 << 26, dtype=torch.uint8).numpy()

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
    for where, peer in (("inside a node", 1), ("across", RANKS)):
        ping_pong(peer, 8, 100)
        result[where] = {
            "seconds_of_8_bytes": statistics.median(ping_pong(peer, 8, 200)),
            "bytes_per_second_of_64_MiB": large.nbytes
            / statistics.median(ping_pong(peer, large.nbytes, 5)),
        }
    world.Barrier()
    before, start = netns.payload(), time.perf_counter()
    world.Barrier()
    world.Allgather(MPI.IN_PLACE, large)
    world.Barrier()
    result["all_gather_of_64_MiB"] = {
        "seconds": time.perf_counter() - start,
        "payload": netns.payload() - before,
    }
    return result, world.rank


# The job #


def launch(nodes: netns.Nodes, python: str, *argv: str) -> list[dict[str, Any]]:
    """Run this file on the nodes, and return what each rank wrote.

    Raises:
        RuntimeError: the job failed or was late; with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        env = {"PYTHONPATH": str(HERE.parent), "DS_ACCELERATOR": "cpu"}
        env["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it misses the names of the nodes
        log = Path(folder, "log")
        try:
            nodes.run(RANKS, python, str(Path(__file__)), "--out", folder, *argv, env=env, log=log)
        except subprocess.SubprocessError as error:
            raise RuntimeError(f"{argv}: {log.read_text()[-4000:]}") from error
        paths = [Path(folder, f"rank{rank}.json") for rank in range(2 * RANKS)]
        return [json.loads(path.read_text()) for path in paths]


def row(rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the figures of one contender from its rounds; times and payload are rank 0's."""
    seconds = [x for ranks in rounds for x in ranks[0]["seconds"][WARMUP:]]
    crossed = [x for ranks in rounds for x in ranks[0]["payload"][WARMUP:]]
    sent = [ranks["traffic"]["sent"] for ranks in rounds[0] if ranks["traffic"]]
    return {
        "median": statistics.median(seconds),
        "min": min(seconds),
        "max": max(seconds),
        "payload_per_step": statistics.median(crossed),
        "sent_per_step": sum(sent) if sent else None,
        "losses": [statistics.mean(x) for x in zip(*(r["losses"] for r in rounds[0]), strict=True)],
        "version": rounds[0][0]["version"],
        "threads_per_rank": rounds[0][0]["threads"],
        "traffic_of_rank_0": rounds[0][0]["traffic"],
        "rounds": [
            {
                "seconds": ranks[0]["seconds"],
                "payload": ranks[0]["payload"],
                "losses": [r["losses"] for r in ranks],
            }
            for ranks in rounds
        ],
    }


def main() -> None:
    """Run the benchmark, or one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=PRESETS, default="small")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=[*CONTENDERS])
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--batch", type=int, default=2, help="sequences of a rank in a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of a contender in a round")
    parser.add_argument("--keep", action="store_true", help="gathered parameters until backward")
    parser.add_argument("--rate", default="1gbit", help="of each direction, in tc's words")
    parser.add_argument("--deepspeed-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        return rank_main(args)

    pythons = dict.fromkeys(args.contenders, sys.executable)
    if "deepspeed" in pythons:
        find = "import importlib.util as u, sys; sys.exit(u.find_spec('deepspeed') is None)"
        pythons["deepspeed"] = args.deepspeed_python
        if subprocess.run([args.deepspeed_python, "-c", find], check=False).returncode:
            print(f"deepspeed is left out: {args.deepspeed_python} hasn't got it")
            del pythons["deepspeed"]
    size = ["--model", args.model, "--batch", str(args.batch), "--steps", str(args.steps)]
    turns = [(name, dtype) for dtype in args.dtypes for name in pythons]
    samples: dict[str, list[list[dict[str, Any]]]] = {f"{n} {d}": [] for n, d in turns}
    with netns.two_nodes(args.rate) as nodes:
        wire = {"tc": nodes.wire(), **launch(nodes, sys.executable, "--rank-of", "link")[0]}
        for number in range(args.rounds):
            for name, dtype in turns[number:] + turns[:number]:  # none is always first
                more = ["--rank-of", name, "--dtypes", dtype, *(["--keep"] if args.keep else [])]
                samples[f"{name} {dtype}"].append(launch(nodes, pythons[name], *size, *more))
    rows = {name: row(rounds) for name, rounds in samples.items()}
    for name, figures in rows.items():
        print(
            f"{name:16} {figures['median']:.3f} s ({figures['min']:.3f} .. {figures['max']:.3f})  "
            f"{figures['payload_per_step'] / 1e6:6.1f} MB on the wire  "
            f"loss {figures['losses'][0]:.4f} -> {figures['losses'][-1]:.4f}"
        )
    result = {
        "benchmark": "slow_network",
        "command": shlex.join(sys.argv),
        "model": args.model,
        "parameters": sum(p.numel() for p in GPT(PRESETS[args.model], 0).parameters()),
        "nodes": len(nodes.names),
        "ranks_per_node": RANKS,
        "micro_batch": args.batch,
        "keeps_gathered": args.keep,
        "warmup_steps_per_round": WARMUP,
        "wire": wire,
        "machine": {"cpu": cpu(), "cores": os.cpu_count(), "host": platform.machine()},
        "commit": commit(),
        "versions": {
            "torch": torch.__version__,
            "mpi4py": importlib.metadata.version("mpi4py"),
            "mpich": importlib.metadata.version("mpich"),
            **{name: figures["version"] for name, figures in rows.items()},
        },
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return None


def commit() -> str:
    """Return the commit that was measured, with a + if files differ from it."""
    words = ["git", "-C", str(HERE), "describe", "--always", "--abbrev=10", "--dirty=+"]
    done = subprocess.run([*words, "--exclude=*"], check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
