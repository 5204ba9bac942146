"""Turn a DeepSpeed checkpoint into one of ours, as one rank would have saved it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpczero.checkpoints.deepspeed import DeepSpeedFolder
from hpczero.checkpoints.folder import Folder
from hpczero.checkpoints.index import path_of
from hpczero.checkpoints.manifest import BUFFERS, WEIGHTS, Manifest, Place, Run
from hpczero.checkpoints.plain import encode
from hpczero.checkpoints.rankfile import Stream, write
from hpczero.checkpoints.save import Told, finish
from hpczero.checkpoints.source import Done, Progress, numel
from hpczero.infinity.hdf5 import name_of
from hpczero.partition.layout import Layout

# Which optimizer keeps such states; a config of DeepSpeed's need not name it.
_OPTIMIZERS = {
    frozenset({"exp_avg", "exp_avg_sq"}): "AdamW",  # loads into Adam too
    frozenset({"momentum_buffer"}): "SGD",
    frozenset({"sum"}): "Adagrad",
}
# What a group holds beside hyperparameters: names, counts, choices of a kernel.
_NO_SETTINGS = {
    "params", "step", "base_optimizer_state_step", "bias_correction", "fused", "foreach",
    "capturable", "differentiable", "maximize", "decoupled_weight_decay",
}  # fmt: skip


class Imported(NamedTuple):
    """Say what became of a DeepSpeed checkpoint."""

    folder: Path
    left_out: list[str]
    """What has no place in ours, a line each."""


def import_deepspeed(
    source: DeepSpeedFolder, root: Path, progress: Progress | None = None
) -> Imported:
    """Write `global_step{N}` into a folder of checkpoints, and let `latest` name it.

    One process calls; costs the memory of a block. Masters, frozen parameters, buffers, optimizer
    states and hyperparameters, steps, loss scale, schedule and client_state come along. The random
    states, which DeepSpeed doesn't save, start from its seed.

    Args:
        source: verified beforehand, as its reads verify nothing.
        root: the folder of checkpoints; is made if need be.
        progress: is told the bytes done and the bytes in all.

    Raises:
        CheckpointError: another job is saving there.
        OSError: the folder can't be written.
        ValueError: it is the DeepSpeed checkpoint's own.
    """
    theirs = source.folder.resolve()
    if root.resolve() in (theirs, theirs.parent):
        raise ValueError(
            f"expected another folder than {root}, which is DeepSpeed's own: `latest` there is its"
        )
    counters = source.counters
    left_out: list[str] = []
    facts = _facts(source, left_out)
    tag = f"global_step{counters.global_steps}"
    runs = list(_runs(source))
    buffers = [name for name in source.names(WEIGHTS) if name in source.buffers]
    parameters = {name: place for run in runs for name, place in _places(source, run)}
    manifest = Manifest(
        tag=tag,
        world=1,
        stage=counters.stage,
        buckets={run.name: Run(run.layout.padded, run.dtypes) for run in runs},
        parameters=parameters,
        buffers=buffers,
        tied={alias: name for alias, name in source.tied().items() if name in parameters},
        versions={"torch": torch.__version__, "deepspeed": counters.version},
        **facts,
    )
    arrays = list(_arrays(source, runs, buffers))
    if progress is not None:
        arrays = _told(arrays, progress)
    place = Folder(root, tag)
    try:
        seal = write(place.partial / "rank_00000.h5", arrays)
        finish(place, manifest, [Told(seal, {}, {})], None)
    except BaseException:
        place.close(failed=True)
        raise
    place.close()
    return Imported(place.final, left_out)


# ---- tensors


class _Run(NamedTuple):
    """Parameters of one dtype, trained or frozen, in a flat run."""

    name: str
    layout: Layout
    dtypes: Mapping[str, str]
    trainable: bool


def _runs(source: DeepSpeedFolder) -> Iterator[_Run]:
    groups: dict[tuple[bool, torch.dtype], list[str]] = {}
    for name in source.names(WEIGHTS):
        if name not in source.buffers:
            key = (name not in source.frozen, source.dtype(WEIGHTS, name))
            groups.setdefault(key, []).append(name)
    for (trainable, dtype), names in groups.items():
        dtypes = {WEIGHTS: name_of(dtype)}
        for kind in source.kinds() if trainable else ():
            dtypes[kind] = name_of(source.dtype(kind, names[0]))
        layout = Layout.of([(name, source.shape(WEIGHTS, name)) for name in names], 1)
        title = f"{'trained' if trainable else 'frozen'}.{name_of(dtype)}"
        yield _Run(title, layout, dtypes, trainable)


def _places(source: DeepSpeedFolder, run: _Run) -> Iterator[tuple[str, Place]]:
    steps = source.counters.optimizer_steps
    scalars = {} if steps is None or not run.trainable else {"step": torch.tensor(float(steps))}
    for slot in run.layout.slots:
        yield (
            slot.name,
            Place(
                bucket=run.name,
                start=slot.start,
                shape=slot.shape,
                kinds=tuple(run.dtypes),
                scalars=encode(scalars, slot.name),
                trainable=run.trainable,
            ),
        )


def _arrays(
    source: DeepSpeedFolder, runs: Sequence[_Run], buffers: Sequence[str]
) -> Iterator[tuple[str, Tensor | Stream]]:
    for run in runs:
        for kind in run.dtypes:
            dtype = source.dtype(kind, run.layout.slots[0].name)
            reader = _reader(source, run.layout, kind, dtype)
            yield path_of(kind, run.name), Stream(dtype, (run.layout.padded,), reader)
            for slot in run.layout.slots:
                if not slot.shape:  # HDF5 has no virtual scalars
                    scalar = source.read(kind, slot.name, 0, 1).view(())
                    yield path_of(f"scalars/{kind}", slot.name), scalar
    for name in buffers:
        values = source.read(WEIGHTS, name, 0, numel(source, WEIGHTS, name))
        yield path_of(BUFFERS, name), values.view(source.shape(WEIGHTS, name))


def _reader(
    source: DeepSpeedFolder, layout: Layout, kind: str, dtype: torch.dtype
) -> Callable[[int, int], Tensor]:
    def read(start: int, stop: int) -> Tensor:
        block = torch.zeros(stop - start, dtype=dtype)
        for slot in layout.slots:
            first, last = max(slot.start, start), min(slot.stop, stop)
            if first < last:
                values = source.read(kind, slot.name, first - slot.start, last - slot.start)
                block[first - start : last - start] = values
        return block

    return read


def _told(
    arrays: Sequence[tuple[str, Tensor | Stream]], progress: Progress
) -> list[tuple[str, Tensor | Stream]]:
    """Return the same arrays, whose streams tell how much of them is read."""
    streams = [array for _, array in arrays if isinstance(array, Stream)]
    done = Done(sum(stream.shape[0] * stream.dtype.itemsize for stream in streams), progress)

    def telling(stream: Stream) -> Stream:
        def read(start: int, stop: int) -> Tensor:
            block = stream.read(start, stop)
            done.add(block.nbytes)
            return block

        return stream._replace(read=read)

    return [(n, telling(array) if isinstance(array, Stream) else array) for n, array in arrays]


# ---- all else


def _facts(source: DeepSpeedFolder, left_out: list[str]) -> dict[str, Any]:
    counters, config = source.counters, source.counters.ds_config
    groups = [
        {key: value for key, value in group.items() if key not in _NO_SETTINGS}
        for group in counters.param_groups
    ]
    half = [name for name in ("fp16", "bf16") if _section(config, name).get("enabled")]
    seed = config.get("seed")
    return {
        "precision": half[0] if half else "fp32",
        "optimizer": {
            "type": _optimizer(source.kinds(), _section(config, "optimizer").get("type")),
            "groups": [
                _encoded(group, f"param_groups[{index}]", left_out)
                for index, group in enumerate(groups)
            ],
        },
        "scheduler": _scheduler(counters.lr_scheduler, left_out),
        "counters": {
            "global_steps": counters.global_steps,
            "global_samples": counters.global_samples,
            "skipped_steps": counters.skipped_steps,
            "updates": counters.global_steps - counters.skipped_steps,
            "loss_scale": _loss_scale(counters.loss_scale),
            "data": None,
        },
        "seed": seed if type(seed) is int else 0,
        "client_state": _encoded(counters.client_state, "client_state", left_out),
    }


def _optimizer(kinds: Sequence[str], asked: object) -> str:
    """Return torch's name of the optimizer that the states are of, or DeepSpeed's."""
    if isinstance(asked, str) and asked.lower() == "lamb":
        return "Lamb"
    states = frozenset(kinds) - {WEIGHTS}
    return _OPTIMIZERS.get(states, str(asked or "SGD"))


def _scheduler(state: dict[str, Any] | None, left_out: list[str]) -> dict[str, Any] | None:
    if not state:
        return None
    if complaint := _complaint(state, "lr_scheduler"):
        left_out.append(complaint)
        return None
    return dict(encode(state, "lr_scheduler"))


def _loss_scale(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return our loss scaler's state, None where DeepSpeed's was static."""
    if "cur_iter" not in state:
        return None
    return {
        "scale": float(state["cur_scale"]),
        "left": int(state.get("cur_hysteresis", 1)),
        "steps": int(state["cur_iter"]),
        "last_overflow": int(state["last_overflow_iter"]),
    }


def _encoded(values: Mapping[Any, Any], where: str, left_out: list[str]) -> dict[str, Any]:
    """Return what JSON can hold of a dict's entries, and note the others."""
    found = {key: _complaint({key: value}, where) for key, value in values.items()}
    left_out.extend(complaint for complaint in found.values() if complaint)
    return dict(encode({key: values[key] for key in found if not found[key]}, where))


def _complaint(value: Any, where: str) -> str:
    """Return what JSON can't hold of a value, "" where it can."""
    try:
        encode(value, where)
    except TypeError as error:
        return str(error)
    return ""


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}
