"""The face that DeepSpeed users know: `import hpczero as deepspeed`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset

from hpczero.comm.world import Comm, World
from hpczero.config import Config
from hpczero.engine import Engine, Schedule
from hpczero.errors import ConfigError
from hpczero.loader import EpochLoader
from hpczero.optimizers import Groups, Source


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Source | None = None,
    model_parameters: Groups | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Schedule | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: Config | Mapping[str, Any] | str | PathLike[str] | None = None,
    config_params: Config | Mapping[str, Any] | str | PathLike[str] | None = None,
    comm: Comm | None = None,
) -> tuple[Engine, Any, DataLoader[Any] | None, Any]:
    """Return engine, optimizer, data loader and lr scheduler, as deepspeed.initialize does.

    All ranks call with the same model and config; the cost is the Engine's.

    Args:
        args: where `args.deepspeed_config` may name the config.
        model: the module to train.
        optimizer: an instance, a class or a function from parameter groups; goes before the
            config's.
        model_parameters: parameters or groups for the config's optimizer, by default all.
        training_data: a data set; it becomes a loader of this rank's part in an order that is a
            function of epoch and world, and checkpoints keep the position in it.
        lr_scheduler: a torch scheduler over `optimizer`, or a function from the optimizer.
        mpu: a tensor-parallel layout; not supported yet.
        dist_init_required: ignored: MPI starts when it is imported.
        collate_fn: of the loader.
        config: a Config, a mapping or the path of a JSON file.
        config_params: DeepSpeed's old name of `config`.
        comm: the ranks that train, by default all.

    Raises:
        ConfigError: there is no config, there are two, or it has problems.
        NotImplementedError: `mpu` is given.
    """
    if model is None:
        raise TypeError("initialize() expected a model, found None")
    if mpu is not None:
        raise NotImplementedError("mpu: tensor parallelism isn't supported by hpczero yet")
    given = [
        source
        for source in (config, config_params, getattr(args, "deepspeed_config", None))
        if source is not None
    ]
    if len(given) != 1:
        raise ConfigError(
            [
                f"expected one of config, config_params and args.deepspeed_config, found "
                f"{len(given)}: pass the config once"
            ]
        )
    engine = Engine(
        model,
        given[0],
        comm,
        optimizer=optimizer,
        model_parameters=model_parameters,
        lr_scheduler=lr_scheduler,
    )
    if training_data is not None:
        engine.training_dataloader = _loader(engine, training_data, collate_fn)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _loader(
    engine: Engine, data: Dataset[Any], collate_fn: Callable[[Any], Any] | None
) -> EpochLoader:
    batch = engine.config.train_micro_batch_size_per_gpu
    if batch is None:
        raise ConfigError(["training_data needs train_micro_batch_size_per_gpu, found none"])
    return EpochLoader(
        data,
        batch=batch,
        ranks=engine.world_size,
        rank=engine.rank,
        drop_last=engine.config.dataloader_drop_last,
        collate_fn=collate_fn,
    )


def init_distributed(*args: Any, **kwargs: Any) -> None:
    """Make the World of all ranks; accepted for DeepSpeed's scripts, whose arguments mean nothing.

    All ranks call.
    """
    World.of()


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` to a parser, as deepspeed does.

    Not `--local_rank`: DeepSpeed's scripts add it themselves.
    """
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="accepted; hpczero is always on")
    group.add_argument("--deepspeed_config", type=str, help="path of a DeepSpeed JSON config")
    return parser
