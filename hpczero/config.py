"""The configuration: DeepSpeed's JSON keys, typed, every problem reported at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from hpczero import schedules
from hpczero.errors import ConfigError
from hpczero.schema import (
    Integer,
    NotNegative,
    Number,
    Positive,
    PositiveSize,
    Section,
    Size,
    explain,
    shown,
)


class Bf16(Section):
    """Compute in bf16, with float32 master weights."""

    path: ClassVar = "bf16"
    enabled: bool = False
    check_grad_overflow: bool = False
    """Skip a step with a gradient that isn't finite (DeepSpeed 0.19.8 does so by default)."""


class Fp16(Section):
    """Compute in fp16 with a loss scale, by DeepSpeed's rules."""

    path: ClassVar = "fp16"
    enabled: bool = False
    loss_scale: NotNegative = 0.0
    """0 is dynamic."""
    initial_scale_power: Annotated[Integer, Field(ge=0, le=126)] = 16
    """The dynamic scale starts at 2 to this power."""
    loss_scale_window: Positive = 1000
    """Good steps until the dynamic scale doubles."""
    hysteresis: Positive = 2
    """Bad steps until the dynamic scale halves."""
    consecutive_hysteresis: bool = False
    """Restore the hysteresis after every good step."""
    min_loss_scale: Annotated[Number, Field(gt=0)] = 1.0


class DataTypes(Section):
    """Choose dtypes that don't follow from fp16 or bf16."""

    path: ClassVar = "data_types"
    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """In which reduced gradients add up; None: fp32 over several micro-steps, else compute's."""


Device = Literal["none", "cpu", "nvme"]
"""DeepSpeed's names of the tiers: device memory, host memory, a file."""


class OffloadParam(Section):
    """Say where sharded parameters are kept, at stage 3."""

    path: ClassVar = "zero_optimization.offload_param"
    device: Device = "none"
    nvme_path: str | None = None
    """The folder for "nvme": of any file system."""


class DelayedUpdate(Section):
    """Update during the next forward and backward (ZeRO-Offload, section 5.2)."""

    path: ClassVar = "zero_optimization.offload_optimizer.delayed_update"
    enabled: bool = False
    start_step: Positive = 40
    """The first step whose update is delayed: the first ones change too much."""


class OffloadOptimizer(Section):
    """Say where masters, moments and sharded gradients are kept."""

    path: ClassVar = "zero_optimization.offload_optimizer"
    device: Device = "none"
    nvme_path: str | None = None
    """The folder for "nvme": of any file system."""
    ratio: Annotated[Number, Field(ge=0, le=1)] = 1.0
    """The part of the states that is kept there, at least: those of whole blocks stay."""
    gradients: Device | None = None
    """Where stages 2 and 3 keep reduced gradients; None: as the states. Not DeepSpeed's."""
    delayed_update: DelayedUpdate = DelayedUpdate()
    """Not DeepSpeed's."""


class ZeroOptimization(Section):
    """Choose what is partitioned, and how large messages and live parameters may be."""

    path: ClassVar = "zero_optimization"
    stage: Annotated[Integer, Field(ge=0, le=3)] = 0
    reduce_bucket_size: PositiveSize = "auto"
    """Elements of a bucket's gradients that travel at a time, at most."""
    allgather_bucket_size: PositiveSize = "auto"
    """Elements of a bucket's weights that travel at a time, at most."""
    sub_group_size: PositiveSize = "auto"
    """Elements that the optimizer updates at a time, in 64s; "auto" is all of a bucket's shard."""
    stage3_prefetch_bucket_size: Size = "auto"
    """Elements gathered ahead of use; 0 gathers on demand, "auto" what `sizing` counts, or more."""
    stage3_param_persistence_threshold: Size = "auto"
    """Parameters of fewer elements are never released; "auto" is none."""
    stage3_model_persistence_threshold: Size = "auto"
    """Elements that are never released, at most; "auto" is no limit."""
    stage3_max_live_parameters: Size = "auto"
    """Elements gathered at a time, at most; "auto" is what the prefetch needs."""
    stage3_max_reuse_distance: Size = "auto"
    """Keep parameters that are needed again within so many elements; "auto" is never."""
    partition_scope: Literal["world", "node"] = "world"
    """Over which ranks stage 3 shards the parameters; states always over all. Not DeepSpeed's."""
    offload_param: OffloadParam = OffloadParam()
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    offload_keep_files: bool = False
    """Leave the files of "nvme" when the job ends, valid HDF5. Not DeepSpeed's."""
    offload_checksums: bool = False
    """Compare what is read from the files of "nvme" with what was written. Not DeepSpeed's."""

    @property
    def gradients_on(self) -> Device:
        """Return where reduced gradients are kept."""
        given = self.offload_optimizer.gradients
        if self.stage < 2:
            return "none"
        return self.offload_optimizer.device if given is None else given


