"""Read DeepSpeed's ZeRO checkpoints without DeepSpeed, a run at a time.

[Note: DeepSpeed's layout]
`<dir>/latest` names the newest folder, in which each of N ranks has written a file of optimizer
states, and rank 0 (stages 1, 2) or each rank (stage 3) a file of model states. `param_shapes` lists
the trainable parameters per flat group, in the order in which they lie there.
- Stages 1, 2: the ranks' pieces of a flat group, one after another, are the group: parameters with
  `param_alignment_paddings` between them, padding at the end, which the master weights lack.
- Stage 3: every parameter is cut into N parts of ceil(numel / N) elements; a rank's flat groups,
  one after another, are its parts.
Adam's moments lie as the master weights do. Frozen parameters are in the model's precision, in the
files of model states, whole or (stage 3) cut like the others.
"""

from __future__ import annotations

import bisect
import itertools
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hpczero.checkpoints.deepspeed_files import Record, find_files, find_folder, load
from hpczero.checkpoints.source import check_range

T = TypeVar("T")

# What DeepSpeed itself puts beside the user's client_state.
_OWN_KEYS = {
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "universal_checkpoint_info",
    "ds_config",
    "ds_version",
}


@dataclass(frozen=True)
class Counters:
    """Hold what a DeepSpeed checkpoint says besides tensors, as plain Python."""

    stage: int
    ranks: int
    version: str
    global_steps: int
    """Of the engine, skipped ones included."""
    global_samples: int
    skipped_steps: int
    optimizer_steps: int | None
    """Adam's own count, None where the optimizer keeps none."""
    loss_scale: dict[str, Any]
    """The loss scaler's attributes, such as cur_scale, cur_iter, last_overflow_iter."""
    lr_scheduler: dict[str, Any] | None
    param_groups: list[dict[str, Any]]
    """The optimizer's hyperparameters, with the parameters' names as "params"; these alone in an
    elastic checkpoint."""
    ds_config: dict[str, Any]
    client_state: dict[str, Any] = field(default_factory=dict)


