"""Find and load the files of a DeepSpeed checkpoint, executing nothing that is in them.

[Note: pickles]
The files are pickles, which can run any code. torch's unpickler for weights admits tensors and
plain containers, and builds no class that it isn't told of: DeepSpeed's few are built as records
without methods, numpy's as what they are. Nothing else is even imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_PARALLEL = re.compile(r"(?:layer_|expp_rank_|.*_expert_).*\.pt")  # pipelines and experts


# ---- files


def find_folder(path: Path, tag: str | None) -> Path:
    """Return the folder that a tag, or `latest`, names; `path` itself where there is neither."""
    latest = path / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    folder = path if tag is None else path / tag
    if tag is not None and (not tag or not folder.resolve().is_relative_to(path.resolve())):
        raise ValueError(f"expected the name of a folder in {str(path)!r}, found {tag!r}")
    if not folder.is_dir():
        raise FileNotFoundError(f"expected the folder of a checkpoint, found no {str(folder)!r}")
    return folder


def find_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files of optimizer states and of model states in the order of their ranks."""
    optims: dict[int, Path] = {}
    models: dict[int, Path] = {}
    for file in sorted(folder.iterdir()):
        if _PARALLEL.fullmatch(file.name):
            raise ValueError(
                f"expected a checkpoint of ZeRO alone, found {file.name!r} of a pipeline or of "
                f"experts in {str(folder)!r}: convert it with DeepSpeed"
            )
        for pattern, files in ((_OPTIM, optims), (_MODEL, models)):
            if match := pattern.fullmatch(file.name):
                rank = int(match[1] or 0)
                if int(match[2]) > 0:
                    raise ValueError(
                        f"expected no model parallelism, found {file.name!r} in {str(folder)!r}: "
                        "convert it with DeepSpeed"
                    )
                if rank in files:
                    raise ValueError(
                        f"expected one of {files[rank].name!r} and {file.name!r}, found both in "
                        f"{str(folder)!r}: they are of two checkpoints"
                    )
                files[rank] = file
    for files, what in ((optims, "optim_states"), (models, "model_states")):
        if not files:
            raise FileNotFoundError(
                f"expected *_{what}.pt in {str(folder)!r}, found none: is this the folder of a "
                "ZeRO checkpoint (stages 1 to 3)?"
            )
        if sorted(files) != list(range(len(files))):
            raise FileNotFoundError(
                f"expected *_{what}.pt of ranks 0 to {max(files)} in {str(folder)!r}, "
                f"found those of {sorted(files)}"
            )
    ordered = [[files[rank] for rank in sorted(files)] for files in (optims, models)]
    return ordered[0], ordered[1]


# ---- pickles


class Record:
    """Stand in for an object of DeepSpeed: its attributes, none of its methods."""


_Admitted = list[Callable[..., Any] | tuple[Callable[..., Any], str]]


def _admitted() -> _Admitted:
    """Return what pickles may build besides tensors and plain containers, by the name in them."""
    records = [
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
    ]
    arrays: _Admitted = [
        (getattr(np.dtypes, name), f"numpy.dtypes.{name}")
        for name in np.dtypes.__all__
        if name not in {"ObjectDType", "StringDType", "VoidDType"}
    ]
    scalar: Any = np.float64(0).__reduce__()[0]
    rebuild: Any = np.empty(0).__reduce__()[0]
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):  # numpy 2 and 1
        arrays += [(scalar, f"{module}.scalar"), (rebuild, f"{module}._reconstruct")]
    arrays += [(np.ndarray, "numpy.ndarray"), (np.dtype, "numpy.dtype")]
    enum: _Admitted = [(int, "deepspeed.runtime.zero.config.ZeroStageEnum")]
    # Python 3.11 before 3.11.4 pickles a member of an enum as getattr(class, name).
    enum += [(_member, f"{module}.getattr") for module in ("builtins", "__builtin__")]
    return [*((Record, name) for name in records), *enum, *arrays]


def _member(kind: object, name: str) -> int:
    """Return a stage of ZeRO by its name in DeepSpeed's enum; this is not Python's getattr."""
    stages = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
    if kind is not int or name not in stages:
        raise ValueError(f"the attribute {name!r} of {kind!r}")
    return stages[name]


def load(path: Path) -> dict[str, Any]:
    """Return the dict in a file, its tensors mapped and not yet read."""
    if path.stat().st_size == 0:
        raise ValueError(f"expected a file that torch.save has written, found {str(path)!r} empty")
    try:
        with torch.serialization.safe_globals(_admitted()):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # whatever a forged or torn file does to the unpickler
        cause = error.__context__ or error  # torch's own text advises to execute what is there
        refused = re.search(r"GLOBAL (\S+) (?:was not an allowed|whose module)", str(cause))
        found = f"the class or function {refused[1]}" if refused else f"{cause}"
        raise ValueError(
            f"expected tensors and plain containers in {str(path)!r}, found {found}. Nothing in it "
            "was executed. If it is a class of your own in client_state that you trust, name it by "
            "torch.serialization.add_safe_globals"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"expected a dict in {str(path)!r}, found {type(content).__name__}")
    return content
