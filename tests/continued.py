"""A model and its training, begun under DeepSpeed and continued here: what both sides need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, WORDS, STEPS = 7, 11, 3
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.01}},
}


class Odd(nn.Module):
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


def odd(seed: int = 0) -> Odd:
    torch.manual_seed(seed)
    return Odd()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def train(engine: Any, steps: Iterable[int]) -> list[float]:
    """Train DeepSpeed's engine or ours, and return this rank's losses."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step * 10 + engine.global_rank)
        words = torch.randint(0, WORDS, (4,), generator=generator)
        loss = nn.functional.cross_entropy(engine(words), words)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
