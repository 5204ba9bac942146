"""Measure how training scales: a run at each world size, and a command that joins them.

    mpiexec -n 2 python -m benchmarks.scaling run --out DIR/scaling-2.json
    python -m benchmarks.scaling join DIR

Weak: each rank has the same micro-batch at any world size. Strong: the global batch is the same,
and the ranks share it. FLOP per step are counted by the usual convention, whatever is really
computed: 6 x parameters x tokens, and 12 x layers x hidden x seq x tokens for attention, not halved
for its being causal; all parameters count, embeddings too; recomputation doesn't.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import machine

MODES = ("weak", "strong")


def run(args: argparse.Namespace) -> None:
    """Measure this world size; all ranks call."""
    import torch

    from hpczero import data
    from hpczero.comm.world import World
    from hpczero.gpt import PRESETS

    torch.set_num_threads(args.threads)
    world = World.of()
    shape = PRESETS[args.model]
    tokens = data.load(None, world)
    rows: dict[str, Any] = {}
    for mode in MODES:
        batch, rest = (args.weak, 0) if mode == "weak" else divmod(args.strong, world.size)
        if rest or not batch:
            if world.rank == 0:
                print(f"strong: a global batch of {args.strong} doesn't divide by {world.size}")
            continue
        batches = data.Batches(tokens, seq=shape.seq, batch=batch, seed=0)
        seconds, parameters = steps(args, world, batches)
        per_step = batch * shape.seq * world.size
        flops = (6 * parameters + 12 * shape.layers * shape.hidden * shape.seq) * per_step
        median = statistics.median(seconds)
        rows[mode] = {
            "micro_batch": batch,
            "tokens": per_step,
            "median": median,
            "tokens_per_second": per_step / median,
            "tflops_per_rank": flops / median / world.size / 1e12,
            "seconds": seconds,
        }
        if world.rank == 0:
            print(
                f"{mode:7}{world.size:6} ranks  {median:.4f} s  {per_step / median:10.0f} tokens/s"
                f"  {rows[mode]['tflops_per_rank']:.4f} TFLOP/s per rank",
                flush=True,
            )
    if world.rank == 0 and args.out:
        result = machine.record(
            "scaling",
            rows,
            launched=world.size,
            model=args.model,
            parameters=parameters,
            dtype=args.dtype,
            stage=args.stage,
            ranks=world.size,
            nodes=world.nodes,
            threads_per_rank=args.threads,
        )
        machine.write(args.out, result)


def steps(args: argparse.Namespace, world: Any, batches: Any) -> tuple[list[float], int]:
    """Return the seconds of each step, to the end of the slowest rank, and the parameters."""
    import hpczero
    from hpczero.gpt import GPT, PRESETS

    model = GPT(PRESETS[args.model], 0)
    parameters = sum(p.numel() for p in model.parameters())
    engine = hpczero.Engine(
        model,
        {
            "zero_optimization": {"stage": args.stage},
            "bf16": {"enabled": args.dtype == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        },
    )
    seconds = []
    for number in range(args.warmup + args.steps):
        batch = batches.micro_batch(number * world.size + world.rank)
        world.comm.Barrier()
        start = time.perf_counter()
        engine.backward(engine(*batch))
        engine.step()
        world.comm.Barrier()
        seconds.append(time.perf_counter() - start)
    return seconds[args.warmup :], parameters


# ---- the results of several world sizes


def load(folder: Path) -> list[dict[str, Any]]:
    """Return the results in a folder, the smallest world first.

    Raises:
        FileNotFoundError: there are none.
    """
    results = [json.loads(path.read_text()) for path in folder.glob("scaling-*.json")]
    if not results:
        raise FileNotFoundError(f"expected scaling-N.json in {folder}, found none")
    return sorted(results, key=lambda result: int(result["ranks"]))


def efficiencies(results: list[dict[str, Any]], mode: str) -> list[tuple[int, float]]:
    """Return (ranks, tokens/s per rank over that of the smallest world) of each world size."""
    speeds = [
        (result["ranks"], result["rows"][mode]["tokens_per_second"] / result["ranks"])
        for result in results
        if mode in result["rows"]
    ]
    return [(ranks, speed / speeds[0][1]) for ranks, speed in speeds]


def join(folder: Path) -> None:
    """Print the table, and draw scaling.svg and scaling.png."""
    from benchmarks.page import scaling

    results = load(folder)
    print(scaling(*results))
    draw(results, folder / "scaling.svg")
    draw(results, folder / "scaling.png")


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Plot tokens/s and parallel efficiency over ranks."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "scaling"  # the same numbers give the same file
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for mode in MODES:
        points = [
            (result["ranks"], result["rows"][mode]["tokens_per_second"])
            for result in results
            if mode in result["rows"]
        ]
        if points:
            sizes = [n for n, _ in points]
            left.plot(sizes, [speed for _, speed in points], "o-", label=mode)
            shares = [share for _, share in efficiencies(results, mode)]
            right.plot(sizes, shares, "o-", label=mode)
    ranks = [result["ranks"] for result in results]
    first = results[0]["rows"]["weak"]["tokens_per_second"]
    left.plot(ranks, [first * n / ranks[0] for n in ranks], "k:", label="weak, ideal")
    right.axhline(1.0, color="k", linestyle=":")
    left.set(xlabel="ranks", ylabel="tokens/s")
    right.set(xlabel="ranks", ylabel="parallel efficiency", ylim=(0, None))
    left.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(n) for n in ranks])
        axes.xaxis.minorticks_off()
    left.legend()
    more: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix == ".svg" else {"dpi": 150}
    figure.savefig(path, **more)
    plt.close(figure)


def main() -> None:
    """Run or join."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, dest="command")
    one = commands.add_parser("run", help="measure this world size; under mpiexec or srun")
    one.add_argument("--model", default="small")
    one.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    one.add_argument("--stage", type=int, choices=range(4), default=3)
    one.add_argument("--weak", type=int, default=4, help="samples per rank")
    one.add_argument("--strong", type=int, default=8, help="samples over all ranks")
    one.add_argument("--threads", type=int, default=1, help="per rank, at any world size")
    one.add_argument("--warmup", type=int, default=3)
    one.add_argument("--steps", type=int, default=10)
    one.add_argument("--out", type=Path)
    all_of_them = commands.add_parser("join", help="a table and plots of what run has written")
    all_of_them.add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.command == "run":
        run(args)
    else:
        join(args.folder)


if __name__ == "__main__":
    main()
