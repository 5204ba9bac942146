"""Small models with the shapes that break partitioning elsewhere."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, SEQUENCE = 37, 12, 9


def tokens(number: int, count: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, VOCABULARY, (count, SEQUENCE + 1), generator=generator)


def features(number: int, width: int = WIDTH, count: int = 4) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(number))


class Block(nn.Module):
    """A residual MLP with ragged sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.down = nn.Linear(3 * WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TinyLM(nn.Module):
    """An embedding tied to the head, and blocks between, recomputed or not."""

    def __init__(self, blocks: int = 3, recompute: str = "no") -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            if self.recompute == "no":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def lm_loss(model: Any, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(tokens(number))
    return loss


class Squared(nn.Module):
    """Turn a module from WIDTH features into a loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = next(self.inner.parameters(), None)
        if first is not None and first.dtype.is_floating_point:
            x = x.to(first.dtype)
        return self.inner(x).float().square().sum(-1).mean()


def feature_loss(model: Any, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(features(number))
    return loss