class Optimizer(Section):
    """Choose the optimizer by DeepSpeed's or torch's name; building it checks the parameters."""

    path: ClassVar = "optimizer"
    type: str = "AdamW"
    params: dict[str, Any] = Field(default_factory=dict)

    @field_validator("params", mode="after")
    @classmethod
    def _without_auto(cls, params: dict[str, Any]) -> dict[str, Any]:
        if params.get("max_grad_norm") not in (None, "auto", 0):
            raise ConfigError(
                [
                    f"optimizer.params.max_grad_norm: expected 0, found "
                    f"{shown(params['max_grad_norm'])}: it isn't supported as an optimizer "
                    "parameter; use gradient_clipping at the top of the config"
                ]
            )
        return {key: value for key, value in params.items() if value not in (None, "auto")}


class Scheduler(Section):
    """Choose the schedule of the learning rate: DeepSpeed's five, or one of torch's."""

    type: str
    params: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Scheduler:
        found = schedules.problems(self.type, self.params)
        if found:
            raise ConfigError(found)
        return self


class Checkpoint(Section):
    """Accept what DeepSpeed's configs say about checkpoints."""

    path: ClassVar = "checkpoint"


class Config(Section):
    """Describe a training run in DeepSpeed's terms; `Config()` is stage 0 in fp32."""

    path: ClassVar = ""
    train_batch_size: Positive | None = None
    train_micro_batch_size_per_gpu: Positive | None = None
    gradient_accumulation_steps: Positive | None = None
    gradient_clipping: NotNegative = 0.0
    """Largest norm of the gradient; 0 doesn't clip (DeepSpeed 0.19.8 clips at 1 by default)."""
    dataloader_drop_last: bool = False
    """Leave out the last batch of an epoch if it is smaller."""
    fp16: Fp16 = Fp16()
    bf16: Bf16 = Bf16()
    data_types: DataTypes = DataTypes()
    zero_optimization: ZeroOptimization = ZeroOptimization()
    optimizer: Optimizer | None = None
    """None is torch's AdamW, or the caller's."""
    scheduler: Scheduler | None = None
    checkpoint: Checkpoint = Checkpoint()
    node_memory: bool = True
    """Whether ranks of one node read each other's memory in place of messages. Not DeepSpeed's."""

    @classmethod
    def load(cls, source: Config | Mapping[str, Any] | str | PathLike[str]) -> Config:
        """Return the Config that a Config, a mapping or a JSON file describes.

        Raises:
            ConfigError: unknown keys, wrong types or values, all of them in one message.
            FileNotFoundError: there is no such file.
        """
        if isinstance(source, Config):
            return source
        origin = "the config"
        if not isinstance(source, Mapping):
            origin = str(source)
            source = _read(Path(source))
        given = dict(source)
        if "bf16" not in given and "bfloat16" in given:  # its name in old configs
            given["bf16"] = given.pop("bfloat16")
        problems: list[str] = []
        if _enabled(given, "fp16") and _enabled(given, "bf16"):
            problems.append("fp16.enabled and bf16.enabled: both are true, set one to false")
        try:
            config = cls.model_validate(given)
        except ValidationError as error:
            problems += explain(error, cls)
        if problems:
            raise ConfigError(problems, origin)
        return config

    def resolve(self, world_size: int) -> Config:
        """Return the Config with the batch arithmetic completed for this many ranks.

        Any two of `train_batch_size`, `train_micro_batch_size_per_gpu` and
        `gradient_accumulation_steps` give the third.

        Raises:
            ConfigError: the three contradict each other, or don't divide.
        """
        total = self.train_batch_size
        micro = self.train_micro_batch_size_per_gpu
        accumulation = self.gradient_accumulation_steps
        if total is None:
            accumulation = accumulation or 1
            total = micro * accumulation * world_size if micro else None
        elif accumulation is None and micro is not None:
            accumulation = max(1, total // (micro * world_size))
        else:
            accumulation = accumulation or 1
            micro = micro or max(1, total // (accumulation * world_size))
        if total is not None and micro is not None and total != micro * accumulation * world_size:
            raise ConfigError([_contradiction(total, micro, accumulation, world_size)])
        return self.model_copy(
            update={
                "train_batch_size": total,
                "train_micro_batch_size_per_gpu": micro,
                "gradient_accumulation_steps": accumulation,
            }
        )

    @model_validator(mode="after")
    def _check_scope(self) -> Config:
        zero = self.zero_optimization
        problems = []
        if zero.partition_scope == "node" and zero.stage < 3:
            problems.append(f"it shards parameters, as stage 3 does; found stage {zero.stage}")
        if zero.partition_scope == "node" and not self.node_memory:
            problems.append("it keeps them in node memory; found node_memory false")
        if problems:
            raise ConfigError(
                [f"zero_optimization.partition_scope 'node': {text}" for text in problems]
            )
        return self

    @model_validator(mode="after")
    def _check_offload(self) -> Config:
        zero = self.zero_optimization
        param, optimizer = zero.offload_param, zero.offload_optimizer
        problems = []
        if optimizer.device != "none" and zero.stage < 1:
            problems.append(
                "offload_optimizer: each rank would keep all states: expected stage 1, 2 or 3, "
                f"found {zero.stage}"
            )
        if param.device != "none" and zero.stage < 3:
            problems.append(
                "offload_param: the device must have whole parameters below stage 3: expected "
                f"stage 3, found {zero.stage}"
            )
        if param.device != "none" and zero.partition_scope == "node":
            problems.append(
                "offload_param: partition_scope 'node' keeps parameters in the memory of the node: "
                "use 'world'"
            )
        if optimizer.gradients not in (None, "none") and zero.stage < 2:
            problems.append(
                "offload_optimizer.gradients: they are sharded from stage 2 on; found stage "
                f"{zero.stage}"
            )
        if optimizer.delayed_update.enabled and optimizer.device == "none":
            problems.append(
                "offload_optimizer.delayed_update: the host updates meanwhile: expected device "
                "'cpu' or 'nvme', found 'none'"
            )
        if param.device == "nvme" and not param.nvme_path:
            problems.append("offload_param.nvme_path: expected a folder for device 'nvme'")
        files = optimizer.device == "nvme" or zero.gradients_on == "nvme"
        if files and not optimizer.nvme_path:
            problems.append("offload_optimizer.nvme_path: expected a folder for device 'nvme'")
        if problems:
            raise ConfigError([f"zero_optimization.{text}" for text in problems])
        return self

    @model_validator(mode="after")
    def _check_gradients(self) -> Config:
        dtype = self.data_types.grad_accum_dtype
        if dtype not in (None, "fp32", self.compute):
            raise ConfigError(
                [
                    f"data_types.grad_accum_dtype: expected 'fp32' or the dtype of compute, which "
                    f"is {self.compute!r}, found {dtype!r}"
                ]
            )
        return self

    @property
    def compute(self) -> Literal["fp32", "bf16", "fp16"]:
        """Return the dtype of compute."""
        if self.fp16.enabled:
            return "fp16"
        return "bf16" if self.bf16.enabled else "fp32"

    @property
    def accumulation(self) -> int:
        """Return the number of micro-steps in a step."""
        return self.gradient_accumulation_steps or 1


def _contradiction(total: int, micro: int, accumulation: int, world_size: int) -> str:
    product = micro * accumulation * world_size
    cures = [f"train_batch_size to {product}"]
    if total % (micro * world_size) == 0:
        cures.append(f"gradient_accumulation_steps to {total // (micro * world_size)}")
    if total % (accumulation * world_size) == 0:
        cures.append(f"train_micro_batch_size_per_gpu to {total // (accumulation * world_size)}")
    return (
        f"train_batch_size {total} != train_micro_batch_size_per_gpu {micro} * "
        f"gradient_accumulation_steps {accumulation} * world size {world_size} "
        f"= {product}: set {', or '.join(cures)}"
    )


def _enabled(given: Mapping[str, Any], key: str) -> bool:
    section = given.get(key)
    if isinstance(section, Fp16 | Bf16):
        return section.enabled
    return isinstance(section, Mapping) and section.get("enabled") is True


def _read(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8-sig"), object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError([f"expected JSON, found {error.msg} at {where}"], str(path)) from None
    except ConfigError as error:
        raise ConfigError(error.problems, str(path)) from None
    except (ValueError, RecursionError) as error:  # no UTF-8; a number of too many digits
        raise ConfigError([f"expected JSON: {error}"], str(path)) from None
    if not isinstance(value, Mapping):
        raise ConfigError([f"expected a JSON object, found a {type(value).__name__}"], str(path))
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError([f"key {key!r} appears twice in one object" for key in twice])
    return dict(pairs)
