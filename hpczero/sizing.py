"""Bytes and traffic foretold from integers alone.

[Note: what the formulas count]
Per parameter and rank, with N ranks (ZeRO's counting for mixed-precision Adam, decimal units):

    compute  gradients   stage 0   stage 1    stage 2    stage 3
    16-bit   16-bit      16        4 + 12/N   2 + 14/N   16/N
    16-bit   fp32        18        6 + 12/N   2 + 16/N   18/N
    fp32     fp32        16        8 +  8/N   4 + 12/N   16/N

Gradients are fp32 as soon as they accumulate over micro-steps, unless another dtype is asked for.
With fp32 compute the parameters are their own master weights, so that Adam's two moments are the
only states. A frozen parameter has its weight and nothing else. Whatever a rank holds beyond these
formulas is a buffer, and `buffer_bytes` says how large each buffer is. What
`stage3_max_reuse_distance` or a larger prefetch keeps gathered comes on top of it, up to
`stage3_max_live_parameters` elements; a prefetch left to "auto" keeps at most two units more, and
only where measured times say that this makes steps 5 % shorter (`further`). Where all ranks share
the memory of one node, parameters at stage 3 are there once, as the formula says, and there is no
gathered copy beside them; nor is there where they are sharded over the L ranks of each node: then
they take 2/L (fp32: 4/L) of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

WIRE_BLOCK = 65536
"""Elements that a reduction sums at a time, so that the running sum stays in the cache."""

STREAMED = 1 << 20
"""Elements that an update brings into memory at a time, of each array that is in a file."""

AHEAD = 2
"""Parts of so many elements that are read while one is updated."""

BEHIND = 2
"""Parts that are still being written meanwhile."""

BACKLOG = 1 << 26
"""Bytes of gradients that may wait to be written to a file while more are reduced."""

PREFETCHED = 2
"""Buckets beside the root that are whole at the same time: the one in use and the one foreseen."""


class BucketShape(NamedTuple):
    """Describe one bucket by integers, for the formulas."""

    name: str
    numel: int  # elements of its parameters
    padded: int  # the same with the padding that the layout adds, a multiple of the world size
    trainable: bool
    unit: str  # the module whose hooks gather it; "" is the root
    item_bytes: int  # of the compute dtype
    persistent: bool = False  # at stage 3: stays gathered
    grad_bytes: int | None = None  # of the dtype that gradients add up in, where one is asked for
    holders: int = 0  # at stage 3: the ranks that share a copy that stays; 0: each gathers its own
    gatherers: int = 1  # at stage 3: the ranks that share what is gathered
    receives: bool = True  # else reductions read where the other ranks' gradients lie
    states_stay: bool = False  # on the device, whatever tier others' are on


class PerElement(NamedTuple):
    """Give the bytes per element of each model state, before any sharding."""

    params: int
    grads: int
    states: int


def per_element(
    item_bytes: int, trainable: bool, accumulation: int, grad_bytes: int | None = None
) -> PerElement:
    """Return the bytes that one element takes for its parameter, its gradient and Adam's states."""
    if not trainable:
        return PerElement(item_bytes, 0, 0)
    grads = grad_bytes or (max(4, item_bytes) if accumulation > 1 else item_bytes)
    master, moment = (4, 4) if item_bytes < 4 else (0, item_bytes)
    return PerElement(item_bytes, grads, master + 2 * moment)


def state_bytes(
    shapes: Iterable[BucketShape], stage: int, world: int, accumulation: int = 1
) -> dict[str, int]:
    """Return one rank's bytes of params, grads and states, padding not counted."""
    return _states(((shape, shape.numel) for shape in shapes), stage, world, accumulation)


def buffer_bytes(
    shapes: Sequence[BucketShape], stage: int, world: int, accumulation: int = 1, further: int = 0
) -> int:
    """Return one rank's bytes of padding, gathered parameters, reduction slots and wire staging.

    `further` units are gathered ahead beyond the first.
    """
    padded = _states(((shape, shape.padded) for shape in shapes), stage, world, accumulation)
    exact = state_bytes(shapes, stage, world, accumulation)
    padding = sum(padded.values()) - sum(exact.values())
    gathered = 0
    apart = [shape for shape in shapes if not shape.holders]
    if stage == 3:
        passing = [shape for shape in apart if not shape.persistent]
        gathered = _root_and_largest(passing, PREFETCHED + further)
        gathered += sum(shape.padded * shape.item_bytes for shape in apart if shape.persistent)
        gathered //= max((shape.gatherers for shape in apart), default=1)
    slots = _root_and_largest([s for s in shapes if s.trainable]) if stage >= 2 else 0
    return padding + gathered + slots + wire_bytes(world, any(shape.receives for shape in shapes))


