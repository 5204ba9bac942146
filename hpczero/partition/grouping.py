"""Which parameters travel together: one unit per repeated block, the rest at the root."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn


class Group(NamedTuple):
    """Hold parameters of one module that share dtype and requires_grad."""

    name: str
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]


ROOT = "root"


def group(model: nn.Module) -> list[Group]:
    """Return the groups of a model's parameters, the root's first, then the blocks' in model order.

    A block is a child of a Sequential, ModuleList or ModuleDict with at least two children that
    have parameters; blocks inside blocks stay with the outer one. A parameter that several blocks
    share goes to the root. Each parameter appears once, under its first name.
    """
    units = {ROOT: model, **dict(_blocks(model, ""))}
    owners = _owners(units)
    members: dict[tuple[str, torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        key = (owners[id(parameter)], parameter.dtype, parameter.requires_grad)
        members.setdefault(key, []).append((name, parameter))
    order = list(units)
    keys = sorted(members, key=lambda key: (order.index(key[0]), not key[2], str(key[1])))
    names = _names(keys)
    return [Group(names[key], units[key[0]], tuple(members[key])) for key in keys]


def _owners(units: dict[str, nn.Module]) -> dict[int, str]:
    owners: dict[int, str] = {}
    for name, module in units.items():
        if name == ROOT:
            continue
        for parameter in module.parameters():
            if owners.setdefault(id(parameter), name) != name:
                owners[id(parameter)] = ROOT
    inside = {id(p) for name, module in units.items() if name != ROOT for p in module.parameters()}
    root = units[ROOT]
    blocks = {id(module) for name, module in units.items() if name != ROOT}
    for parameter in _parameters_outside(root, blocks):
        owners[id(parameter)] = ROOT  # also where a block shares it: the root is gathered longest
    assert inside <= owners.keys()
    return owners


def _parameters_outside(module: nn.Module, blocks: set[int]) -> Iterator[nn.Parameter]:
    yield from module.parameters(recurse=False)
    for child in module.children():
        if id(child) not in blocks:
            yield from _parameters_outside(child, blocks)


def _blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    children = [
        (f"{prefix}{name}", child)
        for name, child in module.named_children()
        if next(child.parameters(), None) is not None
    ]
    repeated = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    for name, child in children:
        # A list or dict of modules is never called itself, so it can't be gathered by a hook.
        if repeated and len(children) > 1 and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield name, child
        else:
            yield from _blocks(child, f"{name}.")


def _names(
    keys: list[tuple[str, torch.dtype, bool]],
) -> dict[tuple[str, torch.dtype, bool], str]:
    names = {}
    for unit, dtype, trainable in keys:
        twins = [key for key in keys if key[0] == unit]
        name = unit
        if len({key[1] for key in twins}) > 1:
            name += f"/{str(dtype).removeprefix('torch.')}"
        if not trainable and any(key[2] for key in twins):
            name += "/frozen"
        names[unit, dtype, trainable] = name
    return names
