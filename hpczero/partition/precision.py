"""Which dtype parameters, gradients and masters have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hpczero.config import Config

_ASKED = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}
"""What torch's own compiler asks before it hands products of matrices to oneDNN."""


def multiplies_fast(dtype: torch.dtype) -> bool:
    """Tell whether torch multiplies matrices of a dtype on this CPU by more than its plain loops.

    Those take 5 to 100 times as long as float32: bfloat16 on x86 without AVX-512, and float16 on
    most CPUs.
    """
    asked = getattr(torch.ops.mkldnn, _ASKED.get(dtype, ""), None)
    return asked is None or bool(asked())


@dataclass(frozen=True, slots=True)
class Precision:
    """Choose dtypes; `compute` None keeps each parameter's own (fp32 training)."""

    compute: torch.dtype | None
    widens: bool
    """Whether reduced gradients add up in float32."""
    scaler: LossScaler | None = None
    """Decides about gradients that aren't finite; None lets them pass."""

    @classmethod
    def of(cls, config: Config) -> Precision:
        """Return the dtypes that a config asks for."""
        fp16, asked = config.fp16, config.data_types.grad_accum_dtype
        widens = config.accumulation > 1 if asked is None else asked == "fp32"
        if config.compute == "fp32":
            return cls(None, widens)
        if config.compute == "bf16":
            checks = config.bf16.check_grad_overflow
            return cls(torch.bfloat16, widens, LossScaler(loss_scale=1.0) if checks else None)
        scaler = LossScaler(
            fp16.loss_scale,
            fp16.initial_scale_power,
            fp16.loss_scale_window,
            fp16.hysteresis,
            fp16.min_loss_scale,
            fp16.consecutive_hysteresis,
        )
        return cls(torch.float16, widens, scaler)

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
        """Return the dtype in which reduced gradients add up."""
        return self.master(parameter) if self.widens else parameter

    @staticmethod
    def master(parameter: torch.dtype) -> torch.dtype:
        """Return the dtype of master weights and moments."""
        return torch.float64 if parameter == torch.float64 else torch.float32


class LossScaler:
    """Keep the loss scale of fp16, by DeepSpeed's rules.

    Static where `loss_scale` is not 0. Else it starts at 2^initial_scale_power, halves when a
    gradient isn't finite (the first `hysteresis` - 1 times only the hysteresis shrinks), and
    doubles at the step after `window` without. `consecutive_hysteresis` restores the hysteresis
    after every good step instead of at every doubling.
    """

    def __init__(
        self,
        loss_scale: float = 0.0,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        min_loss_scale: float = 1.0,
        consecutive_hysteresis: bool = False,
    ) -> None:
        self.dynamic = loss_scale == 0
        self.scale = float(2**initial_scale_power) if self.dynamic else float(loss_scale)
        self._window = loss_scale_window
        self._hysteresis = hysteresis
        self._left = hysteresis
        self._minimum = min_loss_scale
        self._consecutive = consecutive_hysteresis
        self._steps = 0
        self._last_overflow = -1

    def state_dict(self) -> dict[str, float]:
        """Return what changes in training."""
        return {
            "scale": self.scale,
            "left": self._left,
            "steps": self._steps,
            "last_overflow": self._last_overflow,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a saved state; a static scale stays the config's."""
        if self.dynamic:
            self.scale = float(state["scale"])
            self._left = int(state["left"])
        self._steps = int(state["steps"])
        self._last_overflow = int(state["last_overflow"])

    def update(self, overflow: bool) -> bool:
        """Take note of a step; return False if it overflowed at the smallest scale."""
        survives = True
        if self.dynamic and overflow:
            self._last_overflow = self._steps
            if self._left > 1:
                self._left -= 1
            else:
                survives = self.scale > self._minimum
                self.scale = max(self.scale / 2, self._minimum)
        elif self.dynamic:
            stable = self._steps - self._last_overflow - 1  # good steps before this one
            doubles = stable > 0 and stable % self._window == 0
            if self._consecutive or doubles:
                self._left = self._hysteresis
            if doubles:
                self.scale *= 2
        self._steps += 1
        return survives
