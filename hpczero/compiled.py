"""Load what was compiled at install, where there was a compiler."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any


def library(folder: str, stem: str) -> ctypes.CDLL | None:
    """Return the shared library of this stem beside a module; None where it wasn't built."""
    path = next(Path(folder).glob(f"{stem}*.so"), None)
    try:
        return None if path is None else ctypes.CDLL(str(path))
    except OSError:  # built for another machine
        return None


def kernel(module: str, stem: str, name: str) -> Any:
    """Return a function without result of the library beside a module's file; None without it."""
    found: Any = getattr(library(str(Path(module).parent), stem), name, None)
    if found is not None:
        found.restype = None
    return found
