"""Initial weights of parameters that are nowhere yet: made bucket by bucket, never all at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Fill = Callable[[str, torch.Tensor], None]
"""Fills a parameter's values, float32 if it floats, given its name in the model."""


class Initial:
    """Give a model's parameters on the meta device memory, whose pages nobody touches yet.

    They stay the same objects, so that optimizers and ties know them.

    Raises:
        ValueError: there are such parameters and no `fill`, or a buffer is on the meta device.
    """

    def __init__(self, model: nn.Module, fill: Fill | None) -> None:
        self._fill = fill
        self._missing = {id(parameter) for parameter in model.parameters() if parameter.is_meta}
        name = next((name for name, p in model.named_parameters() if p.is_meta), None)
        if name is not None and fill is None:
            raise ValueError(
                f"parameter {name!r} is on the meta device: give Engine(initialise=...), which "
                "fills a parameter's values by its name"
            )
        buffer = next((name for name, b in model.named_buffers() if b.is_meta), None)
        if buffer is not None:
            raise ValueError(
                f"buffer {buffer!r} is on the meta device: only parameters are initialised; make "
                "buffers on the CPU"
            )

    def place(self, model: nn.Module) -> None:
        """Give the parameters memory, after they have been cast."""
        for parameter in model.parameters():
            if id(parameter) in self._missing:
                empty = torch.empty_like(parameter, device="cpu")
                torch.utils.swap_tensors(  # type: ignore[no-untyped-call]
                    parameter, nn.Parameter(empty, requires_grad=parameter.requires_grad)
                )

    def values(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        """Return a parameter's initial values; costs them in float32 where they are made."""
        if id(parameter) not in self._missing:
            return parameter.data
        assert self._fill is not None
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        if not parameter.is_floating_point():
            dtype = parameter.dtype
        values = torch.empty(parameter.shape, dtype=dtype)
        self._fill(name, values)
        return values
