"""Byte tokens from text, and batches that depend on nothing but a seed and a number.

The default text is the source of Python's own standard library (without its tests, in sorted
order, at most 16 MiB): real text that every machine with this program already has, the same on
every run of one Python.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

LIMIT = 16 << 20
"""Bytes of the default text at most; Python 3.11's is 12.6 MB."""

_LOOKED_AT = 4096  # a file of a folder with a zero byte among its first bytes is no text
_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
_TEXT, _FILE, _ERROR = range(3)  # what rank 0 announces
_MASK = (1 << 64) - 1


class Sender(Protocol):
    """Send from rank 0 to all; the World does."""

    @property
    def rank(self) -> int:
        """The number of this rank."""

    def broadcast(self, tensor: Tensor, purpose: str) -> None:
        """Copy a flat tensor from rank 0 to all ranks."""


class DataError(ValueError):
    """Say why a source of text can't be used; raised alike on all ranks."""


def load(source: Path | None, world: Sender) -> Tensor:
    """Return the text as a flat tensor of bytes; all ranks call.

    A single file is mapped into memory by each rank, so that the ranks of a node share its pages.
    A folder, or the default text, is read by rank 0 and broadcast.

    Args:
        source: a text file, or a folder whose text files are joined in sorted order; None is the
            default text.
        world: the ranks.

    Raises:
        DataError: on all ranks, if rank 0 finds the source missing, empty or unreadable.
    """
    kind, text = _TEXT, torch.empty(0, dtype=torch.uint8)
    if world.rank == 0:
        try:
            kind, text = _open(source)
        except (DataError, OSError) as error:
            kind, text = _ERROR, _tensor(str(error).encode())
    header = torch.tensor([kind, text.numel()])
    world.broadcast(header, "data")
    kind, size = header.tolist()
    if kind == _FILE:
        return torch.from_file(str(source), shared=False, size=size, dtype=torch.uint8)
    if world.rank != 0:
        text = torch.empty(size, dtype=torch.uint8)
    world.broadcast(text, "data")
    if kind == _ERROR:
        raise DataError(bytes(text.tolist()).decode())
    return text


def _open(source: Path | None) -> tuple[int, Tensor]:
    """Return what kind of source this is, and its bytes."""
    if source is not None and not source.exists():
        raise DataError(f"expected a text file or a folder of them, found no {str(source)!r}")
    if source is not None and not source.is_dir():
        size = source.stat().st_size
        if size == 0:
            raise DataError(f"expected text, found the empty file {str(source)!r}")
        return _FILE, torch.from_file(str(source), shared=False, size=size, dtype=torch.uint8)
    text = b"".join(_standard_library() if source is None else _folder(source))
    if not text:
        raise DataError(f"expected text files, found none with text in the folder {str(source)!r}")
    return _TEXT, _tensor(text)


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _standard_library() -> Iterator[bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    room = LIMIT
    for path in sorted(root.rglob("*.py")):
        if room > 0 and not _SKIPPED.intersection(path.relative_to(root).parts):
            text = path.read_bytes()[:room]
            room -= len(text)
            yield text


def _folder(root: Path) -> Iterator[bytes]:
    for path in sorted(root.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        if path.is_file() and not hidden:
            text = path.read_bytes()
            if b"\0" not in text[:_LOOKED_AT]:
                yield text


class Batches:
    """Cut batches out of a text as a pure function of the seed and each sample's number.

    Samples are numbered through steps, micro-steps and ranks, so that the global batch of a step
    holds the same samples at any world size where `world * accumulation * batch` is the same.

    Args:
        text: flat, of bytes.
        seq: tokens per sample.
        batch: samples per micro-batch and rank.
        seed: another seed draws other samples.

    Raises:
        DataError: the text is shorter than one sample and the byte after it.
    """

    def __init__(self, text: Tensor, *, seq: int, batch: int, seed: int) -> None:
        if len(text) <= seq:
            raise DataError(
                f"expected a text of more than seq = {seq} bytes, found {len(text)}: "
                "give more text (--data) or shorter samples (--seq)"
            )
        self.text = text
        self.seq = seq
        self.batch = batch
        self.seed = seed

    def micro_batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets [batch, seq] of a micro-batch.

        Args:
            number: counts micro-batches through the run,
                `(step * accumulation + micro) * world + rank`.
        """
        first = number * self.batch
        samples = torch.stack([self._sample(first + i) for i in range(self.batch)]).long()
        return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()

    def _sample(self, index: int) -> Tensor:
        start = scramble(self.seed, index) % (len(self.text) - self.seq)
        return self.text[start : start + self.seq + 1]


def scramble(seed: int, index: int) -> int:
    """Return 64 bits that look random, a function of the arguments alone (splitmix64)."""
    x = (seed * 0xD1342543DE82EF95 + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
