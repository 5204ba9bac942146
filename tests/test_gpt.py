"""The model: shapes, weights from a seed, and that it attends backwards only."""

from __future__ import annotations

import math

import pytest
import torch

from hpczero.gpt import GPT, PRESETS, GPTConfig

SMALL = GPTConfig(layers=2, hidden=32, heads=4, seq=16)


def count(config: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(config).parameters())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("tiny", 842_496),
        ("small", 10_844_160),
        ("medium", 85_449_216),
        ("large", 710_028_800),
        ("xl", 1_477_609_600),
    ],
)
def test_presets_have_the_stated_sizes(name: str, parameters: int) -> None:
    config = PRESETS[name]
    assert (
        config.layers * (12 * config.hidden**2 + 13 * config.hidden)
        + (256 + config.seq + 2) * config.hidden
        == parameters
    )
    if parameters < 100e6:
        assert count(config) == parameters


def test_the_head_is_the_embedding() -> None:
    model = GPT(SMALL)
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_without_biases_there_are_none() -> None:
    model = GPT(GPTConfig(layers=1, hidden=32, heads=4, seq=16, bias=False))
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]


def test_the_seed_alone_decides_the_weights() -> None:
    torch.manual_seed(1)
    first = GPT(SMALL, seed=3).state_dict()
    torch.manual_seed(2)
    again, other = GPT(SMALL, seed=3).state_dict(), GPT(SMALL, seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])


def test_starts_near_the_loss_of_guessing() -> None:
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(0))
    loss = GPT(SMALL)(tokens[:, :-1], tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_a_shorter_sequence_and_bf16_run() -> None:
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    loss = GPT(SMALL).bfloat16()(tokens, tokens)
    assert loss.dtype == torch.float32
    loss.backward()


def test_a_later_byte_changes_no_earlier_prediction() -> None:
    model = GPT(SMALL)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    changed = tokens.clone()
    changed[0, -1] = 7
    ignored = torch.full_like(tokens, -100)  # cross_entropy leaves these out
    ignored[0, :-1] = 1
    assert model(tokens, ignored).item() == model(changed, ignored).item()


def test_impossible_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"hidden must be a multiple of heads, found 33 % 4 = 1"):
        GPTConfig(layers=1, hidden=33, heads=4, seq=8)
    with pytest.raises(ValueError, match="layers must be at least 1, found 0"):
        GPTConfig(layers=0, hidden=32, heads=4, seq=8)
