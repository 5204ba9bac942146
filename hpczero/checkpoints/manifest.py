"""What a checkpoint says of itself: names, places, counters, seals."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hpczero.checkpoints.rankfile import Seal, checksum
from hpczero.errors import CheckpointError

FORMAT = "hpczero checkpoint"
VERSION = 1
FILE = "manifest.json"
WEIGHTS = "weights"
BUFFERS = "buffers"
SHARED = "shared.h5"


Layout = Literal["files", "shared"]
"""A file of each rank, or one of all."""


class Run(NamedTuple):
    """Describe a bucket's flat run, of which each rank's file holds one shard."""

    padded: int
    dtypes: Mapping[str, str]
    """By kind."""


class Place(NamedTuple):
    """Place a parameter in a bucket's flat run, and say what is saved of it."""

    bucket: str
    start: int
    shape: tuple[int, ...]
    kinds: tuple[str, ...]
    """Of its elementwise tensors: "weights" and the optimizer's."""
    scalars: Mapping[str, Any]
    """The optimizer's other states, such as `step`."""
    trainable: bool

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Describe a checkpoint; see [Note: a checkpoint folder]."""

    tag: str
    world: int
    stage: int
    precision: str
    buckets: Mapping[str, Run]
    parameters: Mapping[str, Place]
    buffers: Sequence[str]
    tied: Mapping[str, str]
    """Other names of parameters that have several."""
    optimizer: Mapping[str, Any]
    """The class, the groups' settings and the names in each."""
    scheduler: Mapping[str, Any] | None
    counters: Mapping[str, Any]
    """Steps, loss scale, position in the data."""
    seed: int
    client_state: Mapping[str, Any]
    versions: Mapping[str, str]
    layout: Layout = "files"
    files: Sequence[Seal] = field(default_factory=list)
    """By rank; or the one that all share."""
    index: str = ""
    """The checksum of index.h5."""

    @property
    def kinds(self) -> list[str]:
        """Return the kinds of tensors that are saved of any parameter."""
        return list(dict.fromkeys(kind for p in self.parameters.values() for kind in p.kinds))

    def shard(self, bucket: str) -> int:
        """Return the elements that each rank's file holds of a bucket."""
        return self.buckets[bucket].padded // self.world

    def part(self, rank: int) -> tuple[Seal, str]:
        """Return the file that holds a rank's part, and the group of its datasets there."""
        if self.layout == "shared":
            return self.files[0], group_of(rank)
        return self.files[rank], ""

    def dump(self) -> str:
        """Return the manifest as JSON text that checks itself, a line for each thing it lists."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            **{each.name: getattr(self, each.name) for each in fields(self)},
            "buckets": {name: run._asdict() for name, run in self.buckets.items()},
            "parameters": {name: place._asdict() for name, place in self.parameters.items()},
            "files": [seal._asdict() for seal in self.files],
        }
        body = ",\n".join(f" {json.dumps(key)}: {_lines(value)}" for key, value in content.items())
        return f'{{\n "checksum": "{checksum(body.encode())}",\n{body}\n}}\n'


def group_of(rank: int) -> str:
    """Return what the names of a rank's datasets begin with in a file that ranks share."""
    return f"rank_{rank:05d}/"


def _lines(value: Any) -> str:
    if isinstance(value, dict) and any(isinstance(item, dict) for item in value.values()):
        items = [f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + "\n }"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]"
    return json.dumps(value)


def load(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint's folder.

    Raises:
        CheckpointError: there is none, it is damaged, or another program or version wrote it.
    """
    path = folder / FILE
    try:
        text = path.read_text()
        content = json.loads(text)
        given, body = content.pop("checksum"), text.split("\n", 2)[2].removesuffix("\n}\n")
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}: this is no checkpoint of hpczero"
        ) from None
    except (ValueError, AttributeError, KeyError, IndexError, TypeError):
        raise CheckpointError(
            f"{path}: expected a checkpoint's manifest, found other text: damaged, or foreign"
        ) from None
    if content.pop("format", None) != FORMAT:
        raise CheckpointError(f"{path}: expected format {FORMAT!r}: not of hpczero")
    if (version := content.pop("version", None)) != VERSION:
        raise CheckpointError(
            f"{path}: expected version {VERSION} of the format, found {version}: use the hpczero "
            "that wrote it, or a newer one"
        )
    if (found := checksum(body.encode())) != given:
        raise CheckpointError(
            f"{path}: expected checksum {given}, found {found}: the manifest was damaged or edited"
        )
    content["buckets"] = {name: Run(**run) for name, run in content["buckets"].items()}
    content["parameters"] = {
        name: Place(**{**place, "shape": tuple(place["shape"]), "kinds": tuple(place["kinds"])})
        for name, place in content["parameters"].items()
    }
    content["files"] = [Seal(**seal) for seal in content["files"]]
    return Manifest(**content)
