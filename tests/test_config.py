"""Config: DeepSpeed's keys; every problem at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpczero import Config, ConfigError


def problems(source: object) -> str:
    with pytest.raises(ConfigError) as raised:
        Config.load(source)  # type: ignore[arg-type]
    return str(raised.value)


def test_defaults_are_stage_0_in_fp32() -> None:
    config = Config()
    assert config.zero_optimization.stage == 0
    assert not config.bf16.enabled
    assert config.accumulation == 1
    assert config.gradient_clipping == 0
    assert config.optimizer.type == "AdamW"
    assert config.optimizer.weight_decay == 0.01


def test_unknown_keys_are_named_with_a_guess() -> None:
    text = problems({"zero_optimisation": {}, "zero_optimization": {"stages": 2}, "bf61": {}})
    assert "unknown key 'zero_optimisation': did you mean 'zero_optimization'?" in text
    assert "unknown key 'zero_optimization.stages': did you mean 'stage'?" in text
    assert "unknown key 'bf61': did you mean 'bf16'?" in text
    assert "3 problems in the config" in text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"zero_optimization": {"stage": 4}}, ["zero_optimization.stage", "found 4"]),
        ({"zero_optimization": {"stage": True}}, ["zero_optimization.stage", "found True"]),
        ({"bf16": {"enabled": "yes"}}, ["bf16.enabled", "'yes'"]),
        ({"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps", "found 0"]),
        ({"gradient_clipping": -1.0}, ["gradient_clipping", "-1.0"]),
        ({"optimizer": {"type": "Adan"}}, ["optimizer.type", "'Adam'", "'Adan'"]),
        ({"optimizer": {"params": {"betas": [0.9]}}}, ["optimizer.params.betas"]),
        ({"zero_optimization": {"stage3_prefetch_bucket_size": "much"}}, ["'much'"]),
        ({"zero_optimization": {"stage3_prefetch_bucket_size": 0.5}}, ["0.5"]),
    ],
)
def test_bad_values_name_key_and_value(source: dict, expected: list[str]) -> None:
    text = problems(source)
    assert all(part in text for part in expected), text


def test_integers_may_be_written_as_floats() -> None:
    config = Config.load({"zero_optimization": {"stage3_prefetch_bucket_size": 5e7, "stage": 3}})
    assert config.zero_optimization.stage3_prefetch_bucket_size == 50_000_000
    assert Config.load({"optimizer": {"params": {"lr": 1}}}).optimizer.params.lr == 1.0


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    assert Config.load(path).zero_optimization.stage == 2
    path.write_text('{"bf16": {"enabled": true},}')
    assert "line 1" in problems(path)
    assert str(path) in problems(path)
    path.write_text("")
    assert "expected JSON" in problems(path)
    path.write_text("[1]")
    assert "expected a JSON object, found a list" in problems(path)
    with pytest.raises(FileNotFoundError):
        Config.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ((None, 4, None), (8, 4, 1)),
        ((None, 4, 3), (24, 4, 3)),
        ((16, 4, None), (16, 4, 2)),
        ((16, None, 2), (16, 4, 2)),
        ((16, None, None), (16, 8, 1)),
        ((16, 4, 2), (16, 4, 2)),
        ((None, None, 2), (None, None, 2)),
    ],
)
def test_batch_arithmetic_on_two_ranks(given: tuple, resolved: tuple) -> None:
    keys = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    )
    source = {key: value for key, value in zip(keys, given, strict=True) if value is not None}
    config = Config.load(source).resolve(2)
    assert tuple(getattr(config, key) for key in keys) == resolved


def test_batch_arithmetic_that_clashes() -> None:
    config = Config.load(
        {
            "train_batch_size": 256,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 8,
        }
    )
    with pytest.raises(ConfigError, match=r"256 .* 4 .* 8 .* world size 1 = 32"):
        config.resolve(1)
    with pytest.raises(ConfigError, match=r"train_batch_size 3"):
        Config.load({"train_batch_size": 3}).resolve(2)
