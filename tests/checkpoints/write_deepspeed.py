"""Write ZeRO checkpoints with DeepSpeed, and what is in them by DeepSpeed's own account.

    RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=29500 \
        python write_deepspeed.py FOLDER '{"name": {"zero_optimization": {"stage": 1}}, ...}'

Runs where DeepSpeed is, without this package. Each named case becomes FOLDER/name, with the full
tensors in expected.pt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import numpy as np
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor, nn

WIDTH, WORDS, STEPS = 7, 11, 3


class Model(nn.Module):
    """Odd sizes, tied weights, a frozen layer, buffers, an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.down = nn.Linear(WIDTH, 5)
        self.up = nn.Linear(5, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.emb.weight
        self.one = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("scale", torch.arange(3.0))
        self.register_buffer("temporary", torch.ones(2), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(self.emb(words)))
        return self.head(self.up(self.down(hidden).relu()) * self.one).float()


def train(config: dict) -> tuple[deepspeed.DeepSpeedEngine, Model]:
    torch.manual_seed(0)
    model = Model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.02},
    ]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
            **config,
        },
    )
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step * 10 + engine.global_rank)
        words = torch.randint(0, WORDS, (4,), generator=generator)
        engine.backward(nn.functional.cross_entropy(engine(words), words))
        engine.step()
    return engine, model


def main(folder: Path, cases: dict[str, dict]) -> None:
    # Else it compiles an all-reduce in shared memory when it starts, under a lock that a killed
    # process leaves behind for ever.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed("gloo")
    for name, config in cases.items():
        engine, model = train(config)
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
        engine.destroy()
        deepspeed.comm.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
