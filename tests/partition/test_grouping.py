"""Grouping: which parameters travel together."""

from __future__ import annotations

import torch
from torch import nn

from hpczero.partition.grouping import group


def names(model: nn.Module) -> dict[str, list[str]]:
    return {part.name: [name for name, _ in part.parameters] for part in group(model)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight


def test_a_block_is_one_bucket_and_the_rest_is_the_root() -> None:
    assert names(Model()) == {
        "root": ["embed.weight"],
        "blocks.0": [
            f"blocks.0.{n}"
            for n in ("experts.0.weight", "experts.1.weight", "norm.weight", "norm.bias")
        ],
        "blocks.1": [
            f"blocks.1.{n}"
            for n in ("experts.0.weight", "experts.1.weight", "norm.weight", "norm.bias")
        ],
    }


def test_weights_that_blocks_share_go_to_the_root() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))
    model[3].weight = model[0].weight
    assert names(model) == {
        "root": ["0.weight"],
        "0": ["0.bias"],
        "2": ["2.weight", "2.bias"],
        "3": ["3.bias"],
    }
    everything = dict(model.named_parameters(remove_duplicate=False))
    assert everything["3.weight"] is everything["0.weight"]


def test_weights_shared_with_the_outside_go_to_the_root() -> None:
    model = Model()
    model.blocks[0].experts[0].weight = model.head.weight = nn.Parameter(torch.zeros(2, 2))
    assert "head.weight" not in names(model)["root"]  # once, under its first name
    assert names(model)["root"] == ["embed.weight", "blocks.0.experts.0.weight"]


def test_dtype_and_frozen_split_a_unit() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    model[1].double()
    model[1].weight.data = model[1].weight.data.float()
    assert names(model) == {
        "0": ["0.weight"],
        "0/frozen": ["0.bias"],
        "1/float32": ["1.weight"],
        "1/float64": ["1.bias"],
    }


def test_lists_of_lists_are_cut_where_modules_are_called() -> None:
    model = nn.ModuleList(
        nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]) for _ in range(2)
    )
    assert list(names(model)) == ["0.0", "0.1", "1.0", "1.1"]


def test_a_shared_block_is_one_bucket() -> None:
    block = nn.Linear(2, 2)
    model = nn.Sequential(block, nn.Linear(2, 2), block)
    assert list(names(model)) == ["0", "1"]


def test_a_model_without_parameters() -> None:
    assert group(nn.Sequential(nn.ReLU(), nn.ReLU())) == []
