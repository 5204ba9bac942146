"""A checkpoint of 1000 tensors and 64 ranks: made, opened and read in seconds, in little memory."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from launch import ROOT, environment

from hpczero.checkpoints import folder as folders
from hpczero.checkpoints import index, rankfile
from hpczero.checkpoints import reader as readers
from hpczero.checkpoints.index import path_of
from hpczero.checkpoints.manifest import Manifest, Place, Run
from hpczero.checkpoints.reader import Checkpoint
from hpczero.partition.layout import Layout

KINDS = ("weights", "exp_avg", "exp_avg_sq")


def shape_of(number: int) -> tuple[int, ...]:
    """Return shapes such as models have: matrices, vectors, scalars, empty ones."""
    shapes = [(number % 89 + 1, 37), (number % 61 + 1,), (3, number % 7 + 1, 5), (), (0, 3)]
    return shapes[number % 5 if number % 10 < 5 else number % 3]


def save(
    root: Path,
    buckets: dict[str, dict[str, tuple[int, ...]]],
    ranks: int,
    kinds: tuple[str, ...] = KINDS,
) -> Path:
    """Write what `ranks` ranks would: element i of a bucket's run has the value i, or more."""
    path = root / "global_step1"
    path.mkdir()
    layouts = {bucket: Layout.of([*shapes.items()], ranks) for bucket, shapes in buckets.items()}
    runs = {
        bucket: Run(layout.padded, dict.fromkeys(kinds, "float32"))
        for bucket, layout in layouts.items()
    }
    places = {
        slot.name: Place(bucket, slot.start, slot.shape, kinds, {"step": 1}, True)
        for bucket, layout in layouts.items()
        for slot in layout.slots
    }
    seals = []
    for rank in range(ranks):
        arrays = []
        for offset, kind in enumerate(kinds):
            for bucket, layout in layouts.items():
                lo, hi = rank * layout.shard, (rank + 1) * layout.shard
                run = torch.arange(lo, hi, dtype=torch.float32) + offset
                arrays.append((path_of(kind, bucket), run))
                arrays += [
                    (path_of(f"scalars/{kind}", slot.name), run[slot.start - lo].clone())
                    for slot in layout.slots
                    if not slot.shape and lo <= slot.start < hi
                ]
        seals.append(rankfile.write(path / f"rank_{rank:05d}.h5", arrays))
    manifest = Manifest(
        tag=path.name,
        world=ranks,
        stage=3,
        precision="fp32",
        buckets=runs,
        parameters=places,
        buffers=[],
        tied={},
        optimizer={"type": "AdamW", "groups": [{}]},
        scheduler=None,
        counters={"global_steps": 1},
        seed=0,
        client_state={},
        versions={},
        files=seals,
    )
    index.build(path / index.FILE, manifest)
    checksum = rankfile.checksum((path / index.FILE).read_bytes())
    folders.write(path / "manifest.json", replace(manifest, index=checksum).dump())
    return path


def expected(place: Place, kind: str) -> np.ndarray:
    first = place.start + KINDS.index(kind)
    return np.arange(first, first + place.numel, dtype=np.float32).reshape(place.shape)


@pytest.mark.slow
def test_a_thousand_tensors_on_64_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds: dict[str, float] = {}
    begun = time.perf_counter()

    def lap(what: str) -> None:
        nonlocal begun
        seconds[what] = round(time.perf_counter() - begun, 2)
        begun = time.perf_counter()

    names = [f"blocks.{number // 20}.{number}.weight" for number in range(1000)]
    buckets: dict[str, dict[str, tuple[int, ...]]] = {}
    for number, name in enumerate(names):
        buckets.setdefault(f"blocks.{number // 20}", {})[name] = shape_of(number)
    path = save(tmp_path, buckets, 64)
    lap("save")
    with Checkpoint(path) as checkpoint:
        manifest = checkpoint.manifest
    begun = time.perf_counter()
    index.build(path / "again.h5", manifest)
    lap("build the index")
    assert seconds["build the index"] < 10
    (path / "again.h5").unlink()
    with h5py.File(path / index.FILE) as file:
        lap("open the index")
        assert seconds["open the index"] < 1
        for kind in KINDS:
            assert {*file[kind]} == {*names}
        lap("list")
        for name in names:
            for kind in KINDS:
                place = manifest.parameters[name]
                assert np.array_equal(file[path_of(kind, name)][()], expected(place, kind)), name
        lap("read all by h5py")
    # With fewer files open at a time than there are.
    monkeypatch.setattr(readers, "OPEN_FILES", 10)
    with Checkpoint(path) as checkpoint:
        for name in names:
            found = checkpoint.read("weights", name)
            wanted = expected(manifest.parameters[name], "weights")
            assert np.array_equal(found.view(wanted.shape).numpy(), wanted), name
            assert len(checkpoint._open) <= 10
        lap("read all weights verified")
        assert len([*checkpoint.verify()]) > 64 * len(buckets) * len(KINDS)
        lap("verify")
    assert seconds["read all weights verified"] < 30 and seconds["verify"] < 30
    with capsys.disabled():
        print(f"\n1000 tensors x 64 ranks, seconds: {seconds}")


def test_what_a_missing_rank_had_is_not_a_number(tmp_path: Path) -> None:
    path = save(tmp_path, {"root": {"w": (640, 2)}}, 2)
    with Checkpoint(path) as checkpoint:
        manifest = checkpoint.manifest
    narrow = {"root": Run(manifest.buckets["root"].padded, dict.fromkeys(KINDS, "bfloat16"))}
    index.build(path / "narrow.h5", replace(manifest, buckets=narrow))
    (path / "rank_00001.h5").unlink()
    for name in (index.FILE, "narrow.h5"):
        with h5py.File(path / name) as file:
            found = file["weights/w"][()]
        assert np.isnan(found[320:]).all()
        assert not np.isnan(found[:320]).any()


MEASURE = """
import re, sys
from pathlib import Path
import torch
from hpczero.checkpoints.consolidate import consolidate
from hpczero.checkpoints.reader import Checkpoint

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

folder, form = Path(sys.argv[1]), sys.argv[2]
before = peak()
with Checkpoint(folder) as checkpoint:
    consolidate(checkpoint, folder.parent / "out", form)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["safetensors", "torch", "hdf5"])
def test_consolidate_in_twice_the_largest_tensor(form: str, tmp_path: Path) -> None:
    """Of 64 files, whose blocks would be 320 MB if the last ones of each were kept."""
    shapes = {f"w{number}": (1024, 1 << 12) for number in range(16)}  # 16 MB each
    shapes["large"] = (4096, 1 << 12)  # 64 MB over 13 ranks
    path = save(tmp_path, {"root": shapes}, 64, KINDS[:1])
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), form],
        env=environment({}),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    largest, buffer = 64 << 20, 64 << 20
    print(f"{form}: {int(run.stdout) >> 20} MiB beyond the start")
    assert int(run.stdout) < 2 * largest + buffer
