"""Sources for tests: tensors in memory, and numbers that nobody keeps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


class Memory:
    """A Source of tensors in memory that remembers the longest read."""

    def __init__(self, weights: Mapping[str, Tensor], tied: Mapping[str, str] = {}) -> None:
        self.weights = dict(weights)
        self.aliases = dict(tied)
        self.longest = 0

    def kinds(self) -> list[str]:
        return ["weights"]

    def names(self, kind: str) -> list[str]:
        assert kind == "weights"
        return list(self.weights)

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        return tuple(self.weights[name].shape)

    def dtype(self, kind: str, name: str) -> torch.dtype:
        return self.weights[name].dtype

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        assert 0 <= start <= stop <= self.weights[name].numel()
        self.longest = max(self.longest, stop - start)
        return self.weights[name].reshape(-1)[start:stop]

    def tied(self) -> dict[str, str]:
        return self.aliases


class Ramp:
    """A Source of large float32 tensors: element i is i modulo 1000."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)

    def kinds(self) -> list[str]:
        return ["weights"]

    def names(self, kind: str) -> list[str]:
        return list(self.sizes)

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        return (self.sizes[name],)

    def dtype(self, kind: str, name: str) -> torch.dtype:
        return torch.float32

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop).remainder_(1000).float()

    def tied(self) -> dict[str, str]:
        return {}


def of_every_kind() -> dict[str, Tensor]:
    """Return tensors of all dtypes and odd shapes."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for dtype in DTYPES:
        numbers = torch.randint(0, 100, (3, 5), generator=generator)
        tensors[f"layers.0.{str(dtype).removeprefix('torch.')}"] = numbers.to(dtype)
    tensors["scalar"] = torch.tensor(7)
    tensors["scalar_bf16"] = torch.tensor(0.5, dtype=torch.bfloat16)
    tensors["empty"] = torch.empty(0)
    tensors["empty_rows"] = torch.empty(4, 0, 2, dtype=torch.int64)
    tensors["größe"] = torch.arange(6.0).view(1, 6)
    return tensors


def same(a: Tensor, b: Tensor) -> bool:
    """Tell whether tensors have one dtype, shape and bytes."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(
            a.reshape(-1).contiguous().view(torch.uint8),
            b.reshape(-1).contiguous().view(torch.uint8),
        )
    )
