"""Tokens from text, token files or HDF5, and batches that a seed and a number determine.

The default text is the source of Python's own standard library (without its tests, in sorted
order, at most 16 MiB): real text that every machine with this program already has, the same on
every run of one Python.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

LIMIT = 16 << 20
"""Bytes of the default text at most; Python 3.11's is 12.6 MB."""
BYTES = 256
"""The vocabulary of a text."""
PIECE = 1 << 22
"""Tokens that are searched for the largest at a time; 32 MiB of memory."""

_LOOKED_AT = 4096  # a file of a folder with a zero byte among its first bytes is no text
_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
_PLAUSIBLE = 1 << 20  # tokens beyond this are some other kind of number
_SENT, _OPENED, _ERROR = range(3)  # what rank 0 announces: tokens, a file to open, a message
_HDF5 = re.compile(r"(?P<file>.+\.(?:h5|hdf5))(?::(?P<dataset>.*))?")
_MASK = (1 << 64) - 1


class Sender(Protocol):
    """Send from rank 0 to all; the World does."""

    @property
    def rank(self) -> int:
        """The number of this rank."""

    def broadcast(self, tensor: Tensor, purpose: str) -> None:
        """Copy a flat tensor from rank 0 to all ranks."""


class Run(Protocol):
    """A flat run of integers, read where it is cut; a Tensor is one."""

    def __len__(self) -> int:
        """Return the number of tokens."""

    def __getitem__(self, cut: slice, /) -> Tensor:
        """Return the tokens of a slice."""


class DataError(ValueError):
    """Say why a source of tokens can't be used; raised alike on all ranks."""


@dataclass(frozen=True)
class Tokens:
    """Hold what a model is trained on."""

    run: Run
    size: int
    """Tokens, as rank 0 counted them."""
    vocabulary: int
    """All tokens are below; the model needs so many rows."""


def load(source: Path | None, world: Sender, vocabulary: int | None = None) -> Tokens:
    """Return the tokens of a source; all ranks call.

    A single file is opened by each rank: text and `.bin` (nanoGPT's uint16) are mapped into memory,
    so that the ranks of a node share their pages, and HDF5 is read slice by slice. A folder, or the
    default text, is read by rank 0 and broadcast.

    Args:
        source: a text file; a folder whose text files are joined in sorted order; `x.bin`; `x.h5`
            or `x.h5:dataset`; None is the default text.
        world: the ranks.
        vocabulary: how many tokens the model knows. None is 256 for text; for token files rank 0
            reads all tokens, and the largest plus one is rounded up to a multiple of 64.

    Raises:
        DataError: on all ranks, if rank 0 finds the source missing, empty, unreadable, of another
            type, or with tokens that the vocabulary doesn't cover.
    """
    kind, sent, found, opened = _SENT, torch.empty(0, dtype=torch.uint8), 0, None
    if world.rank == 0:
        try:
            if source is None or source.is_dir():
                sent, found = _read(source), vocabulary or BYTES
            else:
                # On a mapping of its own, whose pages don't stay with this process.
                found = _vocabulary(_open(source), vocabulary)
                kind, opened = _OPENED, _open(source)
        except (DataError, OSError) as error:
            kind, sent, opened = _ERROR, _tensor(str(error).encode()), None
    header = torch.tensor([kind, len(sent if opened is None else opened), found])
    world.broadcast(header, "data")
    kind, size, found = header.tolist()
    if kind == _OPENED:
        assert source is not None
        return Tokens(_open(source) if opened is None else opened, size, found)
    if world.rank != 0:
        sent = torch.empty(size, dtype=torch.uint8)
    world.broadcast(sent, "data")
    if kind == _ERROR:
        raise DataError(bytes(sent.tolist()).decode())
    return Tokens(sent, size, found)


# ---- sources


def _open(source: Path) -> Run:
    """Return the tokens of a single file, still on the disk."""
    hdf5 = _HDF5.fullmatch(str(source))
    file = Path(hdf5["file"]) if hdf5 else source
    if not file.exists():
        raise DataError(f"expected a file of text or tokens, or a folder, found no {str(file)!r}")
    if hdf5:
        return _Dataset(file, hdf5["dataset"])
    size = file.stat().st_size
    if size == 0:
        raise DataError(f"expected text or tokens, found the empty file {str(file)!r}")
    if file.suffix != ".bin":
        return torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    if size % 2:
        raise DataError(
            f"expected tokens of two bytes each (uint16), found {size} bytes in {str(file)!r}: "
            "if it is a text, give it another name than .bin"
        )
    return torch.from_file(str(file), shared=False, size=size // 2, dtype=torch.uint16)


class _Dataset:
    """Read slices of a one-dimensional HDF5 dataset of integers.

    Args:
        file: stays open as long as this lives.
        name: of the dataset; None takes the only one that fits.
    """

    def __init__(self, file: Path, name: str | None) -> None:
        import h5py

        try:
            self.file = h5py.File(file, "r")
        except OSError as error:
            raise DataError(f"expected HDF5 in {str(file)!r}, found: {error}") from None
        sets: dict[str, h5py.Dataset] = {}
        self.file.visititems(
            lambda path, item: sets.update({path: item}) if isinstance(item, h5py.Dataset) else None
        )
        fitting = [
            path for path, item in sets.items() if item.ndim == 1 and item.dtype.kind in "iu"
        ]
        name = name.strip("/") if name else fitting[0] if len(fitting) == 1 else None
        if name not in fitting:
            found = f"{name!r}" if name else f"{len(fitting)} to choose from"
            listed = ", ".join(f"{path} {_shape(item)}" for path, item in sets.items()) or "none"
            raise DataError(
                f"expected a flat dataset of integers, found {found} in {str(file)!r}; "
                f"name one as {file}:DATASET. Its datasets: {listed}"
            )
        self.dataset = sets[name]
        if not len(self.dataset):
            raise DataError(f"expected tokens, found the empty dataset {name!r} in {str(file)!r}")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, cut: slice, /) -> Tensor:
        return torch.from_numpy(self.dataset[cut].astype(np.int64))


