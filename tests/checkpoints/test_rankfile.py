"""A rank's file: plain HDF5 whose every byte is checked."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.checkpoints import rankfile
from hpczero.checkpoints.rankfile import RankFile, Seal, write
from hpczero.errors import CheckpointError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.complex64,
]  # fmt: skip
BLOCK = 512


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rankfile, "BLOCK", BLOCK)


def arrays() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = [
        (f"{dtype}/block{n}", (torch.randn(n, generator=generator) * 9).to(dtype))
        for dtype in DTYPES
        for n in (1, 63, 1000)
    ]
    return [
        *made,
        ("weights/matrix", torch.randn(7, 5, generator=generator)),
        ("weights/empty", torch.empty(0, 3)),
        ("weights/scalar", torch.tensor(2.5)),
        ("weights/column", torch.randn(6, 4, generator=generator)[:, 1]),
    ]


def test_everything_comes_back_bit_for_bit(tmp_path: Path) -> None:
    seal = write(tmp_path / "rank_00000.h5", arrays())
    file = RankFile(tmp_path, seal)
    for name, tensor in arrays():
        back = file.read(name)
        assert back.dtype == tensor.dtype
        flat = tensor.flatten().contiguous()
        assert torch.equal(back.view(torch.uint8), flat.view(torch.uint8))
        assert file.entries[name].shape == tensor.shape
    assert [name for name, _ in file.verify()] == [name for name, _ in arrays()]
    file.close()
    assert Seal(**seal._asdict()) == seal


@given(st.integers(0, 1000), st.integers(0, 1000))
@settings(max_examples=30)
def test_any_part_can_be_read(tmp_path_factory: pytest.TempPathFactory, a: int, b: int) -> None:
    folder = tmp_path_factory.mktemp("part")
    tensor = torch.arange(1000, dtype=torch.float64)
    file = RankFile(folder, write(folder / "x.h5", [("a", tensor)]))
    lo, hi = min(a, b), max(a, b)
    assert torch.equal(file.read("a", lo, hi), tensor[lo:hi])
    file.close()


def test_a_group_is_read_by_the_names_in_it(tmp_path: Path) -> None:
    both = [("one/a", torch.arange(300.0)), ("two/a", torch.arange(5)), ("two/b/c", torch.ones(2))]
    seal = write(tmp_path / "x.h5", both)
    for group in ("one/", "two/"):
        file = RankFile(tmp_path, seal, group)
        inside = {n.removeprefix(group): tensor for n, tensor in both if n.startswith(group)}
        assert file.entries.keys() == inside.keys()
        assert all(torch.equal(file.read(name), tensor) for name, tensor in inside.items())
        assert [name for name, _ in file.verify()] == list(inside)
        file.close()


def test_plain_h5py_reads_it(tmp_path: Path) -> None:
    write(tmp_path / "x.h5", arrays())
    with h5py.File(tmp_path / "x.h5") as file:
        for name, tensor in arrays():
            assert file[name].shape == tuple(tensor.shape)
            expected = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            assert np.array_equal(file[name][()], expected.numpy())
        assert file[f"{torch.bfloat16}/block63"].dtype == np.float32


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    few = [("weights/a", torch.randn(300)), ("exp_avg/a", torch.randn(100).bfloat16())]
    seal = write(path, few)
    content = path.read_bytes()
    for at in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[at] ^= 1 << (at % 8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"x\.h5: .*expected checksum"):
            list(RankFile(tmp_path, seal).verify())
    path.write_bytes(content)
    list(RankFile(tmp_path, seal).verify())


def test_a_file_that_is_not_there_or_of_another_size_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    seal = write(path, [("a", torch.randn(300))])
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=rf"expected {len(content)} bytes, .* truncated"):
        RankFile(tmp_path, seal)
    path.write_bytes(content + b"x")
    with pytest.raises(CheckpointError, match="changed"):
        RankFile(tmp_path, seal)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"x\.h5: No such file"):
        RankFile(tmp_path, seal)


def test_a_foreign_file_of_the_same_size_is_refused(tmp_path: Path) -> None:
    seal = write(tmp_path / "a.h5", [("a", torch.randn(300))])
    other = write(tmp_path / "b.h5", [("a", torch.randn(300))])
    assert seal.size == other.size
    (tmp_path / "b.h5").replace(tmp_path / "a.h5")
    with pytest.raises(CheckpointError, match="expected checksum"):
        RankFile(tmp_path, seal)


def test_what_hdf5_cannot_store_is_a_type_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        write(tmp_path / "x.h5", [("a", torch.zeros(3).to(torch.float8_e4m3fn))])
