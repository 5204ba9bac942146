"""Look at or change partitioned weights outside the model's own run."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from torch import nn

from hpczero.partition.bucket import Bucket
from hpczero.partition.hooks import Member, Runtime
from hpczero.partition.tensor import OWNERS


class GatheredParameters:
    """Make the whole weights of partitioned parameters available inside a `with` block.

    All ranks enter and leave together. Costs an all-gather and two copies of the buckets in which
    the parameters lie. With `modifier_rank` the changes that this rank made to them are broadcast
    and kept, and masters change only where bits of the weights did; with None changes are
    discarded. Parameters that no engine partitions are left alone.

    Args:
        params: parameters, or a module for all of its parameters.
        modifier_rank: the rank whose changes are kept.
        enabled: False does nothing.
    """

    def __init__(
        self,
        params: nn.Module | nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, nn.Module):
            params = list(params.parameters())
        elif isinstance(params, nn.Parameter):
            params = [params]
        self._members: dict[int, list[nn.Parameter]] = {}
        self._runtimes: dict[int, tuple[Bucket, Runtime]] = {}
        self._modifier_rank = modifier_rank
        for parameter in params if enabled else []:
            member: Member | None = OWNERS.get(parameter)  # type: ignore[no-untyped-call]
            if member is not None:
                self._members.setdefault(id(member.bucket), []).append(parameter)
                self._runtimes[id(member.bucket)] = (member.bucket, member.runtime)

    def __enter__(self) -> None:
        """Gather.

        Raises:
            RuntimeError: an update is delayed: new weights would undo what is changed here.
        """
        late = [bucket.name for bucket, _ in self._runtimes.values() if bucket.pending]
        if late and self._modifier_rank is not None:
            raise RuntimeError(
                f"GatheredParameters to change {late[0]!r} while its update is delayed: save a "
                "checkpoint before, which ends the delay, or change it before the first step"
            )
        for bucket, runtime in self._runtimes.values():
            bucket.held += 1
            runtime.use(bucket)
            bucket.part()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Keep the modifier's changes, or discard all, and release."""
        for key, (bucket, runtime) in self._runtimes.items():
            if error is None and self._modifier_rank is not None:
                runtime.broadcast_full(bucket, self._modifier_rank, self._members[key])
            else:
                bucket.discard()
            bucket.held -= 1
            if not runtime.running:
                runtime.release_all()
