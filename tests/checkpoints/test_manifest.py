"""A manifest checks itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hpczero
from hpczero.checkpoints import manifest as manifests
from hpczero.errors import CheckpointError


def test_every_bit_counts(tmp_path: Path) -> None:
    path = hpczero.Engine(torch.nn.Linear(2, 2), {}).save_checkpoint(tmp_path)
    whole = (path / manifests.FILE).read_bytes()
    for bit in range(0, 8 * len(whole), 3):  # after eight of these every bit of a byte was met
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        (path / manifests.FILE).write_bytes(content)
        with pytest.raises(CheckpointError, match=r"manifest\.json: "):
            manifests.load(path)
