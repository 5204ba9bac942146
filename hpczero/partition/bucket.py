"""Parameters that travel together: one flat run, one shard, one local gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Literal

import torch

from hpczero.comm.collectives import Count
from hpczero.comm.courier import Courier
from hpczero.comm.node import NodeMemory
from hpczero.comm.wire import Cargo
from hpczero.comm.world import World
from hpczero.config import ZeroOptimization
from hpczero.gpu.norm import sum_of_squares
from hpczero.infinity.stream import copy
from hpczero.infinity.tier import Array, Memory, Part, Tier, done, until
from hpczero.partition.arena import Arena, Ledger
from hpczero.partition.grouping import Group
from hpczero.partition.initial import Initial
from hpczero.partition.layout import Layout
from hpczero.partition.local import LocalGradients
from hpczero.partition.precision import Precision
from hpczero.partition.task import Task
from hpczero.partition.tensor import ReleasedParameter
from hpczero.plan import Home, Plan, TierName

State = Literal["params", "grads", "states"]

Tiers = Mapping[State, Tier]
"""Where each kind of sharded state is kept."""


class Bucket:
    """Own the tensors of parameters that travel together (see [Note: the tensors of a bucket]).

    Created by all ranks together; rank 0's values win. Costs on each rank what `sizing` states for
    the plan, and while gathered the full run in the compute dtype. In the `memory` of the node,
    what ranks reduce and publish is read where it lies, and the full run of sharded parameters is
    one for its ranks. Where there is one node only, or parameters are sharded over nodes only, it
    stays: the shard is a slice of it, and a gather moves nothing.
    """

    def __init__(
        self,
        group: Group,
        plan: Plan,
        precision: Precision,
        world: World,
        ledger: Ledger,
        arena: Arena,
        zero: ZeroOptimization,
        tiers: Tiers,
        initial: Initial,
        memory: NodeMemory | None = None,
    ) -> None:
        self.name = group.name
        self.params = [parameter for _, parameter in group.parameters]
        self.dtype = self.params[0].dtype
        self.trainable = self.params[0].requires_grad
        self.layout = Layout.of(
            [(name, tuple(parameter.shape)) for name, parameter in group.parameters], world.size
        )
        self._world, self._ledger, self._arena, self._zero = world, ledger, arena, zero
        self._tiers, self._memory = tiers, memory
        self._sharded = plan.params.scope != "none"
        spreads = plan.params.scope == "node" and world.nodes > 1
        here = plan.params.tier == "device" and (spreads or world.nodes == 1)
        self.on_node = self._sharded and memory is not None and here
        """Whether the node's ranks share one copy of the weights, which each updates a slice of."""
        self.holders = world.local_size if self.on_node else 0 if self._sharded else 1
        """How many ranks share one copy of the weights that stays; 0: each gathers its own."""
        self.frees = self._sharded and not self.on_node
        """Whether released weights are gone from here."""
        self._shared = memory if self._sharded else None
        """Where the full run is one for all ranks of the node, gathered or staying."""
        self.gatherers = 1 if self._shared is None else world.local_size
        """How many ranks share what is gathered."""
        self._publishes = plan.states.scope == "world" and (spreads or not self._sharded)
        self._staged: Array | None = None
        """Where new weights wait for the end of the next step, if updates are delayed."""
        self.pending = False
        """Whether there are such."""
        self.held = 0
        """How many GatheredParameters forbid the release."""
        self._befores: list[torch.Tensor] = []
        """What the weights were when each GatheredParameters began, the outermost first."""
        self.persistent = False
        """Whether gathered weights stay until an update changes them, and their memory for ever."""
        self._ready: Future[None] | None = None
        self._announced = False
        """Whether new weights have not been asked for since an update that goes on."""
        self._news: Future[None] | None = None
        """Done when all ranks that share the weights have updated them."""
        self.updated = done()
        """Done when this rank has updated what it owns."""
        self._here = True
        """Whether the weights can be read: gathered, and waited for."""
        self._allocated = True
        """Whether the full run has memory."""
        self._gathers = 1
        """How often all ranks have had the full run: a number that they agree on."""
        self._classes = [type(parameter) for parameter in self.params]
        self._build(plan, initial)
        if self.trainable:
            self._build_trainable(plan, precision)

    @property
    def own(self) -> tuple[int, int]:
        """Return the interval of the flat run that is this rank's shard."""
        return self.layout.interval(self._world.rank)

    # Build #

    def _build(self, plan: Plan, initial: Initial) -> None:
        layout = self.layout
        if self._memory is None:
            self.full = torch.zeros(layout.padded, dtype=self.dtype)
        else:
            take = self._memory.empty if self._shared is None else self._memory.shared
            self.full = take(self._full_bytes).view(self.dtype)
        if self._shared is not None:
            self._released = self._shared.shared(8 * self._world.local_size).view(torch.int64)
        alone = self._shared is not None and self._world.nodes == 1  # who else has a copy?
        # One rank of a node writes what all of its ranks share.
        mine = self._shared is None or self._world.local_rank == 0
        whole = self.full if mine or alone else torch.zeros_like(self.full)
        if mine:
            for slot, parameter in zip(layout.slots, self.params, strict=True):
                values = initial.values(slot.name, parameter)
                whole[slot.start : slot.stop].copy_(values.reshape(-1))
        if not alone:
            self._world.gathers.broadcast(self._cargo("parameters", self.dtype), whole).result()
        if self._shared is not None:
            self._world.gathers.meet(f"weights of {self.name!r}").result()
        for slot, parameter in zip(layout.slots, self.params, strict=True):
            parameter.data = self.full[slot.start : slot.stop].view(slot.shape)
        own = slice(*self.own)
        self._aliases = self._count_aliases()
        self.gathered = True
        if self.frees:
            self._stored = self._array("params", "weights", self.own, self.dtype)
            with self._stored.anew() as shard:
                shard.copy_(self.full[own])
            self._ledger.add("buffers", self._full_bytes // self.gatherers)
        else:
            self._stored = Array(self.full[own])
            part = layout.padded // self._world.local_size if self._sharded else layout.padded
            begin = self._world.local_rank * part if self._sharded else 0
            used = layout.used(begin, begin + part)
            self._ledger.add("params", used * self.dtype.itemsize)
            self._ledger.add("buffers", (part - used) * self.dtype.itemsize)
        self.shard = self._stored.tensor
        """This rank's interval of the weights; where it isn't resident, a place for it."""
        self.release()

    def _build_trainable(self, plan: Plan, precision: Precision) -> None:
        self._divisor = self._world.size
        self.span = self._span(plan.states)
        """The interval of the flat run that this rank updates."""
        lo, hi = self.span
        self._weights = self._stored if self._sharded else Array(self.full[lo:hi])
        self.weights = self._weights.tensor
        """The updated interval in the compute dtype."""
        master = precision.master(self.dtype)
        if master == self.dtype:
            self._master = self._weights
        else:
            self._master = self._array("states", "master", self.span, master)
            with self._master.anew() as values, self._weights.here() as weights:
                values.copy_(weights)
        self.master = self._master.tensor
        self._states: dict[str, Array] = {}
        grads_lo, grads_hi = self._span(plan.grads)
        self._grads_lo = grads_lo
        self._accumulates = plan.grads.scope == "none"
        """Whether local gradients add up in `grads`, which the others then look at."""
        grads_dtype = precision.grads(self.dtype)
        seen = self._memory if self._accumulates else None
        span = (grads_lo, grads_hi)
        self._grads = self._array("grads", "gradients", span, grads_dtype, seen)
        self._look_at_gradients()
        if self._zero.offload_optimizer.delayed_update.enabled:
            self._build_staging(grads_dtype)
        self._everywhere = plan.states.scope == "none"
        local = self.layout, self._arena, self.grads.dtype if self._accumulates else self.dtype
        self._local, self._late = LocalGradients(*local), LocalGradients(*local)
        self._seen: set[int] = set()
        self.closed = False
        self.reduced = False
        """Whether `grads` holds a reduced gradient of this step."""
        self._squares: float | None = None
        """Of this rank's shard of the reduced gradient, where it was there only for a while."""

    def _look_at_gradients(self) -> None:
        (lo, hi), (own_lo, own_hi), start = self.span, self.own, self._grads_lo
        self.grads = self._grads.tensor
        self.gradient = self.grads[lo - start : hi - start]
        """The reduced gradient of the updated interval."""
        self.own_gradient = self.grads[own_lo - start : own_hi - start]
        """The reduced gradient of this rank's shard."""

    def _build_staging(self, grads_dtype: torch.dtype) -> None:
        """Make room for new weights beside those in use, and for the next step's gradient."""
        if self._master is self._weights:
            self._master = self._array("states", "master", self.span, self.dtype, extra=True)
            with self._master.anew() as values, self._weights.here() as weights:
                values.copy_(weights)
            self.master = self._master.tensor
            self._staged = self._master
        else:
            kind: State = "params" if self._sharded else "states"
            self._staged = self._array(kind, "staged", self.span, self.dtype, extra=True)
        seen = self._memory if self._accumulates else None
        span = (self._grads_lo, self._grads_lo + self.grads.numel())
        self._spare = self._array("grads", "spare", span, grads_dtype, seen, extra=True)

    def _array(
        self,
        kind: State,
        name: str,
        span: tuple[int, int],
        dtype: torch.dtype,
        memory: NodeMemory | None = None,
        extra: bool = False,
    ) -> Array:
        """Return zeros that count under `kind`, or are `extra`; in `memory` the node sees them."""
        start, stop = span
        used, tier = self.layout.used(start, stop), self._tiers[kind]
        used = 0 if extra else used
        self._ledger.add(kind, used * dtype.itemsize, tier.name)
        self._ledger.add("buffers", (stop - start - used) * dtype.itemsize, tier.name)
        if memory is None:
            return tier.zeros(f"{self.name}/{name}", stop - start, dtype)
        return Array(memory.empty((stop - start) * dtype.itemsize).view(dtype).zero_())

    def _span(self, home: Home) -> tuple[int, int]:
        if home.scope == "none":
            return 0, self.layout.padded
        return self.own

    @property
    def _full_bytes(self) -> int:
        return self.layout.padded * self.dtype.itemsize

    def _cargo(self, purpose: str, dtype: torch.dtype) -> Cargo:
        zero = self._zero
        piece = zero.reduce_bucket_size if purpose == "gradients" else zero.allgather_bucket_size
        payload = self.layout.numel * dtype.itemsize
        return Cargo(purpose, self.name, payload, None if piece == "auto" else piece)

    # Gather and release #

    def gather(self) -> None:
        """Start to bring the whole bucket here; nothing where it is already."""
        if self.gathered:
            return
        self.gathered = True
        self._post_news()
        cargo = self._cargo("parameters", self.dtype)
        if self.on_node:
            self._world.traffic.add("all_gather", cargo.purpose, Count(1, cargo.payload, 0))
            return
        if not self._allocated:
            if self._shared is None:
                self.full.untyped_storage().resize_(self._full_bytes)
            else:
                self._shared.fill(self.full)
            self._allocated = True
            self._ledger.add("buffers", self._full_bytes // self.gatherers)
        self._gathers += 1
        self._count("params", read=self.shard.nbytes)
        self._ready = self._world.gathers.all_gather(
            cargo, self.full, self.shard, within=self._stored.coming(self.updated)
        )

    def wait(self) -> None:
        """Wait until the gathered weights can be read."""
        self.await_news()
        if self._here:
            return
        if self._ready is not None:
            self._await_gathered(self._ready)
        self._here = True
        for parameter, original in zip(self.params, self._classes, strict=True):
            parameter.__class__ = original

    def await_news(self) -> None:
        """Wait for new weights that have been posted."""
        if self._news is not None:
            with self._world.timeline.wait("new weights", self.name):
                self._news.result()
            self._news = None

    def _await_gathered(self, ready: Future[None]) -> None:
        with self._world.timeline.wait("gathers", self.name):
            ready.result()
        self._ready = None

    def release(self) -> None:
        """Give the gathered weights back, unless held, persistent or replicated.

        The storage is emptied in place: whoever saved a view of it finds the weights again after
        the next gather. While foreign views of it are alive it is kept, so that reading one is
        never reading freed memory; see `free`.
        """
        if self._sharded and self.gathered and not self.held and not self.persistent:
            self._forget()
            self.free()

    def outdate(self, frozen: bool = False) -> bool:
        """Forget persistent weights that have changed in the shards; tell whether there were any.

        Those of frozen buckets too, if asked: an update leaves them, loading doesn't.
        """
        outdated = self.persistent and (self.trainable or frozen) and self.gathered
        if outdated:
            self._forget()
        return outdated

    def _forget(self) -> None:
        if self._ready is not None:
            self._await_gathered(self._ready)  # the courier still writes into it
        self.gathered = self._here = False
        for parameter in self.params:
            parameter.__class__ = ReleasedParameter

    def free(self) -> bool:
        """Empty a released bucket's storage unless others look at it; tell whether it is empty.

        What all ranks of the node share is emptied by the last of them. The others may have begun
        to gather it again, but nothing is written before this one comes to that gather too.
        """
        if self.gathered or self.persistent or not self.frees or not self._allocated:
            return True
        if self._count_aliases() > self._aliases:
            return False
        if self._shared is None:
            self.full.untyped_storage().resize_(0)
        else:
            self._released[self._world.local_rank] = self._gathers
            if bool((self._released >= self._gathers).all()):
                self._shared.drop(self.full)
        self._allocated = False
        self._ledger.add("buffers", -(self._full_bytes // self.gatherers))
        return True

    def _count_aliases(self) -> int:
        return int(torch._C._storage_Use_Count(self.full.untyped_storage()._cdata))

    # Gradients #

    def begin_backward(self) -> None:
        """Forget which gradients came in the last backward."""
        self._seen.clear()
        self.closed = False

    def take_grad(self, index: int) -> bool:
        """Move a parameter's gradient into the local buffer; tell whether all have come."""
        parameter = self.params[index]
        grad = parameter.grad
        assert grad is not None
        parameter.grad = None
        if self.closed:
            self._late.add(index, grad)
            return False
        self._begin_local()
        self._local.add(index, grad)
        self._seen.add(index)
        return len(self._seen) == len(self.params)

    def _begin_local(self) -> None:
        if self._accumulates and not self.reduced:
            self._local.begin_in(self.grads)

    @property
    def late(self) -> bool:
        """Tell whether a gradient came after the reduction was posted."""
        return self._late.begun

    def reduce(self) -> None:
        """Post the reduction of the local gradient; parameters without one count as zero."""
        self._begin_local()
        self._post(self._local.take())

    def reduce_late(self) -> None:
        """Post the reduction of late gradients, zero where this rank has none."""
        self._post(self._late.take())

    def _post(self, local: torch.Tensor) -> None:
        cargo = self._cargo("gradients", local.dtype)
        courier, add = self._world.reductions, self.reduced
        self._count("grads", written=self.own_gradient.nbytes)
        if self._everywhere:
            job = courier.all_reduce(cargo, local, self.grads, divisor=self._divisor, add=add)
        else:
            job = courier.reduce_scatter(
                cargo,
                local,
                self.own_gradient,
                divisor=self._divisor,
                add=add,
                within=self._grads.filling(add),
            )
        if local is not self.grads:
            self._arena.give_back(local, job)
        self._job = self._grads.settle(job, self._count_squares)
        self.reduced = True

    def wait_reduced(self) -> None:
        """Wait until `gradient` holds everything that was posted."""
        with self._world.timeline.wait("reductions", self.name):
            self._job.result()  # earlier ones are done: the courier is first in, first out

    def _count_squares(self) -> None:
        self._squares = sum_of_squares(self.own_gradient)

    def squares(self) -> float:
        """Return the sum of squares of this rank's shard of the reduced gradient."""
        return sum_of_squares(self.own_gradient) if self._squares is None else self._squares

    def first_not_finite(self) -> str | None:
        """Return the first parameter whose reduced gradient in this rank's shard isn't finite."""
        lo, hi = self.own
        with self._grads.here():
            for slot in self.layout.slots:
                start, stop = max(slot.start, lo), min(slot.stop, hi)
                if start < stop and not self.own_gradient[start - lo : stop - lo].isfinite().all():
                    return slot.name
        return None

    def collect_gradient(self, purpose: str) -> torch.Tensor | None:
        """Return the whole reduced gradient on rank 0, None elsewhere; all ranks call."""
        lo = self.span[0] - self._grads_lo
        return self.collect(self._grads.values(lo, lo + self.master.numel()), purpose)

    def _count(self, kind: State, read: int = 0, written: int = 0) -> None:
        """Count what goes between the device and the host; files count what goes to them."""
        tier = self._tiers[kind]
        if isinstance(tier, Memory):
            tier.count(read, written)

    def end_step(self) -> None:
        """Forget the gradient that was used."""
        self.reduced = False
        self._squares = None

    # Update #

    def state(self, kind: str) -> torch.Tensor:
        """Return a state of the optimizer like `master`, zero at first."""
        if kind not in self._states:
            self._states[kind] = self._array("states", kind, self.span, self.master.dtype)
        return self._states[kind].tensor

    @property
    def resident(self) -> bool:
        """Tell whether all that an update needs is always in memory."""
        return self.task().resident

    @property
    def states_on(self) -> TierName:
        """Return the tier of the optimizer's states."""
        return self._tiers["states"].name

    @property
    def staged(self) -> bool:
        """Tell whether updates leave the weights alone until `take_over`."""
        return self._staged is not None

    def task(self) -> Task:
        """Return what an update of the gradient that there is now works on."""
        offset = self.span[0] - self._grads_lo
        states = dict(self._states)
        target = self._weights if self._staged is None else self._staged
        return Task(self._grads, offset, self._master, states, target)

    def count_update(self) -> None:
        """Count what an update on the host is brought from the device, and brings back."""
        if self.states_on == "host":
            on_device = {kind: tier.name == "device" for kind, tier in self._tiers.items()}
            self._count(
                "states",
                read=self.weights.nbytes * on_device["params"],
                written=self.gradient.nbytes * on_device["grads"],
            )

    def flip(self) -> None:
        """Leave the gradient to the update that goes on; the next one is reduced beside it."""
        self.pending = True
        self._grads, self._spare = self._spare, self._grads
        self._look_at_gradients()

    def take_over(self) -> None:
        """Make the staged weights those in use, which nobody uses now; `publish` them then."""
        if not self.pending or self._staged is None:
            return
        self.pending = False
        if self._staged is self._master or not self.frees:
            copy(self._staged, self._weights)
        else:
            self._staged, self._stored = self._stored, self._staged
            self._weights, self.shard = self._stored, self._stored.tensor
            self.weights = self.shard

    def account_states(self, nbytes: int) -> None:
        """Account states that an optimizer has made for itself."""
        self._ledger.add("states", nbytes, self.states_on)

    def publish(self) -> Future[None] | None:
        """Give the shard, once it is updated, to all ranks, or nodes, that have a copy."""
        if not self._publishes:
            return None
        return self._send(self._world.gathers)

    def _send(self, courier: Courier) -> Future[None]:
        cargo, within = self._cargo("parameters", self.dtype), until(self.updated)
        return courier.all_gather(cargo, self.full, self.shard, within=within)

    def announce(self) -> None:
        """Let the next use wait for new weights, which are published then; all ranks call."""
        self._announced = True
        if self.gathered:
            self._post_news()

    def publish_announced(self) -> None:
        """Publish what is announced already now, while the program goes on; all ranks call.

        Among the reductions, of which there are none now: nothing that is gathered next waits.
        """
        if self._announced and self._publishes:
            self._announced = False
            self._news = self._send(self._world.reductions)

    def _post_news(self) -> None:
        """Post what brings new weights, in the order in which they are used: the queue waits."""
        if not self._announced:
            return
        self._announced = False
        self._news = self.publish()
        if self._news is None and self.on_node:
            meeting = f"new weights of {self.name!r}"
            self._news = self._world.gathers.meet(meeting, within=until(self.updated))

    @property
    def own_weights(self) -> Part:
        """Return this rank's shard of the master weights (frozen ones: in their own dtype)."""
        if not self.trainable:
            return Part(self._stored, 0, self.layout.shard)
        return self._own(self._master)

    @property
    def own_states(self) -> dict[str, Part]:
        """Return this rank's shard of the optimizer's states that lie here."""
        return {kind: self._own(array) for kind, array in self._states.items()}

    def _own(self, array: Array) -> Part:
        lo, hi = self.own
        return Part(array, lo - self.span[0], hi - self.span[0])

    @contextlib.contextmanager
    def states_here(self) -> Iterator[None]:
        """Have the optimizer's states in memory inside the block, and keep its changes."""
        with contextlib.ExitStack() as stack:
            for array in self._states.values():
                stack.enter_context(array.here(changes=True))
            yield

    def collect_weights(self, purpose: str) -> torch.Tensor | None:
        """Return the whole master weights (frozen ones: in their own dtype) on rank 0, else None.

        All ranks call.
        """
        return self.collect((self._master if self.trainable else self._stored).values(), purpose)

    def fill(self, read: Callable[[str, int, int], torch.Tensor | None]) -> None:
        """Overwrite the weights that this rank updates (frozen ones: those that it keeps).

        Communicates nothing; `publish` brings the other ranks what is theirs.

        Args:
            read: returns elements [start, stop) of a parameter by its name, in any dtype, or None
                where they stay as they are.
        """
        if self.trainable:
            (lo, hi), array = self.span, self._master
        elif self._sharded:
            (lo, hi), array = self.own, self._stored
        else:
            (lo, hi), array = (0, self.layout.padded), Array(self.full)
        with array.here(changes=True) as target:
            for slot in self.layout.slots:
                start, stop = max(slot.start, lo), min(slot.stop, hi)
                if start < stop:
                    values = read(slot.name, start - slot.start, stop - slot.start)
                    if values is not None:
                        target[start - lo : stop - lo].copy_(values)
            if self.trainable and self._master is not self._weights:
                with self._weights.anew() as weights:
                    weights.copy_(target)

    def part(self) -> None:
        """Let changes of gathered weights stay on this rank until `adopt` or `discard`.

        All ranks call. May be called again before that. Costs a copy of the full run.
        """
        if self._shared is not None:
            self._world.gathers.meet(f"GatheredParameters of {self.name!r}").result()
            if not self._befores:
                self._shared.part(self.full)
        self._befores.append(self.full.clone())

    def keep_changes_of(self, params: Sequence[torch.Tensor]) -> None:
        """Undo the changes since the last `part` of all other parameters than these."""
        kept = {id(parameter) for parameter in params}
        for slot, parameter in zip(self.layout.slots, self.params, strict=True):
            if id(parameter) not in kept:
                place = slice(slot.start, slot.stop)
                self.full[place].copy_(self._befores[-1][place])

    def discard(self) -> None:
        """Undo the changes since the last `part`."""
        before = self._befores.pop()
        if self._shared is not None and not self._befores:
            self._shared.join(self.full)
        else:
            self.full.copy_(before)

    def adopt(self) -> None:
        """Take over weights that all ranks have changed alike since the last `part`.

        Masters change only where bits of the weights did. All ranks call.
        """
        before, after = self._befores.pop(), self.full.clone()
        other = after.view(torch.uint8) != before.view(torch.uint8)
        changed = other.view(self.layout.padded, self.dtype.itemsize).any(1)
        for earlier in self._befores:
            earlier[changed] = after[changed]
        lo, hi = self.span if self.trainable else self.own
        if self.trainable and self._master is not self._weights:
            mine = changed[lo:hi]
            with self._master.here(changes=True) as master:
                master[mine] = after[lo:hi][mine].to(master.dtype)
        if not self._sharded:
            return
        if self._shared is not None:
            self._shared.join(self.full)
        own = slice(*self.own)
        with self._stored.here(changes=True) as shard:
            shard[changed[own]] = after[own][changed[own]]
        if self.on_node:
            published = self.publish() or self._world.gathers.meet(f"changes of {self.name!r}")
            published.result()
        elif self._shared is not None:  # what is gathered is still the old
            self._forget()
            self.gather()
            self.wait()
        if self._befores and self._shared is not None:
            self._shared.part(self.full)
            self.full.copy_(after)

    @property
    def is_root_rank(self) -> bool:
        """Tell whether this rank is the one that `collect` gives to."""
        return self._world.rank == 0

    def collect(self, mine: torch.Tensor, purpose: str) -> torch.Tensor | None:
        """Return a whole flat run of which each rank has its interval on rank 0, None elsewhere.

        All ranks call. Whoever has the whole run already gives it without communication.
        """
        root = self._world.rank == 0
        if mine.numel() == self.layout.padded:
            return mine if root else None
        full = torch.empty(self.layout.padded, dtype=mine.dtype) if root else None
        cargo = self._cargo(purpose, mine.dtype)
        self._world.gathers.gather(cargo, mine, full).result()
        return full

    def named(self, full: torch.Tensor | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters' names and views of a whole flat run, nothing for None."""
        if full is not None:
            for slot in self.layout.slots:
                yield slot.name, full[slot.start : slot.stop].view(slot.shape)
