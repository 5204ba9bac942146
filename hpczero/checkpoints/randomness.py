"""The random state of a rank: torch, CUDA, numpy, python."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping

import numpy as np
import torch

PREFIX = "random/"


def snapshot() -> dict[str, torch.Tensor]:
    """Return this process's random states as flat tensors of bytes."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    numpy = [kind, np.asarray(keys).tolist(), position, has_gauss, gauss]
    states = {
        "torch": torch.get_rng_state().clone(),
        "numpy": _bytes(json.dumps(numpy)),
        "python": _bytes(json.dumps(random.getstate())),
    }
    if torch.cuda.is_available():
        states |= {
            f"cuda{device}": state for device, state in enumerate(torch.cuda.get_rng_state_all())
        }
    return {PREFIX + name: state for name, state in states.items()}


def restore(states: Mapping[str, torch.Tensor]) -> None:
    """Set this process's random states from a snapshot."""
    torch.set_rng_state(states[PREFIX + "torch"])
    kind, keys, position, has_gauss, gauss = json.loads(_text(states[PREFIX + "numpy"]))
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = json.loads(_text(states[PREFIX + "python"]))
    random.setstate((version, tuple(internal), gauss_next))
    for device in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if PREFIX + f"cuda{device}" in states:
            torch.cuda.set_rng_state(states[PREFIX + f"cuda{device}"], device)


def start(seed: int, rank: int, step: int) -> None:
    """Seed a rank that a checkpoint knows nothing of, as a function of what all ranks know."""
    digest = hashlib.blake2b(f"{seed} {rank} {step}".encode(), digest_size=8).digest()
    mixed = int.from_bytes(digest, "little")
    torch.manual_seed(mixed)
    np.random.seed(mixed % (1 << 32))
    random.seed(mixed)


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _text(tensor: torch.Tensor) -> str:
    return bytes(tensor.tolist()).decode()
