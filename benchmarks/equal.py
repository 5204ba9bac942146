"""Train one GPT with all that stage 3 shards in files, and again with all in memory.

    python -m benchmarks.equal --out equal.json

The losses must be the same, bit for bit. In memory it takes 16 bytes per parameter over all ranks,
in files what capacity.py says.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import machine
from benchmarks.capacity import train

NAMES = ("hpczero 3, all in files", "hpczero 3, made in parts")


def main() -> None:
    """Run the benchmark; starts the jobs itself, and fails if losses differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=33, help="33 are 1.0e9 parameters")
    parser.add_argument("--shape", default="1600x25x128", help="HIDDENxHEADSxSEQ")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default=machine.dtypes()[-1])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = {name: train(name, args.layers, args.shape, args.dtype, args.steps) for name in NAMES}
    files, memory = (row["losses"] for row in rows.values())
    if files != memory:
        sys.exit(f"expected equal losses, found {files} in files and {memory} in memory")
    if args.out:
        result = machine.record(
            "equal", rows, shape=args.shape, dtype=args.dtype, ranks=2, steps=args.steps
        )
        machine.write(args.out, result)


if __name__ == "__main__":
    main()
