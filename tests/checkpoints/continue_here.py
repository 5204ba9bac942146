"""Go on from an imported checkpoint: mpiexec -n 2 python continue_here.py FOLDER OUT STAGE."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from continued import CONFIG, STEPS, adamw, odd, train

import hpczero


def main(folder: Path, out: Path, stage: int) -> None:
    model = odd(seed=1)
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    engine, *_ = hpczero.initialize(model=model, optimizer=adamw(model), config=config)
    path, client_state = engine.load_checkpoint(folder)
    assert path == folder / "global_step3"
    told = {
        "client_state": sorted(client_state),
        "steps": [engine.global_steps, engine.global_samples, engine.skipped_steps],
        "lrs": engine.get_lr(),
        "weight_decay": [group["weight_decay"] for group in engine.optimizer.param_groups],
        "losses": train(engine, range(STEPS, 2 * STEPS)),
    }
    (out / f"{engine.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
