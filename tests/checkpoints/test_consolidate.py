"""Whole tensors out of any source, in the memory of a few pieces."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
from launch import ROOT, environment
from sources import Memory, of_every_kind, same
from torch import Tensor

from hpczero.checkpoints import source as source_module
from hpczero.checkpoints.consolidate import consolidate
from hpczero.checkpoints.safetensors import SafetensorsFolder

EIGHT_BITS = {torch.float8_e4m3fn, torch.float8_e5m2}


def tensors_of_hdf5() -> dict[str, Tensor]:
    return {
        name: tensor for name, tensor in of_every_kind().items() if tensor.dtype not in EIGHT_BITS
    }


def test_each_format_has_its_form(tmp_path: Path) -> None:
    source = Memory({"a": torch.arange(3.0), "b": torch.ones(2)}, {"tie": "a"})
    consolidate(source, tmp_path / "x.safetensors", "safetensors")
    assert safetensors.torch.load_file(tmp_path / "x.safetensors").keys() == {"a", "b"}
    consolidate(source, tmp_path / "folder", "safetensors", torch.bfloat16, 6)
    folder = SafetensorsFolder(tmp_path / "folder")
    assert same(folder.read("weights", "a", 0, 3), torch.arange(3.0).bfloat16())
    assert len(list((tmp_path / "folder").glob("model-*-of-00002.safetensors"))) == 2
    consolidate(folder, tmp_path / "x.pt", "torch", torch.float32)  # a source like any other
    found = torch.load(tmp_path / "x.pt")
    assert all(same(found[name], source.weights[name]) for name in ("a", "b"))


@pytest.mark.parametrize(
    ("name", "form", "limit", "message"),
    [
        ("x.pt", "torch", 10, "a folder of safetensors.*found torch"),
        ("x.safetensors", "safetensors", 10, "a folder of safetensors.*x.safetensors"),
        ("x", "pickle", None, "expected one of .*'pickle'"),
    ],
)
def test_refuses_what_makes_no_sense(
    tmp_path: Path, name: str, form: Any, limit: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        consolidate(Memory({"a": torch.ones(2)}), tmp_path / name, form, None, limit)


# ---- HDF5


def test_h5py_reads_every_kind_of_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "PIECE", 64)
    tensors = tensors_of_hdf5()
    source = Memory(tensors, {"head": "layers.0.float32"})
    told: list[tuple[int, int]] = []
    consolidate(source, tmp_path / "x.h5", "hdf5", progress=lambda *numbers: told.append(numbers))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert told[-1] == (total, total) and source.longest <= 64
    with h5py.File(tmp_path / "x.h5") as file:
        assert set(file) == {*tensors, "head"}
        for name, tensor in tensors.items():
            found = file[name]
            assert found.shape == tuple(tensor.shape)
            if tensor.dtype == torch.bfloat16:
                assert found.id.get_type().get_size() == 2
                assert np.array_equal(found[()], tensor.float().numpy())
            else:
                assert found.dtype == tensor.numpy().dtype
                assert np.array_equal(found[()], tensor.numpy())
        assert file["head"] == file["layers.0.float32"]  # one dataset


def test_bf16_in_hdf5_has_all_kinds_of_numbers(tmp_path: Path) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.bfloat16)
    consolidate(Memory({"w": numbers}), tmp_path / "x.h5", "hdf5")
    with h5py.File(tmp_path / "x.h5") as file:
        found = torch.from_numpy(file["w"][:])
    assert torch.equal(found.isnan(), numbers.isnan())
    numeric = ~numbers.isnan()
    assert same(found[numeric], numbers.float()[numeric])


def test_hdf5_refuses_types_that_it_lacks(tmp_path: Path) -> None:
    source = Memory({"w": torch.ones(3).to(torch.float8_e5m2)})
    with pytest.raises(ValueError, match=r"'w': .* found float8_e5m2: give a dtype"):
        consolidate(source, tmp_path / "x.h5", "hdf5")
    assert list(tmp_path.iterdir()) == []
    consolidate(source, tmp_path / "x.h5", "hdf5", torch.float16)
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["w"].dtype == np.float16 and file["w"][:].tolist() == [1, 1, 1]


# ---- memory

MEASURE = """
import resource, sys
from pathlib import Path
import torch
from hpczero.checkpoints.consolidate import consolidate
from sources import Ramp
for name, form, limit in [
    ("x.safetensors", "safetensors", None),
    ("x", "safetensors", 1000),
    ("x.pt", "torch", None),
    ("x.h5", "hdf5", None),
]:
    out = Path(sys.argv[1]) / name
    peaks = []
    for size in (8 << 20, 64 << 20):
        consolidate(Ramp({"w": size, "v": 10}), out, form, torch.bfloat16, limit)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    print((peaks[1] - peaks[0]) // 1024)
"""


@pytest.mark.slow
def test_memory_is_constant(tmp_path: Path) -> None:
    # Tensors of 32 MiB and of 256 MiB, which take the same memory.
    paths = {"PYTHONPATH": f"{ROOT / 'tests'}:{environment({})['PYTHONPATH']}"}
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path],
        env=environment(paths),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    growth = [int(line) for line in run.stdout.split()]
    assert len(growth) == 4 and max(growth) < 48, growth  # MiB; a whole tensor more is 112
