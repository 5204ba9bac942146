"""Plain Python data as JSON and back, tuples and int keys too: pickle's work without pickle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hpczero.infinity.hdf5 import dtype_of, name_of

_TAG = "__type__"


def encode(value: Any, where: str) -> Any:
    """Return what JSON can hold of a value, such that `decode` gives an equal one.

    Raises:
        TypeError: it holds something else than numbers, text, None, small tensors, and lists,
            tuples, sets, dicts of such; names the place.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple | set | frozenset):
        items = [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return {_TAG: "tuple" if isinstance(value, tuple) else "set", "items": items}
    if isinstance(value, torch.Tensor) and value.numel() <= 64:
        return {_TAG: "tensor", "dtype": name_of(value.dtype), "items": value.tolist()}
    if isinstance(value, Mapping):
        named = {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        kind = "counter" if isinstance(value, Counter) else "dict"
        if kind == "dict" and _TAG not in named and all(isinstance(key, str) for key in named):
            return named
        pairs = [[encode(key, f"a key of {where}"), item] for key, item in named.items()]
        return {_TAG: kind, "items": pairs}
    raise TypeError(
        f"{where}: expected numbers, text, lists and dicts, which JSON can hold, found "
        f"{type(value).__name__}: leave it out or convert it"
    )


def decode(value: Any) -> Any:
    """Return the value that `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    items = decode(value["items"])
    if kind == "tensor":
        return torch.tensor(items, dtype=dtype_of(value["dtype"]))
    if kind in ("tuple", "set"):
        return tuple(items) if kind == "tuple" else set(items)
    pairs = dict(items)
    return Counter(pairs) if kind == "counter" else pairs
