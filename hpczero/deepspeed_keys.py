"""DeepSpeed 0.19.8's keys without a field here: accepted without effect, or not supported yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Unsupported(NamedTuple):
    """Describe a key that asks for something, unless `quiet(value)`."""

    quiet: Callable[[Any], bool]
    advice: str = "leave it out"


def off(value: Any) -> bool:
    """Return whether a feature's section is empty or says `"enabled": false`."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") in (False, "auto")
    return value in (False, "none")


def idle(value: Any) -> bool:
    """Return whether nothing in a section is switched on."""
    if isinstance(value, Mapping):
        return all(idle(inner) for inner in value.values())
    return value in (None, False, "none", "auto")


def only(*values: Any) -> Callable[[Any], bool]:
    """Return whether a value is one of these, as a function."""
    # A bool is no number here: zero_hpz_partition_size true asks for nothing that is meant.
    return lambda value: any(type(value) is type(v) and value == v for v in values)


_SCOPE = "leave it out; partition_scope 'node' shards parameters over the ranks of a node"
_OFFLOAD = {
    "buffer_count": "there is one place for each tensor, and as much in memory as is under way",
    "pin_memory": "there is no device memory apart from the host's yet",
}

ACCEPTED: Mapping[str, Mapping[str, str]] = {
    "": {
        "steps_per_print": "the caller prints; hpczero train has its own progress",
        "wall_clock_breakdown": "prints only",
        "memory_breakdown": "prints only; see engine.memory()",
        "dump_state": "prints only",
        "log_level": "Python's logging decides",
        "timers": "measures only",
        "vocabulary_size": "DeepSpeed only warns about it",
        "disable_python_gc": "the garbage collector stays as it is",
        "disable_allgather": "weights are gathered in the way that is fastest here",
        "zero_allow_untested_optimizer": "every optimizer is tested when the engine is built",
        "zero_force_ds_cpu_optimizer": "there is one implementation of the update",
        "seq_parallel_communication_data_type": "acts with sequence parallelism only",
        "aio": "direct I/O is used where the file system can, in requests of 1 MiB",
    },
    "bf16": {
        "immediate_grad_update": "gradients are always reduced as they appear",
    },
    "zero_optimization": {
        "contiguous_gradients": "gradients always lie in flat buffers",
        "reduce_scatter": "the stage decides which collective it is; the sums are the same",
        "use_multi_rank_bucket_allreduce": "sums are the same",
        "allgather_partitions": "weights are the same",
        "overlap_comm": "communication always overlaps with backward",
        "compute_grad_norm": "the norm is always there",
        "load_from_fp32_weights": "master weights are always loaded as they were saved",
        "elastic_checkpoint": "another number of ranks can always load",
        "legacy_stage1": "there is one stage 1",
        "round_robin_gradients": "concerns copies to the host",
        "parameter_alignment": "shards are always aligned",
        "memory_efficient_linear": "a linear layer's weight isn't kept for backward",
        "override_module_apply": "Module.apply stays as it is",
        "log_trace_cache_warnings": "prints only",
        "enable_sanity_checks": "checks are always on",
        "pipeline_loading_checkpoint": "affects speed only",
        "leaf_module": "a block is always gathered whole, with all its experts",
        "save_muon_momentum_buffer_in_memory": "acts with NVMe only",
        "stage3_gather_16bit_weights_on_model_save": "engine.full_state_dict() always gathers",
        "stage3_gather_fp16_weights_on_model_save": "engine.full_state_dict() always gathers",
        "stage3_module_granularity_threshold": "a block is always gathered whole",
        "stage3_use_all_reduce_for_fetch_params": "weights are the same",
        "stage3_allgather_sequential": "gathers need no copies here",
        "cpu_offload_use_pin_memory": "there is no device memory apart from the host's yet",
    },
    "zero_optimization.offload_param": {
        **_OFFLOAD,
        "buffer_size": "a place is as large as its tensor",
        "max_in_cpu": "parameters that are kept in files stay there",
    },
    "zero_optimization.offload_optimizer": {
        **_OFFLOAD,
        **dict.fromkeys(
            ("pipeline_read", "pipeline_write"), "reading and writing always overlap with updating"
        ),
        "fast_init": "files are not written before there is something to keep",
        "cpuadam_cores_perc": "the update uses torch's number of threads",
    },
    "checkpoint": {
        "tag_validation": "ranks always agree on the tag",
        "parallel_write": "affects speed only",
        "writer": "affects speed only",
    },
    "optimizer": {"legacy_fusion": "there is one implementation of the update"},
}
"""By section: keys whose value, whatever it is, changes nothing here, and why."""

