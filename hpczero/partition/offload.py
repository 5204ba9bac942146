"""Which tier keeps what, as the config asks."""

from __future__ import annotations

import errno
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from hpczero import sizing
from hpczero.comm.world import World
from hpczero.config import Config, Device
from hpczero.infinity.tier import Memory, Moved, Tier
from hpczero.partition.arena import Ledger
from hpczero.partition.bucket import Tiers
from hpczero.partition.grouping import Group, group
from hpczero.plan import Plan, Scope, TierName

if TYPE_CHECKING:
    from hpczero.infinity.filetier import FileTier

TIERS: dict[Device, TierName] = {"none": "device", "cpu": "host", "nvme": "file"}


class Offload:
    """Make the tiers that a config asks for; all ranks call. Costs an exchange of a few bytes.

    Raises:
        OSError: on all ranks, if one can't write its folder, or the ranks of a host need more room
            than its disk has; names the rank, the folder and the bytes.
    """

    def __init__(self, config: Config, model: nn.Module, world: World, ledger: Ledger) -> None:
        self._zero = zero = config.zero_optimization
        self._ledger = ledger
        self._files: dict[str, FileTier] = {}
        self._rank = world.rank
        optimizer, params = zero.offload_optimizer, zero.offload_param
        failure: OSError | None = None
        try:
            self._tiers: Tiers = {
                "params": self._tier(params.device, params.nvme_path),
                "grads": self._tier(zero.gradients_on, optimizer.nvme_path),
                "states": self._tier(optimizer.device, optimizer.nvme_path),
            }
        except OSError as error:
            failure = error
        needed = {} if failure else self._needed(config, group(model), world.size)
        self._agree(world, failure, needed)

    def _tier(self, device: Device, path: str | None) -> Tier:
        if device != "nvme":
            return Memory(TIERS[device])
        assert path is not None  # the config sees to it
        if path not in self._files:
            from hpczero.infinity.filetier import FileTier  # h5py is slow to import

            ledger = self._ledger  # not self, which has the tier: nobody would be freed

            def account(nbytes: int) -> None:
                ledger.add("buffers", nbytes)

            self._files[path] = FileTier(
                Path(path),
                self._rank,
                account,
                keep=self._zero.offload_keep_files,
                checksums=self._zero.offload_checksums,
            )
        return self._files[path]

    def _needed(self, config: Config, groups: Sequence[Group], world: int) -> dict[str, int]:
        """Return the bytes that this rank will keep in each folder, about."""
        needed = dict.fromkeys(self._files, 0)
        half = config.compute != "fp32"
        asked = config.data_types.grad_accum_dtype
        grads = None if asked is None else 4 if asked == "fp32" else 2
        delayed = self._zero.offload_optimizer.delayed_update.enabled
        for part, tiers in zip(groups, self.tiers(groups), strict=True):
            for _, parameter in part.parameters:
                item = 2 if half and parameter.is_floating_point() else parameter.element_size()
                trained = parameter.requires_grad
                each = sizing.per_element(item, trained, config.accumulation, grads)._asdict()
                if delayed and trained:
                    staged = "params" if item < 4 and self._zero.stage == 3 else "states"
                    each["grads"] *= 2
                    each[staged] += each["params"]
                for kind, tier in tiers.items():
                    for path, file in self._files.items():
                        if tier is file:
                            needed[path] += each[kind] * -(-parameter.numel() // world)
        return needed

    def _agree(self, world: World, failure: OSError | None, needed: dict[str, int]) -> None:
        """Fail on all ranks if one can't make its files, or a disk has no room for all of them."""
        host = world.hosts[world.rank]
        disks = [(path, host, *self._files[path].free, size) for path, size in needed.items()]
        told = world.gathers.exchange_objects("files", (failure and str(failure), disks)).result()
        for rank, (text, _) in enumerate(told):
            if text is not None:
                raise failure or OSError(errno.EIO, f"rank {rank} can't offload: {text}")
        wanted: dict[tuple[str, int], int] = {}
        for _, theirs in told:
            for path, where, disk, free, size in theirs:
                wanted[where, disk] = wanted.get((where, disk), 0) + size
                if wanted[where, disk] > free:
                    total = sum(
                        other[4]
                        for _, each in told
                        for other in each
                        if other[1:3] == (where, disk)
                    )
                    text = f"offloading needs {total} bytes on {where}, free are {free}"
                    raise OSError(errno.ENOSPC, text, path)

    def tiers(self, groups: Sequence[Group]) -> list[Tiers]:
        """Return the tiers of each group; some states stay on the device, as the ratio asks.

        Those of the first groups: they are updated first, and the next forward begins with them.
        """
        sizes = [sum(parameter.numel() for _, parameter in part.parameters) for part in groups]
        trained = [part.parameters[0][1].requires_grad for part in groups]
        room = (1 - self._zero.offload_optimizer.ratio) * sum(map(operator.mul, sizes, trained))
        found: list[Tiers] = []
        for size, trains in zip(sizes, trained, strict=True):
            stays = trains and size <= room
            room -= size * stays
            found.append({**self._tiers, "states": Memory("device")} if stays else self._tiers)
        return found

    @property
    def on(self) -> dict[str, TierName]:
        """Return where each kind of state is kept."""
        return {str(kind): tier.name for kind, tier in self._tiers.items()}

    def plan(self, params: Scope) -> Plan:
        """Return the plan of the config's stage on these tiers.

        Args:
            params: over which ranks stage 3 shards the parameters.
        """
        on = self.on
        return Plan.stage(
            self._zero.stage,
            params,
            params_on=on["params"],
            grads_on=on["grads"],
            states_on=on["states"],
        )

    def begin_counting(self) -> None:
        """Leave out of `moved` what building has cost."""
        self._before = self._all_moved()

    @property
    def moved(self) -> dict[TierName, Moved]:
        """Return the bytes that went from and to files, and the host, since all was built."""
        now, before = self._all_moved(), self._before
        return {
            tier: Moved(*map(operator.sub, now[tier], before[tier])) for tier in ("file", "host")
        }

    def _all_moved(self) -> dict[TierName, Moved]:
        tiers = {id(tier): tier for tier in self._tiers.values()}.values()
        moved: dict[TierName, Moved] = {}
        for name in ("file", "host"):
            each = [tier.moved for tier in tiers if tier.name == name]
            moved[name] = Moved(sum(m.read for m in each), sum(m.written for m in each))
        return moved
