"""A GPT, small enough to read in one sitting.

Pre-norm blocks, causal attention, learned positions, one matrix for embedding and head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """State the shape of a GPT."""

    layers: int
    hidden: int
    heads: int
    seq: int
    """The longest sequence, which the learned positions cover."""
    vocabulary: int = 256
    """Tokens; a text has its bytes."""
    bias: bool = True
    """Whether linear layers and norms have biases."""

    def __post_init__(self) -> None:
        """Refuse shapes that no attention fits."""
        for name in ("layers", "hidden", "heads", "seq", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.hidden % self.heads:
            raise ValueError(
                f"hidden must be a multiple of heads, found {self.hidden} % {self.heads} = "
                f"{self.hidden % self.heads}"
            )


PRESETS = {
    "tiny": GPTConfig(layers=4, hidden=128, heads=4, seq=128),  # 0.8M parameters
    "small": GPTConfig(layers=6, hidden=384, heads=6, seq=256),  # 10.8M
    "medium": GPTConfig(layers=12, hidden=768, heads=12, seq=256),  # 85.5M, GPT-2's blocks
    "large": GPTConfig(layers=36, hidden=1280, heads=20, seq=1024),  # 710M, GPT-2 large's
    "xl": GPTConfig(layers=48, hidden=1600, heads=25, seq=1024),  # 1.48G, GPT-2 XL's
}


class GPT(nn.Module):
    """Predict the next token; the same seed gives the same weights on every rank.

    Args:
        config: the shape.
        seed: of the initial weights, drawn from a generator of their own; on the meta device there
            are none: hpczero.Engine makes them, bucket by bucket, with `initialiser`.
    """

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed = _embedding(config.vocabulary, config.hidden)
        self.position = _embedding(config.seq, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, bias=config.bias)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.head.weight = self.embed.weight
        if not self.embed.weight.is_meta:
            fill = self.initialiser(seed)
            for name, parameter in self.named_parameters():
                fill(name, parameter)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of `targets` after `tokens`, both [batch, seq]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def initialiser(self, seed: int) -> Callable[[str, Tensor], None]:
        """Return what fills parameters in the order of the model, as the same seed does here."""
        generator = torch.Generator().manual_seed(seed)

        @torch.no_grad()
        def fill(name: str, values: Tensor) -> None:
            if values.ndim == 1:
                values.fill_(1.0 if name.endswith("weight") else 0.0)  # norms; all biases
            else:
                # Two branches per block add to the residual stream: so its variance stays near one.
                branch = name.endswith("out.weight")
                std = 0.02 / math.sqrt(2 * self.config.layers) if branch else 0.02
                values.normal_(0.0, std, generator=generator)

        return fill


def _embedding(rows: int, hidden: int) -> nn.Embedding:
    # Not its own constructor: drawing normal numbers on the meta device imports 800 modules.
    values = torch.empty(rows, hidden)
    made: nn.Embedding = nn.Embedding.from_pretrained(values, freeze=False)  # type: ignore[no-untyped-call]
    return made


class Block(nn.Module):
    """Add attention, then a two-layer perceptron, each behind a norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden, bias=config.bias)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` [batch, seq, hidden] with both branches added."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attend causally with several heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=config.bias)
        self.out = nn.Linear(config.hidden, config.hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended values of `x` [batch, seq, hidden]."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )  # [batch, heads, seq, hidden / heads]
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Widen four times, bend, narrow."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden, bias=config.bias)
        self.out = nn.Linear(4 * config.hidden, config.hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the transformed `x` [batch, seq, hidden]."""
        return self.out(F.gelu(self.up(x)))  # type: ignore[no-any-return]
