"""Arrays in a file: every byte comes back, faults are named, memory and room are given back."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import environment

from hpczero.infinity import filetier
from hpczero.infinity.filetier import BLOCK, FileTier
from hpczero.infinity.tier import CUT, Array, Memory, Part, done

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ODD = [1, 63, 2047, 2048, 2049, 512 * 1024 - 1, 512 * 1024 + 1, 3 * CUT + 17]


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FileTier]:
    tier = FileTier(tmp_path / "made" / "too", 3, keep=True)
    yield tier
    tier.close()


def filled(tier: FileTier, name: str, values: torch.Tensor) -> Array:
    array = tier.zeros(name, values.numel(), values.dtype)
    with array.anew() as place:
        place.copy_(values)
    return array


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_read(tier: FileTier, dtype: torch.dtype) -> None:
    for number, numel in enumerate(ODD):
        values = torch.randn(numel).to(dtype)
        array = filled(tier, f"a{number}", values)
        assert not array.tensor.any(), "its pages are given back"
        with array.here() as found:
            assert torch.equal(found, values)


def test_bytes_go_past_the_cache(tier: FileTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whole blocks of the file, wherever HDF5 has put its structures."""
    if not tier.direct:
        pytest.skip("a file system without direct I/O")
    offsets = []
    write = os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda n, b, offset: (offsets.append((n, offset)), write(n, b, offset))[1]
    )
    for number, numel in enumerate([1, 5000, 3, 70_000]):
        filled(tier, f"group{number}/a", torch.ones(numel))
    assert tier.direct
    assert len(offsets) == 4
    assert all(number == tier._direct and offset % BLOCK == 0 for number, offset in offsets)


def test_what_settles_again_and_again_costs_nothing(tier: FileTier) -> None:
    array = tier.zeros("a", 1000, torch.float32)
    for number in range(50):
        with array.filling(adds=False):
            array.tensor.fill_(number)
        array.settle(done(), lambda: None).result()
    with array.here() as values:
        assert values.eq(49).all()
    assert len(array._writing) <= 2