def _shape(item: Any) -> str:
    return f"{item.dtype}{list(item.shape)}"


def hdf5_build() -> tuple[str, str, bool]:
    """Return h5py's version, its HDF5's, and whether they are built with MPI."""
    import h5py

    return h5py.__version__, h5py.version.hdf5_version, bool(h5py.get_config().mpi)


def _vocabulary(run: Run, given: int | None) -> int:
    """Return how many tokens the model needs; a given number is checked on the first piece."""
    if isinstance(run, Tensor) and run.dtype == torch.uint8:
        return given or BYTES
    least, most = 0, 0
    for start in range(0, len(run) if given is None else min(len(run), PIECE), PIECE):
        low, high = run[start : start + PIECE].long().aminmax()
        least, most = min(least, int(low)), max(most, int(high))
    if least < 0:
        raise DataError(f"expected tokens from 0, found {least}")
    if given is None and most >= _PLAUSIBLE:
        raise DataError(
            f"expected tokens below {_PLAUSIBLE:,}, found {most:,}: are these tokens? If they are, "
            "say how many there can be (--vocab)"
        )
    needed = -(-(most + 1) // 64) * 64  # whole tiles for matrix units
    if given is not None and most >= given:
        raise DataError(
            f"expected tokens below the vocabulary of {given}, found {most}: "
            f"give at least {most + 1} (--vocab), or nothing"
        )
    return given or needed


def _read(source: Path | None) -> Tensor:
    """Return the text of a folder, or the default text."""
    text = b"".join(_standard_library() if source is None else _folder(source))
    if not text:
        raise DataError(f"expected text files, found none with text in the folder {str(source)!r}")
    return _tensor(text)


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


# ---- batches


class Batches:
    """Cut batches out of tokens as a pure function of the seed and each sample's number.

    Samples are numbered through steps, micro-steps and ranks, so that the global batch of a step
    holds the same samples at any world size where `world * accumulation * batch` is the same.

    Args:
        tokens: as loaded.
        seq: tokens per sample.
        batch: samples per micro-batch and rank.
        seed: another seed draws other samples.

    Raises:
        DataError: there are no more tokens than one sample has, and one more is needed.
    """

    def __init__(self, tokens: Tokens, *, seq: int, batch: int, seed: int) -> None:
        if tokens.size <= seq:
            raise DataError(
                f"expected data of more than seq = {seq} tokens, found {tokens.size}: "
                "give more (--data) or shorter samples (--seq)"
            )
        self.tokens = tokens
        self.seq = seq
        self.batch = batch
        self.seed = seed

    def micro_batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets [batch, seq] of a micro-batch.

        Args:
            number: counts micro-batches through the run,
                `(step * accumulation + micro) * world + rank`.

        Raises:
            ValueError: a token isn't in the vocabulary that was given to `load`.
        """
        return self.batch_from(number * self.batch)

    def batch_from(self, first: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets [batch, seq] of a micro-batch that begins with sample `first`.

        Raises:
            ValueError: a token isn't in the vocabulary that was given to `load`.
        """
        samples = torch.stack([self._sample(first + i) for i in range(self.batch)])
        low, high = (int(end) for end in samples.aminmax())
        if low < 0 or high >= self.tokens.vocabulary:
            raise ValueError(
                f"expected tokens from 0 to {self.tokens.vocabulary - 1}, found "
                f"{low if low < 0 else high} in the batch from sample {first}: does the vocabulary "
                "(--vocab) belong to this data?"
            )
        return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()

    def _sample(self, index: int) -> Tensor:
        start = scramble(self.seed, index) % (self.tokens.size - self.seq)
        return self.tokens.run[start : start + self.seq + 1].long()


def scramble(seed: int, index: int) -> int:
    """Return 64 bits that look random, a function of the arguments alone (splitmix64)."""
    x = (seed * 0xD1342543DE82EF95 + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
