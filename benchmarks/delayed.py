"""Train the main job with and without delayed updates, and draw both losses.

    python -m benchmarks.delayed --out delayed.json

Both are `hpczero train`, 300 steps on two ranks with Adam's states on the host, from the same
weights on the same batches. The delay begins at step 40 (ZeRO-Offload, section 5.2).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.jobs import launcher

RUNS = {"every update at once": False, "updates delayed by a step": True}


def losses(delayed: bool, steps: int) -> list[float]:
    """Run the main job on two ranks; return its losses."""
    offload: dict[str, Any] = {"device": "cpu", "delayed_update": {"enabled": delayed}}
    config = {
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.95]}},
        "zero_optimization": {"stage": 2, "offload_optimizer": offload},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        argv = [launcher(), "-n", "2", sys.executable, "-m", "hpczero", "train", "--no-progress"]
        argv += ["--config", str(folder / "config.json"), "--steps", str(steps)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*argv, "--out", name], check=True, stdout=subprocess.DEVNULL, env=env)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def draw(rows: dict[str, list[float]], path: Path) -> None:
    """Plot the losses over the steps."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "delayed"  # the same numbers give the same file
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for name, curve in rows.items():
        axes.plot(range(1, len(curve) + 1), curve, label=name, linewidth=1)
    axes.axvline(40, color="k", linestyle=":", linewidth=1)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Run the benchmark; starts the jobs itself."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = {}
    for name, delayed in RUNS.items():
        rows[name] = losses(delayed, args.steps)
        print(f"{name:28}{rows[name][0]:.4f} -> {rows[name][-1]:.4f}", flush=True)
    if args.out:
        result = machine.record("delayed", rows, ranks=2, steps=args.steps)
        machine.write(args.out, result)


if __name__ == "__main__":
    main()
