"""Time Adam's update with bf16 gradients in and bf16 weights out, beside a sweep over memory.

    python -m benchmarks.adam --out adam.json

An update reads 14 bytes and writes 14 per parameter. The sweep adds a number in place to as many
bytes: no update can be faster. Contenders take turns; what counts are the ratios of medians.
DeepSpeed's CPUAdam, where it is installed, wants float32 gradients and writes none but float32:
its casts are counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from hpczero.gpu import adam, reference
from hpczero.gpu.reference import AdamStep

BYTES = 28
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1

Act = Callable[[], Any]


def contenders(count: int, twin: bool) -> dict[str, Act]:
    """Return what is timed, each with tensors of its own."""
    made: dict[str, Act] = {}
    sweep = torch.zeros(count * BYTES // 2 // 4)
    made["sweep"] = lambda: sweep.add_(1.0)
    for name, update in (("ours", adam.adam_), ("twin", reference.adam_)):
        if name == "ours" or twin:
            made[name] = ours(update, count)
    made["torch fused and casts"] = fused(count)
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return made
    made["DeepSpeedCPUAdam and casts"] = deepspeed(DeepSpeedCPUAdam, count)
    return made


def states(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(count, generator=generator)
    return master, master.bfloat16(), torch.randn(count, generator=generator).bfloat16()


def ours(update: Any, count: int) -> Act:
    master, weights, grad = states(count)
    moments = torch.zeros(count), torch.zeros(count)
    constants = AdamStep(LR, *BETAS, EPS, DECAY, True, 3)
    return lambda: update(weights, master, grad, *moments, constants)


def fused(count: int) -> Act:
    master, weights, grad = states(count)
    parameter = master.requires_grad_()
    optimizer = torch.optim.AdamW(
        [parameter], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
    )

    def act() -> None:
        parameter.grad = grad.float()
        optimizer.step()
        weights.copy_(parameter.detach())

    return act


def deepspeed(kind: Any, count: int) -> Act:
    master, weights, grad = states(count)
    parameter = torch.nn.Parameter(master)
    optimizer = kind([parameter], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)

    def act() -> None:
        parameter.grad = grad.float()
        optimizer.step()
        weights.copy_(parameter.detach())

    return act


def main() -> None:
    """Run the benchmark in one process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=64_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--twin", action="store_true", help="the twin in torch too, which is slow")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    acts = contenders(args.count, args.twin)
    rows: dict[str, Any] = {}
    for threads in args.threads:
        torch.set_num_threads(threads)
        seconds: dict[str, list[float]] = {name: [] for name in acts}
        for number in range(1 + args.rounds):  # the first warms up
            for name, act in acts.items():
                start = time.perf_counter()
                act()
                if number:
                    seconds[name].append(time.perf_counter() - start)
        sweep, mine = statistics.median(seconds["sweep"]), statistics.median(seconds["ours"])
        rows[str(threads)] = {
            name: {
                "ns_per_parameter": statistics.median(taken) / args.count * 1e9,
                "of_the_sweep": sweep / statistics.median(taken),
                "ours_over_it": mine / statistics.median(taken),
                "seconds": taken,
            }
            for name, taken in seconds.items()
        }
        for name, row in rows[str(threads)].items():
            print(
                f"{threads} thread{'s' if threads > 1 else ' '}  {name:28}"
                f"{row['ns_per_parameter']:7.3f} ns per parameter"
                f"{row['of_the_sweep']:7.2f} of the sweep  ours / it {row['ours_over_it']:5.2f}",
                flush=True,
            )
    if args.out:
        result = machine.record(
            "adam",
            rows,
            parameters=args.count,
            bytes_per_parameter=BYTES,
            kernel=adam.kernel_name(),
        )
        machine.write(args.out, result)


if __name__ == "__main__":
    main()
