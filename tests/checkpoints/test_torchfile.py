"""State dicts for torch.load against torch.save."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from sources import Memory, Ramp, of_every_kind, same

from hpczero.checkpoints import source as source_module
from hpczero.checkpoints.torchfile import write_file


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("weights_only", [False, True])
def test_torch_loads_every_kind_of_tensor(
    tmp_path: Path, mmap: bool, weights_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "PIECE", 64)
    tensors = of_every_kind() | {"complex128": torch.zeros(2, 3, dtype=torch.complex128)}
    source = Memory(tensors, {"head": "layers.0.float32"})
    write_file(source, tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=weights_only, mmap=mmap)
    assert list(found) == [*tensors, "head"]
    assert all(same(found[name], tensor) for name, tensor in tensors.items())
    for name, tensor in found.items():
        assert tensor.is_contiguous() and not tensor.requires_grad
        assert tensor.data_ptr() % 64 == 0 or not mmap, name
    assert found["head"].data_ptr() == found["layers.0.float32"].data_ptr()
    assert source.longest <= 64


def test_zip_is_sound_and_says_what_torch_says(tmp_path: Path) -> None:
    tensors = of_every_kind()
    write_file(Memory(tensors), tmp_path / "ours.pt")
    torch.save(tensors, tmp_path / "archive.pt")
    with (
        zipfile.ZipFile(tmp_path / "ours.pt") as ours,
        zipfile.ZipFile(tmp_path / "archive.pt") as theirs,
    ):
        assert ours.testzip() is None  # checksums
        for name in ours.namelist():
            if name != "archive/data.pkl":
                assert ours.read(name) == theirs.read(name), name


def test_converts_and_refuses_as_told(tmp_path: Path) -> None:
    numbers = {"w": torch.tensor([1.5, 1e6]), "n": torch.tensor([3])}
    write_file(Memory(numbers), tmp_path / "x.pt", dtype=torch.bfloat16)
    found = torch.load(tmp_path / "x.pt")
    assert same(found["w"], numbers["w"].bfloat16()) and same(found["n"], numbers["n"])
    with pytest.raises(OverflowError, match=r"found 1 in 'w'"):
        write_file(Memory(numbers), tmp_path / "x.pt", dtype=torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]
    assert torch.load(tmp_path / "x.pt").keys() == numbers.keys()


@pytest.mark.slow
def test_a_storage_may_have_more_than_four_gib(tmp_path: Path) -> None:
    count = (1 << 30) + 100
    write_file(Ramp({"before": 3, "large": count, "after": 5}), tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", mmap=True)
    assert found["large"].data_ptr() % 64 == found["after"].data_ptr() % 64 == 0
    ends = [float(found["large"][i]) for i in (0, 999, 1000, count - 1)]
    assert ends == [0, 999, 0, (count - 1) % 1000]
    assert found["after"].tolist() == [0, 1, 2, 3, 4]
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None
