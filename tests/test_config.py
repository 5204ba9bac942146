"""Config: DeepSpeed's keys; every problem at once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero import Config, ConfigError
from hpczero.config import Bf16, DataTypes, Fp16, Optimizer, ZeroOptimization
from hpczero.deepspeed_keys import ACCEPTED, UNSUPPORTED


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
    assert config.optimizer is None


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
        ({"optimizer": {"type": 3}}, ["optimizer.type", "found 3"]),
        (
            {"optimizer": {"type": "SGD", "params": {"max_grad_norm": 1.0}}},
            ["optimizer.params.max_grad_norm", "found 1.0", "use gradient_clipping"],
        ),
        ({"optimizer": {"parms": {}}}, ["'optimizer.parms'", "did you mean 'params'?"]),
        ({"zero_optimization": {"stage3_prefetch_bucket_size": "much"}}, ["'much'"]),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, ["reduce_bucket_size", "found 0"]),
        ({"zero_optimization": {"sub_group_size": float("inf")}}, ["sub_group_size", "found inf"]),
        ({"zero_optimization": True}, ["zero_optimization: expected a JSON object, found True"]),
        ({"zero_optimization": "stage3"}, ["zero_optimization: expected a JSON object"]),
        ({"train_batch_size": 2.5}, ["train_batch_size", "2.5"]),
        ({"train_batch_size": "8"}, ["train_batch_size: expected a valid integer, found '8'"]),
        ({"fp16": {"loss_scale": -1}}, ["fp16.loss_scale", "found -1"]),
        ({"fp16": {"loss_scale": float("nan")}}, ["fp16.loss_scale", "found nan"]),
        ({"fp16": {"loss_scale_window": 0}}, ["fp16.loss_scale_window", "found 0"]),
        ({"fp16": {"initial_scale_power": 200}}, ["fp16.initial_scale_power", "found 200"]),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["fp16.enabled", "bf16.enabled"]),
        ({"scheduler": {"params": {}}}, ["scheduler.type: missing"]),
        ({"scheduler": {"type": "WarmupDecayLR"}}, ["scheduler.params.total_num_steps: missing"]),
        ({"scheduler": {"type": "Warmup"}}, ["scheduler.type", "did you mean 'WarmupLR'?"]),
        ({3: 4, ("a",): 5}, ["unknown key '3'", "a"]),
    ],
)
def test_bad_values_name_key_and_value(source: dict, expected: list[str]) -> None:
    text = problems(source)
    assert all(part in text for part in expected), text


def test_integers_may_be_written_as_floats() -> None:
    config = Config.load({"zero_optimization": {"stage3_prefetch_bucket_size": 5e7, "stage": 3}})
    assert config.zero_optimization.stage3_prefetch_bucket_size == 50_000_000


def test_bucket_sizes_are_rounded_down() -> None:
    sizes = {
        "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": 15099494.4,  # 0.9 * 4096**2, as transformers writes it
        "stage3_param_persistence_threshold": 0.5,
    }
    zero = Config.load({"zero_optimization": sizes}).zero_optimization
    assert zero.reduce_bucket_size == 500_000_000
    assert zero.stage3_prefetch_bucket_size == 15_099_494
    assert zero.stage3_param_persistence_threshold == 0
    assert zero.sub_group_size == "auto"


def test_auto_and_null_mean_the_default() -> None:
    written = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": "auto",
        "fp16": {"enabled": "auto", "loss_scale": "auto", "min_loss_scale": None},
        "bf16": {"enabled": "auto"},
        "zero_optimization": dict.fromkeys(ZeroOptimization.model_fields, "auto"),
        "optimizer": {"params": {"lr": "auto", "betas": [0.9, 0.95], "weight_decay": None}},
        "scheduler": None,
    }
    optimizer = Optimizer(params={"betas": [0.9, 0.95]})
    assert Config.load(written) == Config(optimizer=optimizer)


@pytest.mark.parametrize("name", ["fp16", "bf16", "bfloat16", "none"])
def test_compute(name: str) -> None:
    config = Config.load({name: {"enabled": True}} if name != "none" else {})
    assert config.compute == {"none": "fp32", "bfloat16": "bf16"}.get(name, name)


def test_fp16_has_deepspeeds_defaults() -> None:
    assert Config.load({"fp16": {}}).fp16.model_dump() == {
        "enabled": False,
        "loss_scale": 0.0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1.0,
    }


def test_gradients_add_up_in_fp32_or_the_dtype_of_compute() -> None:
    for compute in ("fp32", "bf16", "fp16"):
        for asked in (None, "auto", "fp32", "bf16", "fp16"):
            given = {"data_types": {"grad_accum_dtype": asked}}
            given |= {} if compute == "fp32" else {compute: {"enabled": True}}
            if asked in (None, "auto", "fp32", compute):
                found = Config.load(given).data_types.grad_accum_dtype
                assert found == (None if asked == "auto" else asked)
            else:
                expected = f"expected 'fp32' or the dtype of compute, which is {compute!r}, found"
                assert f"data_types.grad_accum_dtype: {expected} {asked!r}" in problems(given)
    text = problems({"data_types": {"grad_accum_dtype": "int8"}})
    assert "data_types.grad_accum_dtype: expected 'fp32', 'bf16' or 'fp16', found 'int8'" in text


def test_scheduler() -> None:
    params = {"warmup_num_steps": 10, "warmup_max_lr": "auto"}
    config = Config.load({"scheduler": {"type": "WarmupLR", "params": params}})
    assert config.scheduler is not None
    assert config.scheduler.params == params
    assert Config.load({"scheduler": {"type": "StepLR", "params": {"step_size": 3}}}).scheduler


# As in the examples and the integrations that people start from.
HARMLESS = {
    "steps_per_print": float("inf"),
    "wall_clock_breakdown": True,
    "dump_state": True,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "communication_data_type": None,
    "sparse_gradients": False,
    "amp": {"enabled": False, "opt_level": "O1"},
    "tensorboard": {"enabled": False, "output_path": "logs/"},
    "flops_profiler": {"enabled": False, "profile_step": 1},
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
    "aio": {"block_size": 1048576, "queue_depth": 8},
    "elasticity": {"enabled": False},
    "compression_training": {},
    "compile": {"deepcompile": False},
    "data_types": {"keep_in_fp32_modules": "auto"},
    "checkpoint": {"tag_validation": "Warn", "load_universal": False},
    "fp16": {"enabled": True, "auto_cast": False, "fp16_master_weights_and_grads": False},
    "zero_optimization": {
        "stage": 3,
        "contiguous_gradients": True,
        "overlap_comm": False,
        "reduce_scatter": True,
        "round_robin_gradients": True,
        "stage3_gather_16bit_weights_on_model_save": True,
        "offload_param": {"device": "none", "pin_memory": True, "buffer_size": 1e8},
        "offload_optimizer": {"device": "none", "nvme_path": "/local", "ratio": 0.3},
        "zero_hpz_partition_size": 1,
        "mics_shard_size": -1,
        "ignore_unused_parameters": True,
        "leaf_module": {"names": ["moe"]},
    },
}


def test_what_asks_for_nothing_is_accepted() -> None:
    config = Config.load(HARMLESS)
    unused = {"offload_optimizer": {"nvme_path": "/local", "ratio": 0.3}}
    zero = {"stage": 3, **unused}
    assert config == Config.load({"fp16": {"enabled": True}, "zero_optimization": zero})
    # hpczero train puts flags on top of what a file says.
    assert Config.load(config.model_dump(exclude_unset=True)) == config


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("amp", {"enabled": True}),
        ("amp", {"opt_level": "O1"}),
        ("tensorboard", {"enabled": True}),
        ("sparse_attention", {"mode": "fixed"}),
        ("sparse_gradients", True),
        ("pipeline", {"stages": 2}),
        ("curriculum_learning", {"enabled": True}),
        ("elasticity", {"enabled": True}),
        ("compression_training", {"weight_quantization": {"shared_parameters": {"x": 1}}}),
        ("flops_profiler", {"enabled": True}),
        ("activation_checkpointing", {"partition_activations": True}),
        ("tensor_parallel", {"autotp_size": 4}),
        ("prescale_gradients", True),
        ("gradient_predivide_factor", 2.0),
        ("gradient_allreduce_op", "sum"),
        ("communication_data_type", "fp16"),
        ("fp16.auto_cast", True),
        ("fp16.fp16_master_weights_and_grads", True),
        ("bf16.bf16_optimizer_states", True),
        ("data_types.param_dtype", "bf16"),
        ("data_types.keep_in_fp32_modules", ["norm"]),
        ("checkpoint.load_universal", True),
        ("zero_optimization.cpu_offload", True),
        ("zero_optimization.offload_optimizer.super_offload", True),
        ("zero_optimization.zero_hpz_partition_size", 8),
        ("zero_optimization.zero_hpz_partition_size", True),
        ("zero_optimization.zero_quantized_weights", True),
        ("zero_optimization.zero_quantized_gradients", True),
        ("zero_optimization.mics_shard_size", 4),
        ("zero_optimization.ignore_unused_parameters", False),
        ("zero_optimization.zenflow", {"topk_ratio": 0.1}),
    ],
)
def test_what_deepspeed_knows_and_we_do_not_is_named(path: str, value: object) -> None:
    text = problems(nested(path, value))
    expected = f"DeepSpeed's key {path!r} isn't supported by hpczero yet, found {value!r}"
    assert expected[:150] in text
    assert "1 problem in the config" in text


def nested(path: str, value: object) -> dict[str, object]:
    *sections, key = path.split(".")
    source: dict[str, object] = {key: value}
    for section in reversed(sections):
        source = {section: source}
    return source


def test_no_key_is_listed_twice() -> None:
    kinds = (Config, Fp16, Bf16, DataTypes, ZeroOptimization)
    sections = {kind.path: kind for kind in kinds}
    for path in {*ACCEPTED, *UNSUPPORTED}:
        assert not ACCEPTED.get(path, {}).keys() & UNSUPPORTED.get(path, {}).keys()
        fields = sections[path].model_fields.keys() if path in sections else set()
        assert not fields & {*ACCEPTED.get(path, {}), *UNSUPPORTED.get(path, {})}


KEYS = sorted(
    {*Config.model_fields, *ACCEPTED[""], *UNSUPPORTED[""]}
    | {*ZeroOptimization.model_fields, *Fp16.model_fields, *UNSUPPORTED["zero_optimization"]}
    | {"enabled", "device", "type", "params", "lr", "betas", "warmup_num_steps", "bfloat16"}
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["auto", "none", "cpu", "Adam", "WarmupLR", "OneCycle", "StepLR", "fp32"])
    | st.text(max_size=5)
)
NAMES = st.sampled_from(KEYS) | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=6,
)


def found(source: dict[str, object]) -> list[str]:
    """Return the problems of a source, which is right if there are none."""
    try:
        config = Config.load(source)
    except ConfigError as error:
        assert error.problems  # noqa: PT017
        return error.problems
    assert Config.load(config.model_dump(exclude_unset=True)) == config
    return []


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_any_json_is_a_config_or_names_the_key(source: dict[str, object]) -> None:
    names = [repr(key)[1:-1].replace("bfloat16", "bf16") for key in source]
    for problem in found(source):
        assert any(name in problem for name in names)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KEYS), LEAVES)
def test_any_single_value_is_right_or_named(key: str, value: object) -> None:
    for path in (key, f"zero_optimization.{key}", f"fp16.{key}", f"optimizer.params.{key}"):
        for problem in found(nested(path, value)):
            assert path.replace("bfloat16", "bf16") in problem or path in problem


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    assert Config.load(path).zero_optimization.stage == 2
    path.write_text('{"bf16": {"enabled": true},}')
    assert "line 1" in problems(path)
    assert str(path) in problems(path)
    path.write_text("")
    assert "expected JSON" in problems(path)
    path.write_text('{"bf16": {}, "bf16": {}}')
    assert "key 'bf16' appears twice" in problems(path)
    assert str(path) in problems(path)
    path.write_text('{"train_batch_size": ' + "9" * 5000 + "}")
    assert "expected JSON" in problems(path)
    path.write_text("[" * 100_000)
    assert "expected JSON" in problems(path)
    path.write_bytes(b'{"a": "\xff"}')
    assert "expected JSON" in problems(path)
    path.write_bytes(b'\xef\xbb\xbf{"train_batch_size": 3}')  # as editors on Windows save it
    assert Config.load(path).train_batch_size == 3
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
    with pytest.raises(ConfigError) as raised:
        config.resolve(1)
    assert raised.value.problems == [
        "train_batch_size 256 != train_micro_batch_size_per_gpu 4 * gradient_accumulation_steps 8 "
        "* world size 1 = 32: set train_batch_size to 32, or gradient_accumulation_steps to 64, "
        "or train_micro_batch_size_per_gpu to 32"
    ]
    assert config.resolve(8).train_batch_size == 256
    with pytest.raises(ConfigError, match=r"train_batch_size 3 .* set train_batch_size to 2$"):
        Config.load({"train_batch_size": 3}).resolve(2)
    with pytest.raises(ConfigError, match=r"16 .* world size 12 = 12: set train_batch_size to 12$"):
        Config.load({"train_batch_size": 16}).resolve(12)


def test_parameters_over_nodes_need_stage_3_and_node_memory() -> None:
    zero = {"stage": 2, "partition_scope": "node"}
    with pytest.raises(ConfigError, match="found stage 2") as raised:
        Config.load({"zero_optimization": zero, "node_memory": False})
    assert "found node_memory false" in str(raised.value)
    assert Config.load({"zero_optimization": {**zero, "stage": 3}}).node_memory


def test_offload_says_where_states_are_kept() -> None:
    config = Config.load(
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/a", "pin_memory": True},
                "offload_optimizer": {"device": "cpu", "buffer_count": 4, "gradients": "none"},
            }
        }
    )
    zero = config.zero_optimization
    assert (zero.offload_param.device, zero.offload_optimizer.device) == ("nvme", "cpu")
    assert zero.gradients_on == "none"
    states = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert Config.load({"zero_optimization": states}).zero_optimization.gradients_on == "cpu"
    states["stage"] = 1
    assert Config.load({"zero_optimization": states}).zero_optimization.gradients_on == "none"


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, "expected stage 1, 2 or 3, found 0"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "expected stage 3, found 2"),
        ({"stage": 1, "offload_optimizer": {"gradients": "cpu"}}, "from stage 2 on"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, "offload_param.nvme_path: expected"),
        ({"stage": 1, "offload_optimizer": {"device": "nvme"}}, "optimizer.nvme_path: expected"),
        (
            {"stage": 2, "offload_optimizer": {"device": "cpu", "gradients": "nvme"}},
            "optimizer.nvme_path: expected",
        ),
        ({"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 1.5}}, "ratio"),
        (
            {"stage": 3, "offload_param": {"device": "cpu"}, "partition_scope": "node"},
            "use 'world'",
        ),
        ({"stage": 1, "offload_optimizer": {"device": "gpu"}}, "expected 'none', 'cpu' or 'nvme'"),
    ],
)
def test_what_offload_cannot_do_is_said(zero: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        Config.load({"zero_optimization": zero})