UNSUPPORTED: Mapping[str, Mapping[str, Unsupported]] = {
    "": {
        **dict.fromkeys(("amp", "torch_autocast"), Unsupported(off, "use bf16 or fp16")),
        **dict.fromkeys(
            ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger"),
            Unsupported(off, 'log what the engine returns yourself, and set "enabled" to false'),
        ),
        **dict.fromkeys(
            (
                "autotuning",
                "curriculum_learning",
                "data_efficiency",
                "eigenvalue",
                "elasticity",
                "expert_parallel",
                "hybrid_engine",
                "nebula",
                "progressive_layer_drop",
                "quantize_training",
            ),
            Unsupported(off, 'leave it out, or set "enabled" to false'),
        ),
        **dict.fromkeys(
            (
                "compile",
                "compression_training",
                "datastates_ckpt",
                "graph_harvesting",
                "pipeline",
                "sparse_attention",
                "sparse_gradients",
                "use_data_before_expert_parallelism",
                "weight_quantization",
            ),
            Unsupported(idle),
        ),
        "activation_checkpointing": Unsupported(idle, "use torch.utils.checkpoint in the model"),
        "communication_data_type": Unsupported(
            only("fp32"), "leave it out: sums are always made in fp32"
        ),
        "gradient_allreduce_op": Unsupported(only("mean"), 'set it to "mean"'),
        "gradient_predivide_factor": Unsupported(only(1.0, 1), "set it to 1.0"),
        "managed_gradient_accumulation": Unsupported(only(True), "set it to true"),
        "prescale_gradients": Unsupported(only(False), "set it to false"),
        "sequence_parallel_size": Unsupported(only(1), "set it to 1"),
        "tensor_parallel": Unsupported(
            lambda value: isinstance(value, Mapping) and value.get("autotp_size", 0) in (0, 1),
            'set "autotp_size" to 0',
        ),
    },
    "fp16": {
        "auto_cast": Unsupported(only(False), "convert the inputs to fp16 before the forward"),
        "fp16_master_weights_and_grads": Unsupported(only(False), "set it to false"),
    },
    "bf16": {
        "bf16_master_weights_and_grads": Unsupported(only(False), "set it to false"),
        "bf16_optimizer_states": Unsupported(only(False), "set it to false"),
    },
    "data_types": {
        "param_dtype": Unsupported(idle, "use bf16 or fp16"),
        "buffer_dtype": Unsupported(idle, "convert the model's buffers yourself"),
        "keep_in_fp32_modules": Unsupported(only([]), 'set it to "auto"'),
    },
    "checkpoint": {
        "load_universal": Unsupported(only(False), "set it to false"),
        "use_node_local_storage": Unsupported(only(False), "set it to false"),
        "checkpoint_serialization": Unsupported(only(True), "set it to true"),
    },
    "zero_optimization": {
        "cpu_offload": Unsupported(only(False), "set it to false"),
        "cpu_offload_param": Unsupported(only(False), "set it to false"),
        "cpu_offload_params": Unsupported(only(False), "set it to false"),
        "ignore_unused_parameters": Unsupported(
            only(True), "set it to true: a parameter without gradient counts as zero"
        ),
        "mics_hierarchical_params_gather": Unsupported(only(False), "set it to false"),
        "mics_shard_size": Unsupported(only(-1), _SCOPE),
        "zenflow": Unsupported(idle),
        "zero_hpz_partition_size": Unsupported(only(0, 1), _SCOPE),
        "zero_quantized_gradients": Unsupported(only(False), "set it to false"),
        "zero_quantized_nontrainable_weights": Unsupported(only(False), "set it to false"),
        "zero_quantized_weights": Unsupported(only(False), "set it to false"),
        "zeropp_loco_param": Unsupported(idle),
    },
    "zero_optimization.offload_optimizer": {
        "super_offload": Unsupported(only(False), "set it to false"),
    },
}
"""By section: keys that are a problem unless their value asks for nothing."""
