"""Which dtype parameters, gradients and masters have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


@dataclass(frozen=True, slots=True)
class Precision:
    """Choose dtypes; `compute` None keeps each parameter's own (fp32 training)."""

    compute: torch.dtype | None
    accumulation: int

    def cast(self, model: nn.Module) -> None:
        """Cast floating parameters, and BatchNorm's buffers, to the compute dtype in place.

        Other buffers (rotary frequencies, masks) keep theirs: rounding them changes the model.
        """
        if self.compute is None:
            return
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self.compute)
        for module in model.modules():
            if isinstance(module, _NormBase):
                for name, buffer in module.named_buffers(recurse=False):
                    if buffer.is_floating_point():
                        setattr(module, name, buffer.to(self.compute))

    def grads(self, parameter: torch.dtype) -> torch.dtype:
        """Return the dtype in which reduced gradients add up: float32 when there are several."""
        return parameter if self.accumulation == 1 else self.master(parameter)

    @staticmethod
    def master(parameter: torch.dtype) -> torch.dtype:
        """Return the dtype of master weights and moments."""
        return torch.float64 if parameter == torch.float64 else torch.float32
