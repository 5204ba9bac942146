"""Find the largest GPT that each way of training fits into a given memory, and train it.

    python -m benchmarks.capacity --out capacity.json       # make capacity

Models differ in their number of layers only. Two small ones tell how the peak PSS of a rank grows,
and so the largest that should fit; that one is trained, and tells whether to try larger or smaller
ones.
What a rank needs while it builds the model counts for ours, and not for the others, who make all of
it on every rank. PSS leaves out the system's cache of files: ours go past it where they can.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.contenders import IN_PARTS, OFFLOADED, module, shape_of
from benchmarks.jobs import Job, Setting
from benchmarks.step import available

SMALL = (2, 6)
"""Layers of the models that tell how memory grows."""

LR = 3e-7
"""Small enough for the first steps of the widest and deepest, without a warm-up."""

NAMES = ("DDP", "FSDP2, resharded", "DeepSpeed 3", "hpczero 1", "hpczero 3", *OFFLOADED)


class Search:
    """Look for the largest model of one contender.

    Args:
        name: of the contender.
        shape: hidden, heads and seq of all models.
        dtype: "bf16" or "fp32".
        limit: bytes of peak PSS per rank.
        most: layers, at most: what the disk, or the patience, allows.
        steps: of each try.
    """

    def __init__(
        self, name: str, shape: str, dtype: str, limit: int, most: int, steps: int
    ) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self.limit, self.most, self.steps = limit, most, steps
        self.tries: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        """Return what was found; `error` says why there is none."""
        try:
            found = self._search()
        except RuntimeError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            return {"error": lines[-1][:300], "tries": self.tries}
        if found is None:
            return {"error": f"{SMALL[0]} layers take more", "tries": self.tries}
        return {**found, "at_most": self.most, "tries": self.tries}

    def _search(self) -> dict[str, Any] | None:
        before, last = (self._try(layers) for layers in SMALL)
        fitting = [small for small in (before, last) if small["peak"] <= self.limit]
        best, too_many = fitting[-1] if fitting else None, self.most + 1
        while True:
            more = last["layers"] - before["layers"]
            each = max(1, (last["peak"] - before["peak"]) / more)
            layers = int(last["layers"] + (self.limit - last["peak"]) / each)
            layers = min(layers, too_many - 1)
            if layers < 1 or layers == last["layers"] or (best and layers <= best["layers"]):
                return best
            before, last = last, self._try(layers)
            if last["peak"] > self.limit:
                too_many = layers
            else:
                best = last

    def _try(self, layers: int) -> dict[str, Any]:
        for known in self.tries:
            if known["layers"] == layers:
                return known
        found = train(self.name, layers, self.shape, self.dtype, self.steps)
        self.tries.append(found)
        return found


def train(name: str, layers: int, shape: str, dtype: str, steps: int) -> dict[str, Any]:
    """Train a model for a few steps, print a line, and return losses, times and memory."""
    model = f"{layers}x{shape}"
    setting = replace(Setting.of(model, dtype, 1, 2), lr=LR)
    with Job(name, setting, watch=True) as job:
        building = [x["peak"] for x in job.ask("peak")]
        taken = [job.step() for _ in range(steps)]
        stepping = [x["peak"] for x in job.ask("peak")]
    config = shape_of(module("gpt"), model)
    block = 12 * config.hidden**2 + 13 * config.hidden
    outside = (config.vocabulary + config.seq + 2) * config.hidden
    found = {
        "layers": layers,
        "parameters": layers * block + outside,
        "peak": max(stepping + (building if name in IN_PARTS else [])),
        "peak_pss": stepping,
        "peak_pss_building": building,
        "seconds": [step["seconds"] for step in taken],
        "losses": [step["loss"] for step in taken],
    }
    print(
        f"{name:32}{layers:4d} layers {found['parameters'] / 1e6:8.0f} M parameters"
        f"{found['peak'] / 2**20:8.0f} MiB  {found['seconds'][-1]:6.1f} s a step  "
        f"loss {found['losses'][0]:.4f} -> {found['losses'][-1]:.4f}",
        flush=True,
    )
    return found


def main() -> None:
    """Run the benchmark; starts the jobs itself."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1600x25x128", help="HIDDENxHEADSxSEQ")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default=machine.dtypes()[-1])
    parser.add_argument("--mebibytes", type=int, default=2048, help="peak PSS per rank")
    parser.add_argument("--most", type=int, default=66, help="layers: 66 are 2.0e9 parameters")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    limit = args.mebibytes << 20
    names = [name for name in args.contenders if available(name)]
    rows = {}
    for name in names:
        rows[name] = Search(name, args.shape, args.dtype, limit, args.most, args.steps).run()
        shutil.rmtree(Path(tempfile.gettempdir()) / "offload", ignore_errors=True)
        if "error" in rows[name]:
            print(f"{name:32}none: {rows[name]['error']}", flush=True)
    if args.out:
        result = machine.record(
            "capacity",
            rows,
            shape=args.shape,
            limit=limit,
            dtype=args.dtype,
            ranks=2,
            steps=args.steps,
            absent=[name for name in args.contenders if name not in names],
        )
        machine.write(args.out, result)


if __name__ == "__main__":
    main()
