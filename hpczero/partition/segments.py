"""What an optimizer holds in place of parameters: segments of the intervals that a rank updates.

[Note: segments]
The user's parameter groups stay as they are, but in place of parameters each holds segments: views
of the master weights of the bucket intervals that this rank updates, cut where the group changes,
and finer where the optimizer needs it.
So the groups' lr and weight decay act on the next step whoever sets them (a torch scheduler, say),
and an optimizer that treats every element alike gives on segments what it gives on parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from hpczero.partition.bucket import Bucket


class Segment(NamedTuple):
    """Hold a run of a bucket's updated interval whose parameters share a group."""

    bucket: Bucket
    start: int
    stop: int
    master: nn.Parameter  # 1D

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this segment of a tensor that covers the updated interval."""
        return flat[self.start : self.stop]


def assign(buckets: Sequence[Bucket], groups: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return the group of each trainable parameter, by id.

    Raises:
        ValueError: a trainable parameter is in no group, or one of a group in no bucket.
    """
    where = {
        id(parameter): index for index, group in enumerate(groups) for parameter in group["params"]
    }
    mine = {
        id(parameter): slot.name
        for bucket in buckets
        for slot, parameter in zip(bucket.layout.slots, bucket.params, strict=True)
    }
    missing = [name for key, name in mine.items() if key not in where]
    if missing:
        raise ValueError(
            f"the optimizer's groups miss {len(missing)} of {len(mine)} trainable parameters, "
            f"first {missing[0]!r}: add them to a group or set requires_grad_(False) on them"
        )
    foreign = [
        parameter
        for group in groups
        for parameter in group["params"]
        if parameter.requires_grad and id(parameter) not in mine
    ]
    if foreign:
        raise ValueError(
            f"the optimizer has {len(foreign)} parameters that the model hasn't, the first of "
            f"shape {tuple(foreign[0].shape)}: make the optimizer from model.parameters()"
        )
    return where


def cut(buckets: Sequence[Bucket], where: Mapping[int, int]) -> Iterator[tuple[int, Segment]]:
    """Yield group and segment for each run of parameters of one group, in layout order."""
    for bucket in buckets:
        lo, hi = bucket.span
        slots = list(zip(bucket.layout.slots, bucket.params, strict=True))
        runs = [
            (group, next(iter(run))[0].start)
            for group, run in groupby(slots, lambda item: where[id(item[1])])
        ]
        stops = [start for _, start in runs[1:]] + [bucket.layout.padded]
        for (group, start), stop in zip(runs, stops, strict=True):
            a, b = max(start, lo) - lo, min(stop, hi) - lo
            if a < b:
                yield group, _segment(bucket, a, b)


def by_parameter(segment: Segment) -> list[Segment]:
    """Cut a segment where parameters start."""
    lo = segment.bucket.span[0]
    return _split(segment, sorted({slot.start - lo for slot in segment.bucket.layout.slots}))


def by_size(segment: Segment, limit: int) -> list[Segment]:
    """Cut a segment so that no part has more than `limit` elements."""
    return _split(segment, range(segment.start + limit, segment.stop, limit))


def replace(optimizer: Optimizer, parts: Mapping[int, Sequence[Segment]]) -> None:
    """Give an optimizer the parts of segments, by the id of the master, with their states."""
    for group in optimizer.param_groups:
        masters = group["params"]
        group["params"] = [new for old in masters for new in _masters(parts.get(id(old)), old)]
        for master in masters:
            if id(master) not in parts:
                continue
            state = optimizer.state.pop(master, {})
            start = parts[id(master)][0].start
            for part in parts[id(master)] if state else ():
                place = slice(part.start - start, part.stop - start)
                optimizer.state[part.master] = {
                    key: value[place] if covers(value, master) else deepcopy(value)
                    for key, value in state.items()
                }


def _masters(parts: Sequence[Segment] | None, whole: nn.Parameter) -> list[nn.Parameter]:
    return [whole] if parts is None else [part.master for part in parts]


def covers(value: object, master: torch.Tensor) -> bool:
    """Tell whether a state has a value for each element of a segment."""
    return isinstance(value, torch.Tensor) and value.shape == master.shape


def batches(segments: Sequence[Segment], limit: float) -> list[list[Segment]]:
    """Return neighbours of one bucket together, up to `limit` elements."""
    result: list[list[Segment]] = []
    size = 0
    for segment in segments:
        size += segment.master.numel()
        if result and result[-1][0].bucket is segment.bucket and size <= limit:
            result[-1].append(segment)
        else:
            result.append([segment])
            size = segment.master.numel()
    return result


def _split(segment: Segment, cuts: Iterable[int]) -> list[Segment]:
    inner = (edge for edge in cuts if segment.start < edge < segment.stop)
    edges = [segment.start, *inner, segment.stop]
    return [_segment(segment.bucket, a, b) for a, b in pairwise(edges)]


def _segment(bucket: Bucket, start: int, stop: int) -> Segment:
    return Segment(bucket, start, stop, nn.Parameter(bucket.master[start:stop], requires_grad=True))
