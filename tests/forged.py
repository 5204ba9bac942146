"""Folders as DeepSpeed writes them in fp16, which it refuses on most CPUs, written without it."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

STATES = ("exp_avg", "exp_avg_sq")


class ZeroStageEnum(int, Enum):
    optimizer_states = 1
    gradients = 2
    weights = 3


class DynamicLossScaler:
    def __init__(self) -> None:
        self.cur_scale = 65536.0
        self.cur_iter = 40
        self.last_overflow_iter = 12
        self.dynamic = True
        self.dtype = torch.float16


@pytest.fixture
def deepspeed_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let classes of this file be pickled under DeepSpeed's names."""
    for cls, name in (
        (ZeroStageEnum, "deepspeed.runtime.zero.config"),
        (DynamicLossScaler, "deepspeed.runtime.fp16.loss_scaler"),
    ):
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            part = ".".join(parts[:i])
            monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
        monkeypatch.setattr(sys.modules[name], cls.__name__, cls, raising=False)
        monkeypatch.setattr(cls, "__module__", name)


def example() -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 5), "b": (7,), "c": (2, 2, 2), "d": (1,)}
    return {
        kind: {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for kind in ("weights", *STATES)
    }


def build(folder: Path, stage: int, ranks: int = 2) -> dict[str, dict[str, Tensor]]:
    """Write a checkpoint of fp16 training and return what is in it."""
    kinds = example()
    frozen = {"e": torch.randn(3, 3).half(), "f": torch.randn(1).half()}
    groups = [["a", "b"], ["c", "d"]]
    flats: dict[str, list[list[Tensor]]] = {}
    for kind, tensors in kinds.items():
        flats[kind] = [[] for _ in range(ranks)]
        for group in groups:
            if stage == 3:
                for rank in range(ranks):
                    parts = [cut(tensors[name], rank, ranks) for name in group]
                    flats[kind][rank].append(torch.cat(parts))
            else:
                run = torch.cat([tensors[name].flatten() for name in group])
                run = torch.nn.functional.pad(run, (0, -run.numel() % (2 * ranks)))
                for rank, piece in enumerate(run.chunk(ranks)):
                    flats[kind][rank].append(piece.clone())
    shapes = [OrderedDict((n, kinds["weights"][n].shape) for n in group) for group in groups]
    files = folder / "global_step40"
    files.mkdir(parents=True)
    (folder / "latest").write_text("global_step40")
    for rank in range(ranks):
        inner = {
            "state": {
                i: {"step": torch.tensor(38.0), **{k: flats[k][rank][i] for k in STATES}}
                for i in range(2)
            },
            "param_groups": [{"lr": 0.1, "params": [0]}, {"lr": np.float64(0.2), "params": [1]}],
        }
        state: dict[str, Any] = {
            "loss_scaler": DynamicLossScaler(),
            "zero_stage": ZeroStageEnum(stage),
            "overflow": False,
        }
        if stage == 3:
            state |= {"partition_count": ranks, "optimizer_state_dict": inner}
            state["fp32_flat_groups"] = flats["weights"][rank]
        else:
            # Without the padding at the end.
            sizes = [sum(kinds["weights"][name].numel() for name in group) for group in groups]
            lean = [
                flat[: max(size - rank * flat.numel(), 0)]
                for flat, size in zip(flats["weights"][rank], sizes, strict=True)
            ]
            state |= {"partition_count": [ranks, ranks], "base_optimizer_state": inner}
            state["single_partition_of_fp32_groups"] = lean
        content = {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"}
        torch.save(content, files / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        module = {n: t.half() for n, t in kinds["weights"].items()} | frozen
        if stage == 3:
            module = {name: torch.empty(0).half() for name in module}
        model = {
            "module": OrderedDict({**module, "tie": module["a"], "buffer": torch.arange(4)}),
            "buffer_names": ["buffer"],
            "param_shapes": shapes,
            "frozen_param_shapes": OrderedDict((n, t.shape) for n, t in frozen.items()),
            "frozen_param_fragments": OrderedDict(
                (n, cut(t, rank, ranks) if stage == 3 else t) for n, t in frozen.items()
            ),
            "shared_params": {"tie": "a"},
            "lr_scheduler": {"last_batch_iteration": 39},
            "skipped_steps": 2,
            "global_steps": 40,
            "global_samples": 320,
            "dp_world_size": ranks,
            "mp_world_size": 1,
            "ds_config": {"fp16": {"enabled": True}},
            "ds_version": "0.19.8",
            "mine": "client",
        }
        if stage == 3:
            torch.save(model, files / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        elif rank == 0:
            torch.save(model, files / "mp_rank_00_model_states.pt")
    kinds["weights"] |= {**frozen, "buffer": torch.arange(4)}
    return kinds


def cut(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """Return a rank's part of a parameter at stage 3, padded."""
    part = -(-tensor.numel() // ranks)
    return torch.nn.functional.pad(tensor.flatten(), (0, part * ranks - tensor.numel()))[
        rank * part : (rank + 1) * part
    ].clone()