class DeepSpeedFolder:
    """Present a ZeRO checkpoint of DeepSpeed as a Source; written for what 0.19.8 writes.

    "weights" has the fp32 master weights, frozen parameters in the model's precision, and the
    persistent buffers; the optimizer's states are there under its names, at full shapes. Files are
    mapped into memory and read where they are asked for; their pages can be given back at any time.
    Neither DeepSpeed nor as many ranks are needed.

    Args:
        path: the folder with `latest`, or the one that it names.
        tag: names another folder than `latest` does.

    Raises:
        FileNotFoundError: a folder or a rank's file is missing.
        ValueError: a file is damaged, holds classes that aren't admitted, or doesn't fit the rest;
            or the checkpoint isn't one of ZeRO alone (pipelines, experts, tensor parallelism).
    """

    counters: Counters
    """Steps, scheduler, loss scale, hyperparameters, client_state."""
    buffers: list[str]
    """Which of "weights" are buffers."""
    frozen: list[str]
    """Which of "weights" are frozen parameters: those without optimizer states."""

    def __init__(self, path: Path, tag: str | None = None) -> None:
        self.folder = find_folder(path, tag)
        self.files: list[Path] = []
        optim_files, model_files = find_files(self.folder)
        optims = [self._load(file) for file in optim_files]
        models = [self._load(file) for file in model_files]
        try:
            self._build(optims, models)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"expected what DeepSpeed 0.19 writes in {str(self.folder)!r}, found another "
                f"structure: {type(error).__name__}: {error}"
            ) from error

    # Source #

    def kinds(self) -> list[str]:
        """Return "weights" and the names of the optimizer's flat states."""
        return list(self._places)

    def names(self, kind: str) -> list[str]:
        """Return the tensors of a kind in the order of the model's state dict."""
        if kind not in self._places:
            raise KeyError(f"expected one of {self.kinds()}, found {kind!r}")
        return list(self._places[kind])

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """Return a tensor's full shape."""
        return self._place(kind, name).shape

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """Return a tensor's type: float32 for master weights and moments, as DeepSpeed has them."""
        return self._place(kind, name).cuts[0].run.dtype

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a flattened tensor; a copy of that size.

        DeepSpeed keeps the checksums of whole files only, which `verify` compares.

        Raises:
            ValueError: the range isn't inside the tensor.
        """
        place = self._place(kind, name)
        check_range(start, stop, place.numel, name)
        parts, base = [torch.empty(0, dtype=self.dtype(kind, name))], 0
        for cut in place.cuts:
            low, high = max(start - base, 0), min(stop - base, cut.numel)
            if low < high:
                parts.extend(cut.run.read(cut.start + low, cut.start + high))
            base += cut.numel
        return torch.cat(parts)

    def tied(self) -> dict[str, str]:
        """Return the other names of tied parameters."""
        return dict(self._tied)

    def verify(self) -> None:
        """Compare all files with the checksums inside them; reads everything once.

        Raises:
            ValueError: a file is damaged.
        """
        for path in self.files:
            with zipfile.ZipFile(path) as archive:
                try:
                    bad = archive.testzip()
                except (zipfile.BadZipFile, OSError) as error:
                    raise ValueError(f"expected an undamaged {str(path)!r}: {error}") from error
            if bad is not None:
                raise ValueError(f"expected the checksum of {bad!r} in {str(path)!r} to fit")

    # Utilities #

    def _load(self, path: Path) -> dict[str, Any]:
        self.files.append(path)
        return load(path)

    def _place(self, kind: str, name: str) -> _Place:
        if name not in self._places.get(kind, ()):
            raise KeyError(f"expected a name that {str(self.folder)!r} has, found {kind} {name!r}")
        return self._places[kind][name]

    def _build(self, optims: list[dict[str, Any]], models: list[dict[str, Any]]) -> None:
        states = [optim["optimizer_state_dict"] for optim in optims]
        stage = _agreed(states, lambda state: int(state.get("zero_stage", 1)), "zero_stage")
        _check_parallelism(states, models, stage, self.folder)
        model = models[0]
        groups = [
            {name: _checked(shape, name) for name, shape in group.items()}
            for group in model["param_shapes"]
        ]
        kinds, steps, hyper = _flat_states(states, stage, groups)
        build = _stage_3 if stage == 3 else _stage_1_2
        trained = {kind: build(flats, groups, states[0]) for kind, flats in kinds.items()}
        _check_lengths(kinds, stage)
        rest = _untrained(models, stage, trained["weights"])
        self.buffers = [name for name in model["buffer_names"] if name in rest]
        self.frozen = [name for name in rest if name not in self.buffers]
        order = {name: i for i, name in enumerate(model["module"])}
        self._places = {
            kind: dict(sorted(places.items(), key=lambda item: order.get(item[0], len(order))))
            for kind, places in {**trained, "weights": {**trained["weights"], **rest}}.items()
        }
        weights = self._places["weights"]
        self._tied = {
            alias: name
            for alias, name in model["shared_params"].items()
            if name in weights and alias not in weights
        }
        self.counters = Counters(
            stage=stage,
            ranks=len(states),
            version=str(model["ds_version"]),
            global_steps=_agreed(models, lambda state: state["global_steps"], "global_steps"),
            global_samples=model["global_samples"],
            skipped_steps=model["skipped_steps"],
            optimizer_steps=steps,
            loss_scale=_loss_scale(states[0]),
            lr_scheduler=model["lr_scheduler"],
            param_groups=hyper,
            ds_config=model["ds_config"],
            client_state={key: value for key, value in model.items() if key not in _OWN_KEYS},
        )


# ---- places


class _Run:
    """Read a flat run that is kept as several tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [_flat(tensor) for tensor in tensors]
        self.dtype = self.tensors[0].dtype
        if any(tensor.dtype != self.dtype for tensor in self.tensors):
            raise TypeError(f"tensors of several types: {[t.dtype for t in self.tensors]}")
        self.starts = [0, *itertools.accumulate(tensor.numel() for tensor in self.tensors)]
        self.numel = self.starts[-1]

    def read(self, start: int, stop: int) -> Iterator[Tensor]:
        """Yield views of what lies in [start, stop)."""
        first = bisect.bisect_right(self.starts, start) - 1
        for base, tensor in zip(self.starts[first:], self.tensors[first:], strict=False):
            if base >= stop:
                return
            yield tensor[max(start - base, 0) : stop - base]


class _Cut(NamedTuple):
    run: _Run
    start: int
    numel: int


class _Place(NamedTuple):
    shape: tuple[int, ...]
    cuts: list[_Cut]

    @property
    def numel(self) -> int:
        return sum(cut.numel for cut in self.cuts)


