"""Runs of flat elements as boxes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpczero.checkpoints.index import boxes, path_of


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_cover_a_run_in_order(shape: list[int], data: st.DataObject) -> None:
    numbers = np.arange(np.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, numbers.size))
    stop = data.draw(st.integers(start, numbers.size))
    found: list[int] = []
    count = 0
    for offsets, extents in boxes(tuple(shape), start, stop):
        cut = tuple(slice(o, o + e) for o, e in zip(offsets, extents, strict=True))
        found += numbers[cut].ravel().tolist()
        count += 1
    assert found == list(range(start, stop))
    assert count <= 2 * len(shape) - 1


@given(st.text(), st.text())
def test_names_have_paths_of_their_own(a: str, b: str) -> None:
    assert path_of("weights", a).count("/") == 1
    assert (path_of("weights", a) == path_of("weights", b)) == (a == b)
