"""Where every model state lives.

[Note: a stage is data]
A stage of ZeRO is three Homes, not a class: over which ranks the parameters, the gradients and the
optimizer states are sharded, and on which tier they are kept. Everything below asks a Home for an
interval and never asks for the number of the stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scope = Literal["none", "node", "world"]
TierName = Literal["device", "host", "file"]


@dataclass(frozen=True, slots=True)
class Home:
    """State over which ranks a kind of state is sharded, and on which tier it is kept."""

    scope: Scope
    tier: TierName = "device"


@dataclass(frozen=True, slots=True)
class Plan:
    """Give each kind of model state its Home."""

    params: Home
    grads: Home
    states: Home

    @classmethod
    def stage(
        cls,
        stage: int,
        params: Scope = "world",
        *,
        params_on: TierName = "device",
        grads_on: TierName = "device",
        states_on: TierName = "device",
    ) -> Plan:
        """Return the Plan of a ZeRO stage (ZeRO, section 5: P_os, P_os+g, P_os+g+p).

        Args:
            stage: 0 to 3.
            params: over which ranks stage 3 shards the parameters.
            params_on: the tier that keeps the sharded parameters.
            grads_on: the tier that keeps the reduced, sharded gradients.
            states_on: the tier that keeps masters and moments.

        Raises:
            ValueError: the stage is not 0, 1, 2 or 3.
        """
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"expected a ZeRO stage of 0, 1, 2 or 3, found {stage!r}")
        whole = Home("none")
        return cls(
            params=Home(params, params_on) if stage >= 3 else whole,
            grads=Home("world", grads_on) if stage >= 2 else whole,
            states=Home("world", states_on) if stage >= 1 else whole,
        )
