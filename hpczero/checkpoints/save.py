"""Save a checkpoint: every rank its own tensors, rank 0 the rest; all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from hpczero.checkpoints import folder as folders
from hpczero.checkpoints import index, rankfile
from hpczero.checkpoints.files import sync
from hpczero.checkpoints.folder import Folder
from hpczero.checkpoints.manifest import FILE, SHARED, Manifest, Place, Run, group_of
from hpczero.checkpoints.rankfile import Entry, Seal, Stream
from hpczero.comm.courier import Courier
from hpczero.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Hold what this rank writes; the tensors may be those that are trained, or copies."""

    arrays: Mapping[str, torch.Tensor | Stream]
    """By dataset of this rank's file."""
    places: Mapping[str, Place]
    """Of the trainable parameters that this rank owns a part of, with the optimizer's states."""
    manifest: Manifest
    """Without files, and without what other ranks know of the optimizer's states."""

    @property
    def resident(self) -> bool:
        """Tell whether everything is in memory; the same on all ranks."""
        return not any(isinstance(array, Stream) for array in self.arrays.values())

    def copy(self) -> Snapshot:
        """Return a snapshot that training doesn't change; costs this rank's part of the states."""
        arrays = {
            name: tensor.detach().clone()
            for name, tensor in self.arrays.items()
            if isinstance(tensor, torch.Tensor)
        }
        return replace(self, arrays=arrays)


class Told(NamedTuple):
    """Hold what a rank tells rank 0."""

    seal: Seal | None
    """Of its file, or rank 0's of the shared one."""
    places: Mapping[str, Place]
    buckets: Mapping[str, Run]


def save(root: Path, snapshot: Snapshot, courier: Courier, keep_last: int | None) -> None:
    """Write a checkpoint; all ranks call. Costs no memory, and no communication but names.

    Raises:
        CheckpointError: on all ranks, if any of them can't write; nothing that was saved before
            is lost.
    """
    rank, tag = courier.comm.rank, snapshot.manifest.tag
    what = not_saved(tag)
    place: Folder | None = None
    try:
        place = agree(courier, what, lambda: Folder(root, tag) if rank == 0 else None)
        write = _write_shared if snapshot.manifest.layout == "shared" else _write_own
        seal = write(root / f"{folders.SAVING}{tag}", snapshot, courier, what)
        mine = Told(seal, snapshot.places, snapshot.manifest.buckets)
        told = courier.gather_objects(what, mine).result()
        if place is not None and told is not None:
            finishing = partial(finish, place, snapshot.manifest, told, keep_last)
            agree(courier, what, finishing)
        else:
            agree(courier, what, lambda: None)
    except BaseException:
        if place is not None:
            place.close(failed=True)
        raise
    if place is not None:
        place.close()


def not_saved(tag: str) -> str:
    """Return the beginning of the error of a failed save."""
    return f"checkpoint {tag!r} was not saved; what was saved before is intact"


def _write_own(folder: Path, snapshot: Snapshot, courier: Courier, what: str) -> Seal:
    path = folder / f"rank_{courier.comm.rank:05d}.h5"
    return agree(courier, what, lambda: rankfile.write(path, list(snapshot.arrays.items())))


def _write_shared(folder: Path, snapshot: Snapshot, courier: Courier, what: str) -> Seal | None:
    """Make the shared file together, write side by side, and let rank 0 seal it."""
    path = folder / SHARED
    group = group_of(courier.comm.rank)
    arrays = [(group + name, tensor) for name, tensor in snapshot.arrays.items()]
    mine = agree(courier, what, lambda: rankfile.describe(arrays))
    entries = _joined(courier.exchange_objects(what, mine).result())
    places, table = agree(courier, what, lambda: rankfile.create(path, entries, courier.comm))
    mine = agree(courier, what, lambda: rankfile.fill(path, arrays, places))
    told = courier.gather_objects(what, mine).result()
    return agree(
        courier,
        what,
        lambda: None if told is None else rankfile.seal(path, _joined(told), table),
    )


def _joined(entries: list[dict[str, Entry]]) -> dict[str, Entry]:
    return {name: entry for each in entries for name, entry in each.items()}


def finish(
    place: Folder,
    manifest: Manifest,
    told: Sequence[Told],
    keep_last: int | None,
) -> None:
    """Add index and manifest to what all ranks have written, and give the checkpoint its name."""
    parameters, buckets = dict(manifest.parameters), dict(manifest.buckets)
    for other in told:
        parameters |= other.places
        for name, run in other.buckets.items():
            buckets[name] = run._replace(dtypes={**buckets[name].dtypes, **run.dtypes})
    files = [other.seal for other in told if other.seal is not None]
    manifest = replace(manifest, parameters=parameters, buckets=buckets, files=files)
    path = place.partial / index.FILE
    index.build(path, manifest)
    manifest = replace(manifest, index=rankfile.checksum(path.read_bytes()))
    sync(path)
    folders.write(place.partial / FILE, manifest.dump())
    place.commit(keep_last)


def agree(courier: Courier, what: str, work: Callable[[], T]) -> T:
    """Do this rank's part, hear how the others fared, and fail with them if any failed.

    Raises:
        CheckpointError: on all ranks; names the first rank that failed, and why.
    """
    result: list[T] = []
    failure = None
    try:
        result.append(work())
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        failure = folders.describe(error)
    failures = courier.exchange_objects(what, failure).result()
    failed = {rank: text for rank, text in enumerate(failures) if text is not None}
    if not failed:
        return result[0]
    rank, text = next(iter(failed.items()))
    others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    raise CheckpointError(f"{what}: rank {rank}{others} of {len(failures)}: {text}", reporter=rank)
