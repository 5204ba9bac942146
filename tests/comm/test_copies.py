"""Copies past the caches: the right bytes at every size and alignment, and no others."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from extensions import assert_built, build
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import ROOT

from hpczero.comm import copies
from hpczero.comm.copies import LARGE, copy_into

ROOM = 64
CODE = """
#include "streaming.h"
extern "C" void copy_by(void* to, const void* from, int64_t nbytes) {
  streaming::NAME((char*)to, (const char*)from, nbytes);
  streaming::finish();
}
"""


def values(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(count)).byte()


def test_it_was_built() -> None:
    assert_built("hpczero/comm", "_copy_cpu")
    assert copies._kernel() is not None


@pytest.mark.parametrize(("nbytes", "calls"), [(LARGE - 1, 0), (LARGE, 1)])
def test_only_large_copies_go_past_the_caches(
    nbytes: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(copies, "_kernel", lambda: lambda *args: made.append(args))
    copy_into(torch.zeros(nbytes).byte(), torch.zeros(nbytes).byte())
    assert len(made) == calls


@given(
    nbytes=st.integers(0, 9000).map(lambda extra: LARGE - 500 + extra),
    to=st.integers(0, ROOM),
    from_=st.integers(0, ROOM),
)
@settings(max_examples=60, deadline=None)
def test_all_bytes_and_no_others(nbytes: int, to: int, from_: int) -> None:
    source, target = values(nbytes + from_), torch.full((nbytes + 2 * ROOM,), 7).byte()
    copy_into(target[to : to + nbytes], source[from_:])
    assert torch.equal(target[to : to + nbytes], source[from_:])
    assert target[:to].eq(7).all() and target[to + nbytes :].eq(7).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("nbytes", [LARGE, (1 << 20) + 1, (3 << 20) + 4097])
def test_threads_share_it(threads: int, nbytes: int) -> None:
    source, target, before = values(nbytes), torch.zeros(nbytes).byte(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        copy_into(target, source)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(target, source)


def test_what_is_not_a_plain_copy_is_left_to_torch() -> None:
    count = LARGE
    wide, narrow = torch.randn(count), torch.empty(count, dtype=torch.bfloat16)
    copy_into(narrow, wide)
    assert torch.equal(narrow, wide.bfloat16())
    copy_into(narrow, wide.repeat_interleave(2)[::2])
    assert torch.equal(narrow, wide.bfloat16())
    with pytest.raises(ValueError, match=f"expected {count} elements, found {count + 1}"):
        copy_into(torch.empty(count), torch.empty(count + 1))


@pytest.mark.parametrize(("name", "level"), [("sse2", "x86-64"), ("avx2", "x86-64-v3")])
@pytest.mark.parametrize("nbytes", [0, 64, 4096, 8192, 8256, 5 * 8192 + 4096 + 64])
def test_every_instruction_set(name: str, level: str, nbytes: int, tmp_path: Path) -> None:
    (tmp_path / "copy.cpp").write_text(CODE.replace("NAME", name))
    library = tmp_path / "copy.so"
    build(tmp_path / "copy.cpp", library, level, "-I", str(ROOT / "hpczero/comm"))
    source, target = values(nbytes + 1)[1:], torch.full((nbytes + ROOM,), 7).byte()
    ctypes.CDLL(str(library)).copy_by(
        ctypes.c_void_p(target.data_ptr()),
        ctypes.c_void_p(source.data_ptr()),
        ctypes.c_int64(nbytes),
    )
    assert torch.equal(target[:nbytes], source)
    assert target[nbytes:].eq(7).all()
