"""The update of the shards: Adam on what this rank owns, clipped by the norm of all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpczero.config import Optimizer
from hpczero.gpu.reference import AdamStep, adam_
from hpczero.partition.bucket import Bucket

NORM_BLOCK = 65536
CLIP_EPSILON = 1e-6
"""As torch.nn.utils.clip_grad_norm_; enters once, on the global norm."""


class ShardedAdam:
    """Run Adam or AdamW on the interval of each bucket that this rank updates.

    Costs two moments in the master's dtype per updated element.
    """

    def __init__(self, settings: Optimizer, buckets: Sequence[Bucket]) -> None:
        self._settings = settings
        self.lr = settings.params.lr
        self.steps = 0
        self._buckets = [bucket for bucket in buckets if bucket.trainable]
        self._moments = [(bucket.new_state(), bucket.new_state()) for bucket in self._buckets]

    def norm_squared(self) -> float:
        """Return this rank's part of the squared gradient norm: its shards', in fixed blocks.

        Shards and blocks are the same at every stage, so the sum over ranks in rank order is too.
        """
        total = 0.0
        for bucket in self._buckets:
            for block in torch.split(bucket.own_gradient, NORM_BLOCK):
                wide = block.to(torch.float64)
                total += torch.mul(wide, wide).sum().item()
        return total

    def step(self, scale: float) -> None:
        """Update all owned weights with the reduced gradients times `scale`."""
        self.steps += 1
        params = self._settings.params
        constants = AdamStep(
            lr=self.lr,
            beta1=params.betas[0],
            beta2=params.betas[1],
            eps=params.eps,
            weight_decay=self._settings.weight_decay,
            decoupled=self._settings.type == "AdamW",
            step=self.steps,
            scale=scale,
        )
        for bucket, moments in zip(self._buckets, self._moments, strict=True):
            adam_(bucket.weights, bucket.master, bucket.gradient, *moments, constants)


def clip_scale(norm: float, limit: float) -> float:
    """Return the factor that brings a gradient of this norm to at most `limit` (0: no clipping)."""
    if limit == 0:
        return 1.0
    scale = limit / (norm + CLIP_EPSILON)
    return scale if not scale >= 1.0 else 1.0  # NaN passes, as in torch
