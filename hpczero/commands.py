"""The commands on checkpoints and runs, which one process runs.

hpczero inspect runs/mine/checkpoints --verify
hpczero consolidate runs/mine/checkpoints exported --format safetensors --dtype bf16
hpczero import-deepspeed ds_checkpoints runs/mine/checkpoints
hpczero report runs/a runs/b --out report.html
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hpczero import page, report
from hpczero.checkpoints import consolidate as consolidation
from hpczero.checkpoints import folder as folders
from hpczero.checkpoints import from_deepspeed
from hpczero.checkpoints.deepspeed import DeepSpeedFolder
from hpczero.checkpoints.reader import Checkpoint
from hpczero.checkpoints.summary import describe, find_any
from hpczero.errors import CheckpointError

FAILURES = (CheckpointError, OSError, ValueError, OverflowError)
"""What the commands raise where files aren't as they should be, or can't be written."""


def in_words(error: Exception) -> str:
    """Return what went wrong, with the path where the system names one."""
    return folders.describe(error)


def inspect(path: Path, *, verify: bool, as_json: bool) -> None:
    """Print what a checkpoint holds; with `verify` read all of it first.

    Args:
        path: a checkpoint, or a folder of checkpoints, whose `latest` is shown.
        verify: check every byte.
        as_json: print one JSON object.

    Raises:
        CheckpointError: there is none, or (the first) damage.
    """
    folder = find_any(path)
    with Checkpoint(folder) as checkpoint:
        if verify:
            _verify(checkpoint, quiet=as_json)
        found = describe(checkpoint)
    tags = folders.tags(path) if path != folder else []
    if as_json:
        print(report.to_json({**found, "tags": tags, "verified": verify}, indent=2))
    else:
        _show(found, tags, verify)


def consolidate(
    path: Path,
    out: Path,
    format: consolidation.Format,  # noqa: A002
    dtype: torch.dtype | None,
    max_shard_bytes: int | None,
) -> None:
    """Write the weights of a checkpoint for other programs; see `checkpoints.consolidate`.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ValueError: `out` is inside the checkpoint or is of the wrong kind, or a tensor's type is
            unknown to the format.
        OverflowError: a number isn't finite in `dtype`.
    """
    folder = find_any(path)
    if out.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"expected a place outside the checkpoint {folder}, found {out}")
    if out.is_dir() and (format != "safetensors" or out.suffix == ".safetensors"):
        raise ValueError(f"expected the name of a file for {format}, found the folder {out}")
    with Checkpoint(folder) as checkpoint, report.byte_progress(out.name) as progress:
        consolidation.consolidate(checkpoint, out, format, dtype, max_shard_bytes, progress)
        count = len(checkpoint.names("weights"))
    print(f"wrote {count} tensors of {folder} to {out}")


def import_deepspeed(path: Path, out: Path, tag: str | None) -> None:
    """Write a DeepSpeed checkpoint as one of ours into the folder of checkpoints `out`.

    Raises:
        CheckpointError, OSError: `out` can't be written.
        ValueError, FileNotFoundError: there is no DeepSpeed checkpoint of ZeRO, or it is damaged.
    """
    source = DeepSpeedFolder(path, tag)
    source.verify()
    with report.byte_progress(out.name) as progress:
        folder, left_out = from_deepspeed.import_deepspeed(source, out, progress)
    for line in left_out:
        print(f"left out: {line}")
    print(f"wrote {source.folder} to {folder}")


def report_runs(runs: Sequence[Path], out: Path) -> None:
    """Write one HTML page that shows runs side by side.

    Raises:
        RunError: a folder isn't one that `hpczero train` has written.
        OSError: `out` can't be written.
    """
    found = [page.read(run) for run in runs]
    page.write(found, out)
    print(f"wrote {out}: {len(found)} run{'s' if len(found) > 1 else ''}")


def _verify(checkpoint: Checkpoint, quiet: bool) -> None:
    total = sum(seal.size for seal in checkpoint.manifest.files)
    with report.byte_progress("verifying", quiet) as progress:
        done = 0
        for _, nbytes in checkpoint.verify():
            done = min(done + nbytes, total)  # files have structures besides, the index is small
            progress(done, total)
        progress(total, total)


def _show(found: dict[str, Any], tags: list[str], verified: bool) -> None:
    print(found["folder"])
    if tags:
        print(f"newest of {len(tags)}: {', '.join(tags)}")
    print(
        f"step {found['step']}, {found['world']} rank{'s' if found['world'] > 1 else ''}, stage "
        f"{found['stage']}, {found['precision']}, {found['optimizer']}, "
        f"{found['parameters']:,} parameters ({found['trainable']:,} trained)"
    )
    rows = [
        (
            tensor["name"],
            "x".join(map(str, tensor["shape"])) or "scalar",
            ", ".join(dict.fromkeys(tensor["kinds"].values())),
            ", ".join(tensor["kinds"]),
            _interval(tensor["ranks"]),
            f"{tensor['bytes']:,}",
        )
        for tensor in found["tensors"]
    ]
    columns = ["name", "shape", "dtype", "kinds", "ranks", "bytes"]
    report.show_table("Tensors", columns, rows, justify="left", wrap=False)
    for alias, name in found["tied"].items():
        print(f"{alias} is {name}")
    sizes = [(name, f"{size:,}") for name, size in found["files"].items()]
    report.show_table("Files", ["name", "bytes"], [*sizes, None, ("all", f"{found['bytes']:,}")])
    if verified:
        print(f"verified: every byte of {len(found['files'])} files is as it was saved")


def _interval(ranks: list[int]) -> str:
    if len(ranks) < 2:
        return str(ranks[0]) if ranks else "-"
    return f"{ranks[0]}-{ranks[-1]}"
