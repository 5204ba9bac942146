"""Which optimizer a config, a class or an instance means."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hpczero.config import Config
from hpczero.errors import ConfigError
from hpczero.partition.lamb import Lamb
from hpczero.partition.optimizer import Factory

Groups = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]
Source = Optimizer | Callable[[list[dict[str, Any]]], Optimizer]

# DeepSpeed's names for what torch has; its own kernels' switches mean nothing here.
_ADAM = {"adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam"}
_SWITCHES = {"torch_adam", "adam_w_mode", "fused", "foreach", "set_grad_none", "max_grad_norm"}


def from_config(
    config: Config,
    model: nn.Module,
    optimizer: Source | None,
    model_parameters: Groups | None,
) -> tuple[Optimizer | Factory, list[dict[str, Any]]]:
    """Return the optimizer to build, and the parameter groups to build it for.

    A given instance or factory (a class of torch.optim, say) goes before the config's; without
    either it is torch's AdamW. `model_parameters` are parameters or groups, by default all.

    Raises:
        ConfigError: the config names neither an optimizer of torch nor LAMB, or parameters that
            it hasn't.
    """
    groups = _groups(model, model_parameters)
    if optimizer is not None:
        return optimizer, groups
    if config.optimizer is None:
        return torch.optim.AdamW, groups
    return _named(config.optimizer.type, dict(config.optimizer.params)), groups


def _groups(model: nn.Module, parameters: Groups | None) -> list[dict[str, Any]]:
    given: list[Any] = list(model.parameters() if parameters is None else parameters)
    groups = [dict(g) for g in given] if given and isinstance(given[0], Mapping) else []
    if not groups:
        groups = [{"params": given}]
    for group in groups:
        params = group["params"]
        params = [params] if isinstance(params, nn.Parameter) else list(params)
        group["params"] = [parameter for parameter in params if parameter.requires_grad]
    return groups


def _named(name: str, params: dict[str, Any]) -> Factory:
    kinds: dict[str, type[Optimizer]] = {
        key.lower(): kind for key, kind in vars(torch.optim).items() if _is_optimizer(kind)
    }
    kinds |= {"lamb": Lamb, "fusedlamb": Lamb}
    if name.lower() in _ADAM:
        # As DeepSpeed: Adam decays like AdamW unless told otherwise, and neither decays by default.
        decoupled = name.lower() == "adamw" or bool(params.get("adam_w_mode", True))
        kind: type[Optimizer] = torch.optim.AdamW if decoupled else torch.optim.Adam
        params = {"weight_decay": 0.0, **params}
    elif name.lower() in kinds:
        kind = kinds[name.lower()]
    else:
        known = sorted({kind.__name__ for kind in kinds.values()})
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
        raise ConfigError([f"optimizer.type: unknown optimizer {name!r}: {hint}"])
    params = {key: value for key, value in params.items() if key not in _SWITCHES}
    if kind is not Lamb and params.pop("bias_correction", True) is not True:
        raise ConfigError(["optimizer.params.bias_correction: only LAMB's can be false"])
    accepted = [key for key in inspect.signature(kind).parameters if key != "params"]
    problems = [_unknown(key, kind.__name__, accepted) for key in params if key not in accepted]
    if problems:
        raise ConfigError(problems)

    def factory(groups: list[dict[str, Any]]) -> Optimizer:
        return kind(groups, **params)

    return factory


def _is_optimizer(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer


def _unknown(key: str, name: str, accepted: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, accepted, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"{name} takes {', '.join(accepted)}"
    return f"unknown key 'optimizer.params.{key}': {hint}"
