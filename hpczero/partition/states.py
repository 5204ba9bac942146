"""An optimizer's states by parameter name: out of its segments and into them.

States that have a value for each element are called kinds ("exp_avg"), the others scalars ("step").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.optim import Optimizer

from hpczero.infinity.tier import Array, Part
from hpczero.partition.bucket import Bucket
from hpczero.partition.layout import Slot
from hpczero.partition.segments import Segment, by_parameter, covers, replace

Saved = tuple[tuple[str, ...], Mapping[str, Any]]
"""Kinds and scalars of a parameter."""


def owned(optimizer: Optimizer, segments: Sequence[Segment], bucket: Bucket) -> dict[str, Part]:
    """Return the kinds of a bucket's states over this rank's shard.

    Costs no memory where one segment covers the shard, else what it returns.
    """
    lo, hi = bucket.own
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for segment in segments:
        offset = bucket.span[0] + segment.start
        start, stop = max(offset, lo), min(offset + segment.master.numel(), hi)
        if segment.bucket is bucket and start < stop:
            for kind, value in optimizer.state.get(segment.master, {}).items():
                if covers(value, segment.master):
                    part = value[start - offset : stop - offset]
                    parts.setdefault(kind, []).append((start - lo, part))
    numel = hi - lo
    return {kind: Part(Array(_joined(found, numel)), 0, numel) for kind, found in parts.items()}


def describe(optimizer: Optimizer, segments: Sequence[Segment], bucket: Bucket) -> dict[str, Saved]:
    """Return kinds and scalars of the parameters that have elements in this rank's shard."""
    lo, hi = bucket.own
    result: dict[str, Saved] = {}
    for segment in segments:
        for slot, start, stop in _slots(segment) if segment.bucket is bucket else ():
            if max(start, lo) < min(stop, hi):
                state = optimizer.state.get(segment.master, {})
                kinds = tuple(key for key, value in state.items() if covers(value, segment.master))
                scalars = {key: value for key, value in state.items() if key not in kinds}
                result[slot.name] = (kinds, scalars)
    return result


def cut(
    optimizer: Optimizer, segments: Sequence[Segment], saved: Mapping[str, Saved]
) -> list[Segment]:
    """Return the segments of an optimizer, cut where saved scalars differ within one."""
    parts = {
        id(segment.master): [segment] if _alike(segment, saved) else by_parameter(segment)
        for segment in segments
    }
    replace(optimizer, parts)
    return [part for segment in segments for part in parts[id(segment.master)]]


def fill(
    optimizer: Optimizer,
    segments: Sequence[Segment],
    saved: Mapping[str, Saved],
    read: Callable[[str, str, int, int], torch.Tensor],
) -> None:
    """Give an optimizer saved states.

    Parameters that aren't saved keep the states that they have.

    Args:
        optimizer: over the segments' masters.
        segments: some of this rank's, cut.
        saved: kinds and scalars by parameter name.
        read: returns elements [start, stop) of a kind of a parameter.
    """
    for segment in segments:
        inside = [place for place in _slots(segment) if place[0].name in saved]
        if not inside:
            continue
        kinds, scalars = saved[inside[0][0].name]
        state = optimizer.state.setdefault(segment.master, {})
        for kind in kinds:
            if not covers(state.get(kind), segment.master):
                state[kind] = torch.zeros_like(segment.master.detach())
            offset = segment.bucket.span[0] + segment.start
            for slot, start, stop in inside:
                values = read(kind, slot.name, start - slot.start, stop - slot.start)
                state[kind][start - offset : stop - offset].copy_(values)
        state.update(deepcopy(scalars))  # torch counts in place: each segment for itself


def _joined(parts: Sequence[tuple[int, torch.Tensor]], numel: int) -> torch.Tensor:
    first = parts[0][1]
    if first.numel() == numel:
        return first
    whole = first.new_zeros(numel)
    for start, part in parts:
        whole[start : start + part.numel()] = part
    return whole


def _slots(segment: Segment) -> Iterator[tuple[Slot, int, int]]:
    """Yield the parameters with elements in a segment, and from where to where in the flat run."""
    lo = segment.bucket.span[0] + segment.start
    hi = lo + segment.master.numel()
    for slot in segment.bucket.layout.slots:
        start, stop = max(slot.start, lo), min(slot.stop, hi)
        if start < stop:
            yield slot, start, stop


def _alike(segment: Segment, saved: Mapping[str, Saved]) -> bool:
    """Tell whether one state fits all parameters of a segment."""
    states = []
    for slot, _, _ in _slots(segment):
        kinds, scalars = saved.get(slot.name, (None, {}))
        values = {
            key: value.tolist() if isinstance(value, torch.Tensor) else value
            for key, value in scalars.items()
        }
        states.append((kinds, values))
    return all(state == states[0] for state in states)
