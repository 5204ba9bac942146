"""Time a training step of hpczero and of its peers beside a plain loop that doesn't communicate.

    python -m benchmarks.step --model medium --dtype fp32 --out step-medium-fp32.json

Every contender is a job of its own. One job of the floor lives all the time; each contender is
launched, warms up, and then takes turns with the floor, a step each: what counts is the median over
these pairs of the ratio of the two. Memory is measured in runs of their own, alone on the machine
and not timed. Peers are explained in contenders.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.contenders import ALL, CONTENDERS, FLOOR, module
from benchmarks.jobs import Job, Setting

MEMORY_STEPS = 4


def pairs(name: str, floor: Job, setting: Setting, warmup: int, steps: int) -> dict[str, Any]:
    """Launch a contender, and time it and the floor in turns."""
    with Job(name, setting) as job:
        warming = [job.step() for _ in range(warmup)]
        floor.step()  # it has slept meanwhile
        theirs, floors = [], []
        for number in range(steps):
            if number % 2:  # neither is always the first
                floors.append(floor.step())
            theirs.append(job.step())
            if not number % 2:
                floors.append(floor.step())
    return {
        "seconds": [x["seconds"] for x in theirs],
        "floor_seconds": [x["seconds"] for x in floors],
        "warmup_seconds": [x["seconds"] for x in warming],
        "losses": [x["loss"] for x in warming + theirs],
        "sent": [x["sent"] for x in theirs],
    }


def memory(name: str, setting: Setting) -> dict[str, Any]:
    """Return the bytes of each rank, alone on the machine."""
    with Job(name, setting, watch=True) as job:
        building = [x["peak"] for x in job.ask("peak")]
        for _ in range(MEMORY_STEPS):
            job.step()
        stepping = [x["peak"] for x in job.ask("peak")]
        held = [x["held"] for x in job.ask("held")]
    return {"peak_pss_building": building, "peak_pss": stepping, "held": held}


def summary(rounds: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """Return medians of the samples of all rounds."""
    seconds = [x for each in rounds for x in each["seconds"]]
    floors = [x for each in rounds for x in each["floor_seconds"]]
    ratios = [mine / other for mine, other in zip(seconds, floors, strict=True)]
    return {
        "median": statistics.median(seconds),
        "min": min(seconds),
        "max": max(seconds),
        "over_floor": statistics.median(ratios),
        "over_floor_quartiles": quartiles(ratios),
        "tokens_per_second": tokens / statistics.median(seconds),
        "sent": statistics.median(x for each in rounds for x in each["sent"]),
    }


def quartiles(values: list[float]) -> list[float]:
    if len(values) < 2:
        return values * 2
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def main() -> None:
    """Run the benchmark; starts the jobs itself."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="small")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="of each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--contenders", nargs="+", choices=ALL, default=list(CONTENDERS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    setting = Setting.of(args.model, args.dtype, args.batch, args.ranks)
    names = [name for name in args.contenders if available(name)]
    gpt = module("gpt")
    shape = gpt.PRESETS[args.model]
    tokens = args.ranks * args.batch * shape.seq

    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with Job(FLOOR, setting) as floor:
        for _ in range(args.warmup):
            floor.step()
        for number in range(args.rounds):
            for name in names[number % 2 :] + names[: number % 2]:
                rounds[name].append(pairs(name, floor, setting, args.warmup, args.steps))
    rows = {}
    for name, each in rounds.items():
        rows[name] = summary(each, tokens) | memory(name, setting) | {"rounds": each}
        row = rows[name]
        print(
            f"{name:32}{row['median']:8.3f} s ({row['min']:.3f} .. {row['max']:.3f})"
            f"{row['over_floor']:6.2f} x floor  {row['sent'] / 1e6:8.1f} MB sent"
            f"{max(row['held']) / 1e6:8.1f} MB held{max(row['peak_pss']) / 1e6:8.0f} MB PSS"
            f"  loss {each[0]['losses'][-1]:.6f}",
            flush=True,
        )
    if args.out:
        result = machine.record(
            "step",
            rows,
            model=args.model,
            parameters=sum(p.numel() for p in gpt.GPT(shape, 0).parameters()),
            dtype=args.dtype,
            ranks=args.ranks,
            threads_per_rank=setting.threads,
            micro_batch=args.batch,
            seq=shape.seq,
            absent=[name for name in args.contenders if name not in names],
        )
        machine.write(args.out, result)


def available(name: str) -> bool:
    return not name.startswith("DeepSpeed") or importlib.util.find_spec("deepspeed") is not None


if __name__ == "__main__":
    main()