def test_what_is_filled_again_waits_until_it_is_written(
    tier: FileTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient that no update reads, as its step was skipped, is soon followed by another."""
    array, go = tier.zeros("a", 1000, torch.float32), threading.Event()
    sums: list[float] = []
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *args: (go.wait(20), write(*args))[1])
    for number in (1, 2):
        if number == 2:
            threading.Timer(0.3, go.set).start()
        with array.filling(adds=False):
            array.tensor.fill_(number)
        array.settle(done(), lambda: sums.append(array.tensor.sum().item())).result()
    assert sums == [1000, 2000]
    with array.here() as values:
        assert values.eq(2).all()


def test_memory_is_accounted_and_given_back(tmp_path: Path) -> None:
    taken = [0]

    def account(nbytes: int) -> None:
        taken[0] += nbytes

    tier = FileTier(tmp_path, 0, account)
    array = filled(tier, "a", torch.ones(3 * CUT + 5))
    for block in (array.here(changes=True), array.anew()):
        with block, contextlib.suppress(ZeroDivisionError):
            assert taken[0] > 0
            1 / 0  # noqa: B018
    array.values(5, CUT + 7)
    with array.coming():
        pass
    for adds in (False, True):
        with array.filling(adds):
            assert taken[0] > 0
        array.settle(done(), lambda: None).result()
    tier.close()
    assert taken == [0]


def test_a_new_array_is_zero_and_an_empty_one_needs_nothing(tier: FileTier) -> None:
    with tier.zeros("new", 5000, torch.float32).here() as values:
        assert not values.any()
    empty = tier.zeros("empty", 0, torch.float32)
    empty.read().result()
    empty.write().result()
    assert empty.resident


@settings(max_examples=20, deadline=None)
@given(numel=st.integers(1, 5 * CUT), edges=st.sets(st.integers(1, 4), max_size=3))
def test_parts_are_independent(tmp_path_factory: pytest.TempPathFactory, numel, edges) -> None:
    tier = FileTier(tmp_path_factory.mktemp("tier"), 0)
    values = torch.randn(numel)
    array = filled(tier, "a", values)
    cuts = [0, *(edge * CUT for edge in sorted(edges) if edge * CUT < numel), numel]
    parts = list(pairwise(cuts))
    for start, stop in parts[::2]:
        array.read(start, stop).result()
        assert torch.equal(array.tensor[start:stop], values[start:stop])
        array.tensor[start:stop] += 1
        array.write(start, stop).result()
    for start, stop in parts[::2]:
        values[start:stop] += 1
    with array.here() as found:
        assert torch.equal(found, values)
    tier.close()


def test_a_block_keeps_its_changes_only_if_it_says_so(tier: FileTier) -> None:
    array = filled(tier, "a", torch.ones(100))
    with array.here() as values:
        values += 1
    with array.here(changes=True) as values:
        assert values.eq(1).all()
        values += 2
    for block in (array.here(changes=True), array.anew()):
        with contextlib.suppress(ZeroDivisionError), block as values:
            values += 2
            raise ZeroDivisionError
    with array.here() as values:
        assert values.eq(3).all()


def test_values_of_any_interval(tier: FileTier) -> None:
    values = torch.randn(3 * CUT + 5)
    for array in (filled(tier, "a", values), Array(values)):
        part = Part(array, 70, values.numel() - 3)
        assert torch.equal(part.values(0, 9), values[70:79])
        assert torch.equal(part.values(CUT - 80, 2 * CUT), values[CUT - 10 : 2 * CUT + 70])
        assert torch.equal(part.values(3 * CUT - 70, 3 * CUT - 68), values[3 * CUT : 3 * CUT + 2])


def test_settle_looks_and_writes_when_filled(tier: FileTier) -> None:
    array, looked = tier.zeros("a", 1000, torch.float32), []
    array.tensor.fill_(7)
    array.settle(done(), lambda: looked.append(array.tensor.sum().item())).result()
    with array.here() as values:
        assert values.eq(7).all()
    assert looked == [7000]
    failed: Future[None] = Future()
    failed.set_exception(ValueError("no gradient"))
    with pytest.raises(ValueError, match="no gradient"):
        array.settle(failed, lambda: None).result()
    memory = Memory("host").zeros("a", 10, torch.float32)
    assert memory.settle(done(), lambda: looked.append(0)).done()
    assert looked == [7000]


def test_what_is_filled_waits_for_room_and_never_for_itself(
    tier: FileTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each array is larger than the backlog: one is written before the next is filled."""
    monkeypatch.setattr(filetier, "BACKLOG", 1000)
    arrays = [tier.zeros(f"a{number}", 100_000, torch.float32) for number in range(8)]
    filled: list[Future[None]] = [Future() for _ in arrays]
    blocks = [array.filling(adds=False) for array in arrays]
    settled = [a.settle(f, lambda: None) for a, f in zip(arrays, filled, strict=True)]
    for number, (array, future) in enumerate(zip(arrays, filled, strict=True)):
        with blocks[number]:
            assert all(not earlier.tensor.any() for earlier in arrays[:number]), "written"
            array.tensor.fill_(number + 1)
        future.set_result(None)
    for number, (array, future) in enumerate(zip(arrays, settled, strict=True)):
        future.result()
        with array.here() as values:
            assert values.eq(number + 1).all()


def test_any_hdf5_tool_reads_the_file(tier: FileTier) -> None:
    expected = {}
    for number in range(200):
        numel, dtype = 1 + 37 * number % 5000, DTYPES[number % 4]
        expected[f"bucket.{number}/kind"] = torch.randn(numel).to(dtype)
    arrays = {name: filled(tier, name, values) for name, values in expected.items()}
    for name in list(arrays)[::3]:
        with arrays[name].here(changes=True) as values:
            values.mul_(2)
        expected[name] = expected[name] * 2
    tier.close()
    with h5py.File(tier.path) as file:
        for name, values in expected.items():
            numel = file[name].attrs["numel"]
            assert numel == values.numel()
            found = torch.from_numpy(np.asarray(file[name][:numel], dtype=np.float64))
            assert torch.equal(found, values.to(torch.float64)), name
    if shutil.which("h5dump") is not None:  # no package here needs it
        dump = ["h5dump", "-y", "-w", "1", "-m", "%.17g", str(tier.path)]
        said = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
        groups = re.split(r'^   GROUP "(.*)" \{$', said, flags=re.MULTILINE)[1:]
        assert len(groups) == 2 * len(expected)
        for name, text in zip(groups[::2], groups[1::2], strict=True):
            numbers = re.search(r"^ *DATA \{$(.*?)^ *\}$", text, re.MULTILINE | re.DOTALL)
            assert numbers is not None
            found = torch.tensor([float(n) for n in numbers[1].split(",")], dtype=torch.float64)
            values = expected[f"{name}/kind"]
            assert torch.equal(found[: values.numel()].to(values.dtype), values), name


def test_memory_is_only_what_is_being_used(tier: FileTier) -> None:
    numel = 16 << 20
    array = tier.zeros("large", numel, torch.float32)
    before = resident()
    for start in range(0, numel, 1 << 20):
        array.tensor[start : start + (1 << 20)].fill_(start)
        array.write(start, start + (1 << 20)).result()
    for start in range(0, numel, 1 << 20):
        array.read(start, start + (1 << 20)).result()
        assert array.tensor[start] == start
        array.drop(start, start + (1 << 20))
    assert resident() - before < 16 << 20
    assert tier.moved == (4 * numel, 4 * numel)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checksums_find_a_wrong_byte_and_nothing_else(tmp_path: Path, dtype: torch.dtype) -> None:
    tier = FileTier(tmp_path, 0, checksums=True)
    numel = 3 * CUT + 5
    with tier.zeros("new", numel, dtype).here() as values:
        assert not values.any()
    array = filled(tier, "group/a", torch.ones(numel).to(dtype))
    for start, stop in [(CUT, 2 * CUT), (CUT, numel), (3 * CUT, numel), (0, None)]:
        array.read(start, stop).result()
        array.write(start, stop).result()
    place = array._offset + 2 * CUT * dtype.itemsize + 77
    os.pwrite(tier._number, b"\x05", place)
    array.read(0, 2 * CUT).result()
    array.read(3 * CUT, numel).result()
    block = array._offset + 2 * CUT * dtype.itemsize
    with pytest.raises(OSError, match=rf"'group/a'.*bytes at {block} .* 1 blocks of 4") as caught:
        array.read().result()
    assert caught.value.filename == str(tier.path)
    tier.close()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("direct", [True, False])
def test_short_calls_are_continued(
    tier: FileTier, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    if not direct:
        tier._direct = None
    read, write = os.preadv, os.pwritev
    sizes = [BLOCK, 3 * BLOCK, 100]

    def short(call, number, buffers, offset):
        sizes.append(sizes.pop(0))
        cut = sizes[0] if number == tier._number else max(BLOCK, sizes[0])
        return call(number, [buffers[0][:cut]], offset)

    monkeypatch.setattr(os, "preadv", lambda *args: short(read, *args))
    monkeypatch.setattr(os, "pwritev", lambda *args: short(write, *args))
    values = torch.randn(20_000)
    with filled(tier, "a", values).here() as found:
        assert torch.equal(found, values)


def test_a_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so when opening, or only at the first call."""
    write = os.pwritev

    def refuse(number, buffers, offset):
        if number != tier._number:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(number, buffers, offset)

    tier = FileTier(tmp_path, 0)
    monkeypatch.setattr(os, "pwritev", refuse)
    values = torch.randn(5000)
    with filled(tier, "a", values).here() as found:
        assert torch.equal(found, values)
    assert not tier.direct
    tier.close()
    monkeypatch.setattr(filetier, "_open_direct", lambda path: None)
    tier = FileTier(tmp_path, 0)
    with filled(tier, "a", values).here() as found:
        assert torch.equal(found, values)
    tier.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_failing_disk_is_named(
    tier: FileTier, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    array = filled(tier, "block.0/master", torch.ones(5000))

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(OSError, match=r"reading 'block\.0/master'") as caught:
        array.read().result()
    assert (caught.value.errno, caught.value.filename) == (number, str(tier.path))
    with pytest.raises(OSError, match=r"writing 'block\.0/master'"):
        array.write().result()
    with pytest.raises(OSError, match=r"writing"):
        array.read().result()  # what failed to be written isn't there to be read


def test_a_file_that_was_cut_is_named(tier: FileTier) -> None:
    array = filled(tier, "a", torch.ones(50_000))
    os.truncate(tier.path, 2 * BLOCK)
    with pytest.raises(OSError, match="bytes too early") as caught:
        array.read().result()
    assert caught.value.filename == str(tier.path)


def test_too_little_room_is_said_with_numbers(
    tier: FileTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filetier, "_free", lambda path: 5000)
    with pytest.raises(OSError, match="a needs 8192 bytes, free are 5000") as caught:
        tier.zeros("a", 2000, torch.float32)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tier.path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OSError, match="file"):
        FileTier(tmp_path / "file", 0)


def test_nothing_is_left(tmp_path: Path) -> None:
    tier = FileTier(tmp_path, 0)
    array = filled(tier, "a", torch.ones(5000))
    assert not list(tmp_path.iterdir())
    with array.here() as values:
        assert values.eq(1).all()
    tier.close()
    gc.collect()
    files = len(list(Path("/proc/self/fd").iterdir()))
    tier = FileTier(tmp_path, 0)
    del tier, array
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= files
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_by_a_killed_job(tmp_path: Path) -> None:
    program = f"""
import os, signal, torch
from pathlib import Path
from hpczero.infinity.filetier import FileTier
tier = FileTier(Path({str(tmp_path)!r}), 0)
array = tier.zeros("a", 1 << 22, torch.float32)
array.write()
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", program], env=environment({}), check=False)
    assert ended.returncode == -9
    assert not list(tmp_path.iterdir())