_Flats = list[list[Tensor]]  # by rank and group
_Groups = list[dict[str, tuple[int, ...]]]


def _stage_1_2(flats: _Flats, groups: _Groups, state: Mapping[str, Any]) -> dict[str, _Place]:
    align = 2 * len(flats)  # to which DeepSpeed pads a group
    paddings = state.get("param_alignment_paddings") or [[0] * len(group) for group in groups]
    places = {}
    for index, group in enumerate(groups):
        run, offset = _Run([flat[index] for flat in flats]), 0
        for (name, shape), padding in zip(
            group.items(), _checked(paddings[index], f"paddings of group {index}"), strict=True
        ):
            places[name] = _Place(shape, [_Cut(run, offset, _numel(shape))])
            offset += _numel(shape) + padding
        if not offset <= run.numel <= -(-offset // align) * align:
            raise ValueError(
                f"expected {offset} elements in flat group {index} over {len(flats)} ranks, "
                f"padded to a multiple of {align}, found {run.numel}: has a rank's file been "
                "written by another run, or is its state on an NVMe device?"
            )
    return places


def _stage_3(flats: _Flats, groups: _Groups, state: Mapping[str, Any]) -> dict[str, _Place]:
    runs, offset = [_Run(flat) for flat in flats], 0
    places = {}
    for name, shape in itertools.chain(*(group.items() for group in groups)):
        part = -(-_numel(shape) // len(runs))
        places[name] = _Place(shape, _parts(runs, offset, _numel(shape)))
        offset += part
    for rank, run in enumerate(runs):
        if run.numel != offset:
            raise ValueError(
                f"expected {offset} elements in the flat groups of rank {rank} of {len(runs)}, "
                f"found {run.numel}: has its file been written by another run, or is its state on "
                "an NVMe device?"
            )
    return places


def _parts(runs: Sequence[_Run], offset: int, numel: int) -> list[_Cut]:
    """Return the cuts of a parameter of stage 3: the last ones are shorter, by the padding."""
    part = -(-numel // len(runs))
    return [
        _Cut(run, offset, min(part, max(numel - rank * part, 0))) for rank, run in enumerate(runs)
    ]


def _untrained(
    models: list[dict[str, Any]], stage: int, trained: Mapping[str, _Place]
) -> dict[str, _Place]:
    """Return buffers and frozen parameters."""
    model = models[0]
    places = {}
    for name in model["buffer_names"]:
        tensor = model["module"].get(name)
        if tensor is not None:
            places[name] = _whole(tensor)
    if stage == 3:
        for name, shape in (model["frozen_param_shapes"] or {}).items():
            runs = [_Run([each["frozen_param_fragments"][name]]) for each in models]
            part = -(-_numel(shape) // len(runs))
            if any(run.numel != part for run in runs):
                raise ValueError(
                    f"expected {part} elements of the frozen {name!r} {list(shape)} from each of "
                    f"{len(runs)} ranks, found {[run.numel for run in runs]}"
                )
            places[name] = _Place(_checked(shape, name), _parts(runs, 0, _numel(shape)))
        return places
    for name, tensor in model["module"].items():
        # Parameters without elements share an address, and so count as tied to one another.
        tied = name in model["shared_params"] and tensor.numel() > 0
        if isinstance(tensor, Tensor) and name not in trained and not tied:
            places.setdefault(name, _whole(tensor))
    return places


def _whole(tensor: Tensor) -> _Place:
    return _Place(tuple(tensor.shape), [_Cut(_Run([tensor]), 0, tensor.numel())])


def _flat(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise TypeError(f"a tensor of shape {list(tensor.shape)} that isn't contiguous")
    return tensor.detach().view(-1)


def _checked(shape: Any, name: str) -> tuple[int, ...]:
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        raise ValueError(f"expected counts of elements for {name!r}, found {shape}")
    return tuple(shape)


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


# ---- optimizer


def _flat_states(
    states: list[dict[str, Any]], stage: int, groups: _Groups
) -> tuple[dict[str, _Flats], int | None, list[dict[str, Any]]]:
    """Return the flat tensors by kind, rank and group, Adam's step, and the hyperparameters."""
    master, inner = (
        ("fp32_flat_groups", "optimizer_state_dict")
        if stage == 3
        else ("single_partition_of_fp32_groups", "base_optimizer_state")
    )
    kinds: dict[str, _Flats] = {"weights": [list(state[master]) for state in states]}
    by_rank: list[list[dict[str, Any]]] = []
    hyper: list[dict[str, Any]] = []
    for state in states:
        if len(state[master]) != len(groups):
            raise ValueError(
                f"expected {len(groups)} flat groups, as param_shapes says, "
                f"found {len(state[master])}"
            )
        base = state[inner]
        if isinstance(base, list):  # elastic checkpoints: no hyperparameters
            by_rank.append(base)
            continue
        order = [index for group in base["param_groups"] for index in group["params"]]
        if len(order) != len(groups):
            raise ValueError(f"expected {len(groups)} states of flat groups, found {len(order)}")
        by_rank.append([base["state"].get(index, {}) for index in order])
        if not hyper:
            names = iter(groups)
            hyper = [
                {**group, "params": [name for _ in group["params"] for name in next(names)]}
                for group in base["param_groups"]
            ]
    hyper = hyper or [{"params": [*group]} for group in groups]
    for kind, value in by_rank[0][0].items() if by_rank[0] else ():
        if isinstance(value, Tensor) and value.dim() > 0:
            kinds[kind] = [[each[kind] for each in rank] for rank in by_rank]
    steps = {int(each["step"]) for rank in by_rank for each in rank if "step" in each}
    for state in states:
        groups_of = state[inner]["param_groups"] if isinstance(state[inner], dict) else [state]
        keys = ("step", "base_optimizer_state_step")
        steps |= {int(group[key]) for group in groups_of for key in keys if key in group}
    if len(steps) > 1:
        raise ValueError(
            f"expected one step of the optimizer on all ranks, found {sorted(steps)}: "
            "have the files been written by several runs?"
        )
    return kinds, (steps.pop() if steps else None), hyper


def _check_lengths(kinds: Mapping[str, _Flats], stage: int) -> None:
    """Refuse moments that are cut otherwise than the master weights."""
    for kind, flats in kinds.items():
        for rank, (mine, master) in enumerate(zip(flats, kinds["weights"], strict=True)):
            for index, (flat, weight) in enumerate(zip(mine, master, strict=True)):
                # Only the last piece of the master weights lacks its padding.
                later = any(rest[index].numel() for rest in kinds["weights"][rank + 1 :])
                shorter = flat.numel() < weight.numel()
                if shorter or (flat.numel() != weight.numel() and (later or stage == 3)):
                    raise ValueError(
                        f"expected {weight.numel()} elements of {kind!r} in flat group {index} of "
                        f"rank {rank}, as the master weights have, found {flat.numel()}"
                    )


def _loss_scale(state: Mapping[str, Any]) -> dict[str, Any]:
    scaler = state.get("loss_scaler")
    return dict(vars(scaler)) if isinstance(scaler, Record) else {}


# ---- checks


def _check_parallelism(
    states: list[dict[str, Any]], models: list[dict[str, Any]], stage: int, folder: Path
) -> None:
    counts = {
        count
        for state in states
        for count in (
            state["partition_count"]
            if isinstance(state["partition_count"], list)
            else [state["partition_count"]]
        )
    }
    if counts != {len(states)}:
        raise ValueError(
            f"expected optim_states of {sorted(counts)} ranks in {str(folder)!r}, found "
            f"{len(states)} files: has a rank not saved, or an older checkpoint been overwritten?"
        )
    if models[0]["mp_world_size"] != 1 or "ds_zero_partition_groups" in states[0]:
        raise ValueError(
            f"expected a checkpoint of ZeRO alone in {str(folder)!r}, found model or expert "
            "parallelism: convert it with DeepSpeed"
        )
    if len(models) != (len(states) if stage == 3 else 1):
        raise ValueError(
            f"expected model_states of {len(states) if stage == 3 else 1} ranks in "
            f"{str(folder)!r} at stage {stage}, found {len(models)}"
        )
    if models[0]["param_shapes"] is None:
        raise ValueError(f"expected param_shapes in {str(folder)!r}: ZeRO was off (stage 0)")


def _agreed(states: list[dict[str, Any]], key: Callable[[dict[str, Any]], T], what: str) -> T:
    """Return what all files say."""
    found = [key(state) for state in states]
    if any(value != found[0] for value in found):
        raise ValueError(
            f"expected one {what} on all ranks, found {found}: are these files of one checkpoint?"
        )
    return found[0]
