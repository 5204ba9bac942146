"""How fast a folder takes and gives what is offloaded to it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from hpczero.infinity.stream import parts, stream

BYTES = 1 << 28
"""What is written and read."""


@dataclass(frozen=True)
class Speed:
    """Say what one rank found in a folder, or why it found nothing."""

    folder: str
    error: str = ""
    direct: bool = False
    """Whether bytes went past the system's cache."""
    free: int = 0
    """Bytes before."""
    write: float = 0.0
    """GB/s."""
    read: float = 0.0


def measure(folder: Path, rank: int, nbytes: int = BYTES) -> Speed:
    """Write and read a file as an update does; local, other ranks may do so meanwhile.

    Costs `nbytes` on the disk, which are gone afterwards, and the memory of a few parts.
    """
    from hpczero.infinity.filetier import FileTier  # h5py is slow to import

    try:
        tier = FileTier(folder, rank)
        _, free = tier.free
        array = tier.zeros("speed", nbytes // 4, torch.float32)
        seconds = []
        for reads in (False, True):
            start = time.perf_counter()
            for use in stream(parts(array, reads=reads)):
                if not reads:
                    use.array.tensor[use.start : use.stop] = 1.0
            tier.flush()  # nothing comes from the cache then
            seconds.append(time.perf_counter() - start)
        tier.close()
    except OSError as error:
        return Speed(str(folder), error=str(error))
    write, read = (nbytes / spent / 1e9 for spent in seconds)
    return Speed(str(folder), direct=tier.direct, free=free, write=write, read=read)