def wire_bytes(world: int, receives: bool = True) -> int:
    """Return the staging memory of reductions: a piece from each rank, and three blocks to sum in.

    On a single node nothing is received: there are only the blocks.
    """
    return (world * wire_piece(world) if receives else 0) + 3 * WIRE_BLOCK * 4


def wire_piece(world: int) -> int:
    """Return the bytes that a reduction receives from one peer at a time: 64 KiB to 1 MiB."""
    return max(1 << 16, min(1 << 20, (1 << 23) // world) & -4096)


def memory_formula(
    shapes: Sequence[BucketShape],
    stage: int,
    world: int,
    accumulation: int = 1,
    further: int = 0,
    on: Mapping[str, str] | None = None,
    delayed: bool = False,
) -> dict[str, int]:
    """Return one rank's bytes under `Engine.memory`'s keys: params, grads, states, buffers.

    The sum of what `memory_by_tier` counts, whose arguments it takes.
    """
    tiers = memory_by_tier(shapes, stage, world, accumulation, further, on, delayed)
    return {kind: sum(tier[kind] for tier in tiers.values()) for kind in tiers["device"]}


def memory_by_tier(
    shapes: Sequence[BucketShape],
    stage: int,
    world: int,
    accumulation: int = 1,
    further: int = 0,
    on: Mapping[str, str] | None = None,
    delayed: bool = False,
) -> dict[str, dict[str, int]]:
    """Return one rank's bytes on device, host and file, and on each by kind.

    `further` is the run's `Engine.further_units`: what measuring has added to the prefetch. `on` is
    the tier of params, grads and states, whose padding is a buffer there. What is on its way from
    and to files is a buffer of the device; new weights and the second gradient of delayed updates
    are buffers of the tier that keeps them.
    """
    on = on or {}
    kinds = *PerElement._fields, "buffers"
    tiers = {tier: dict.fromkeys(kinds, 0) for tier in ("device", "host", "file")}
    passing = buffer_bytes(shapes, stage, world, accumulation, further)
    for shape in shapes:
        exact = state_bytes([shape], stage, world, accumulation)
        padded = _states([(shape, shape.padded)], stage, world, accumulation)
        for kind, tier in _where(shape, on).items():
            tiers[tier][kind] += exact[kind]
            tiers[tier]["buffers"] += padded[kind] - exact[kind]
            passing -= padded[kind] - exact[kind]
    passing += moving_bytes(shapes, stage, world, accumulation, on, delayed)
    tiers["device"]["buffers"] += passing
    if delayed:
        for tier, nbytes in delayed_bytes(shapes, stage, world, accumulation, on).items():
            tiers[tier]["buffers"] += nbytes
    return tiers


def delayed_bytes(
    shapes: Iterable[BucketShape],
    stage: int,
    world: int,
    accumulation: int,
    on: Mapping[str, str],
) -> dict[str, int]:
    """Return the bytes by tier of what delayed updates need: new weights and a second gradient."""
    found = {"device": 0, "host": 0, "file": 0}
    for shape in shapes:
        if shape.trainable:
            each = per_element(shape.item_bytes, True, accumulation, shape.grad_bytes)
            shard = -(-shape.padded // world)
            where = _where(shape, on)
            found[where[_new_weights(shape, stage, delayed=True)]] += each.params * shard
            found[where["grads"]] += each.grads * (shape.padded if stage < 2 else shard)
    return found


def moving_bytes(
    shapes: Sequence[BucketShape],
    stage: int,
    world: int,
    accumulation: int,
    on: Mapping[str, str],
    delayed: bool = False,
) -> int:
    """Return the memory, at most, of what is on its way from or to files; padding not counted.

    In an update there are AHEAD + 1 + BEHIND parts; the next forward begins meanwhile, and with
    delayed updates the whole next step. There are the shards of what is being gathered, and those
    of gradients: one that is reduced, and BACKLOG bytes.
    """
    parts, grads = [], []
    for shape in shapes:
        each = _kept_on("file", shape, accumulation, on)
        shard = -(-shape.padded // world)
        written = _where(shape, on)[_new_weights(shape, stage, delayed)] == "file"
        bytes_each = each.grads + each.states + shape.item_bytes * written
        # What is wholly in memory is updated at once.
        size = STREAMED if bytes_each else max(shard, 1)
        if shape.trainable:
            parts += [bytes_each * min(size, shard - start) for start in range(0, shard, size)]
        grads.append(each.grads * shard)
    # Where gradients add up, those that wait for their reduction are here too.
    ahead = sum(sorted(grads)[-PREFETCHED - 2 :]) if accumulation > 1 else max(grads, default=0)
    width = AHEAD + 1 + BEHIND
    update = max((sum(parts[at : at + width]) for at in range(len(parts))), default=0)
    gathered = _root_and_largest(shapes) // world if on.get("params") == "file" else 0
    reduced = min(sum(grads), BACKLOG + ahead)
    return gathered + (update + reduced if delayed else max(update, reduced))


def io_minimum(
    shapes: Iterable[BucketShape],
    world: int,
    accumulation: int,
    backwards: int,
    on: Mapping[str, str],
) -> dict[str, int]:
    """Return the bytes that a rank has to move between tiers in a step, padding apart.

    Files: states come and go once. Gradients go after each backward, and come before the next one
    and for the update. Parameters come before each forward and each backward, those that stay
    gathered once, and go after the update. The host: gradients go there after each backward, or for
    the update if only states are there; then the new weights come back. Weights that are kept there
    come for each use.

    Args:
        shapes: of the buckets.
        world: the number of ranks.
        accumulation: micro-steps of a step.
        backwards: backward passes of a step in which gradients are reduced.
        on: the tier of params, grads and states.
    """
    read = written = to_host = from_host = 0
    for shape in shapes:
        shard = -(-shape.numel // world)
        each = _kept_on("file", shape, accumulation, on)
        # The update of what is its own master weight reads that too.
        before_update = shape.trainable and shape.item_bytes >= 4
        uses = int(shape.trainable) if shape.persistent else 2 * backwards
        read += shard * (
            each.states + backwards * each.grads + (uses + before_update) * each.params
        )
        written += shard * (each.states + backwards * each.grads + shape.trainable * each.params)
        host, device = (_kept_on(tier, shape, accumulation, on) for tier in ("host", "device"))
        updates = host.states > 0
        to_host += shard * (backwards * host.grads + updates * device.grads)
        from_host += shard * (uses * host.params + updates * device.params)
    return {"read": read, "written": written, "to_host": to_host, "from_host": from_host}


def traffic_multiples(
    stage: int,
    backwards: int,
    item_bytes: int,
    accumulation: int = 1,
    persistent: float = 0.0,
    grad_bytes: int | None = None,
    over_nodes: bool = False,
) -> float:
    """Return the logical traffic of one step in multiples of the model's bytes.

    Args:
        stage: ZeRO's stage, 0 to 3.
        backwards: backward passes of the whole step, all micro-steps together.
        item_bytes: of the compute dtype.
        accumulation: micro-steps per step; gradients add up in fp32 when there are several.
        persistent: the part of the model that stays gathered at stage 3, from 0 to 1: it is
            gathered once per step in place of twice per backward.
        grad_bytes: of the dtype that gradients add up in, where one is asked for.
        over_nodes: parameters are sharded over each of several nodes, which then get the new ones.
    """
    gradient = per_element(item_bytes, True, accumulation, grad_bytes).grads / item_bytes
    return {
        0: 2 * gradient,  # an all-reduce is a reduce-scatter and an all-gather
        1: gradient + 1,
        2: backwards + 1,
        3: 3 * backwards - persistent * (2 * backwards - 1) + over_nodes,
    }[stage]


def _kept_on(tier: str, shape: BucketShape, accumulation: int, on: Mapping[str, str]) -> PerElement:
    """Return the bytes per element of what a tier keeps, 0 for what it doesn't."""
    each = per_element(shape.item_bytes, shape.trainable, accumulation, shape.grad_bytes)
    where = _where(shape, on)
    return PerElement(*(nbytes * (where[kind] == tier) for kind, nbytes in each._asdict().items()))


def _where(shape: BucketShape, on: Mapping[str, str]) -> dict[str, str]:
    """Return the tier of each kind of a bucket's state."""
    stay = {"states": "device"} if shape.states_stay else {}
    return {**dict.fromkeys(PerElement._fields, "device"), **on, **stay}


def _new_weights(shape: BucketShape, stage: int, delayed: bool) -> str:
    """Return the kind of state whose tier the weights go to that an update makes."""
    if not delayed:
        return "params"
    # Where it is its own master weight, a master beside it has them.
    return "params" if stage == 3 and shape.item_bytes < 4 else "states"


def _states(
    elements: Iterable[tuple[BucketShape, int]], stage: int, world: int, accumulation: int
) -> dict[str, int]:
    total = {"params": 0, "grads": 0, "states": 0}
    for shape, numel in elements:
        shard = -(-numel // world)
        each = per_element(shape.item_bytes, shape.trainable, accumulation, shape.grad_bytes)
        held = -(-numel // shape.holders) if shape.holders else shard
        total["params"] += each.params * (held if stage == 3 else numel)
        total["grads"] += each.grads * (shard if stage >= 2 else numel)
        total["states"] += each.states * (shard if stage >= 1 else numel)
    return total


def _root_and_largest(shapes: Iterable[BucketShape], count: int = PREFETCHED) -> int:
    """Return the whole bytes of the root's buckets and of the `count` largest other units."""
    units: dict[str, int] = {}
    for shape in shapes:
        units[shape.unit] = units.get(shape.unit, 0) + shape.padded * shape.item_bytes
    root = units.pop("", 0)
    return root + sum(sorted(units.values())[-count:])
