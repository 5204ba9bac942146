"""Which tier keeps what, as the config asks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpczero.comm.world import World
from hpczero.config import Device, ZeroOptimization
from hpczero.infinity.tier import Memory, Moved, Tier
from hpczero.partition.arena import Ledger
from hpczero.partition.bucket import Tiers
from hpczero.plan import Plan, Scope, TierName

if TYPE_CHECKING:
    from hpczero.infinity.filetier import FileTier

TIERS: dict[Device, TierName] = {"none": "device", "cpu": "host", "nvme": "file"}


class Offload:
    """Make the tiers that a config asks for; a rank's own.

    Raises:
        OSError: a folder for files can't be written; names it.
    """

    def __init__(self, zero: ZeroOptimization, world: World, ledger: Ledger) -> None:
        self._zero, self._ledger = zero, ledger
        self._files: dict[str, FileTier] = {}
        self._rank = world.rank
        optimizer, params = zero.offload_optimizer, zero.offload_param
        self.tiers: Tiers = {
            "params": self._tier(params.device, params.nvme_path),
            "grads": self._tier(zero.gradients_on, optimizer.nvme_path),
            "states": self._tier(optimizer.device, optimizer.nvme_path),
        }

    def _tier(self, device: Device, path: str | None) -> Tier:
        if device != "nvme":
            return Memory(TIERS[device])
        assert path is not None  # the config sees to it
        if path not in self._files:
            from hpczero.infinity.filetier import FileTier  # h5py is slow to import

            keep = self._zero.offload_keep_files
            ledger = self._ledger  # not self, which has the tier: nobody would be freed

            def account(nbytes: int) -> None:
                ledger.add("buffers", nbytes)

            self._files[path] = FileTier(Path(path), self._rank, account, keep=keep)
        return self._files[path]

    @property
    def on(self) -> dict[str, TierName]:
        """Return where each kind of state is kept."""
        return {str(kind): tier.name for kind, tier in self.tiers.items()}

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

    def seal(self) -> None:
        """Say that nothing more will be kept: files lose their names, unless they are to stay."""
        for file in self._files.values():
            file.seal()
        self._before = self._all_moved()

    @property
    def moved(self) -> Moved:
        """Return the bytes that went from and to files since all was there."""
        now, before = self._all_moved(), self._before
        return Moved(now.read - before.read, now.written - before.written)

    def _all_moved(self) -> Moved:
        moved = [file.moved for file in self._files.values()]
        return Moved(sum(each.read for each in moved), sum(each.written for each in moved))
