"""Write ZeRO checkpoints with DeepSpeed, and what is in them by DeepSpeed's own account.

    RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=29500 PYTHONPATH=tests \
        python write_deepspeed.py FOLDER '{"name": {"zero_optimization": {"stage": 1}}, ...}'

Runs where DeepSpeed is, without this package. Each named case becomes FOLDER/name, with the full
tensors in expected.pt and the losses of as many steps more in losses.json, per rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import numpy as np
import torch
from continued import CONFIG, STEPS, Odd, adamw, odd, train
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor

# Without them DeepSpeed refuses torch's own AdamW.
SWITCHES = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def start(config: dict) -> tuple[deepspeed.DeepSpeedEngine, Odd]:
    model = odd()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model), config={**CONFIG, **SWITCHES, **config}
    )
    return engine, model


def main(folder: Path, cases: dict[str, dict]) -> None:
    deepspeed.init_distributed("gloo")
    for name, config in cases.items():
        engine, model = start(config)
        train(engine, range(STEPS))
        rng = np.random.RandomState(3)
        client = {"epoch": 7, "best": np.float64(0.25), "rng": rng.get_state(), "seen": {1, 2}}
        engine.save_checkpoint(folder / name, client_state=client)
        if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
            # 0.19.8 links the states when the first group has stepped, before the others have any.
            engine.optimizer._hp_optimizer_states_linked = False
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        expected: dict[str, dict[str, Tensor]] = {"weights": {}, "exp_avg": {}, "exp_avg_sq": {}}
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                expected["weights"][key] = safe_get_full_fp32_param(parameter).clone()
                for kind in ("exp_avg", "exp_avg_sq"):
                    state = safe_get_full_optimizer_state(parameter, kind)
                    expected[kind][key] = state.clone()
        if engine.global_rank == 0:
            if "grad_accum_dtype" not in str(config) and "alignment" not in str(config):
                consolidated = get_fp32_state_dict_from_zero_checkpoint(folder / name)
                expected["consolidated"] = {
                    key: value.contiguous().clone() for key, value in consolidated.items()
                }
            lrs = [group["lr"] for group in engine.optimizer.param_groups]
            torch.save({**expected, "lrs": lrs}, folder / name / "expected.pt")
        losses = train(engine, range(STEPS, 2 * STEPS))
        (folder / name / f"losses{engine.global_rank}.json").write_text(json.dumps(losses))
        engine.destroy()
        deepspeed.comm.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
