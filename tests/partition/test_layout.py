"""Layout: properties that every cut of every model must have."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from hpczero.partition.layout import ALIGN, Layout, persistent, round_up

shapes = st.lists(st.integers(0, 200), max_size=3).map(tuple)
models = st.lists(shapes, max_size=12).map(lambda all_: [(f"p{i}", s) for i, s in enumerate(all_)])
ranks = st.integers(1, 17)


@given(models, ranks)
def test_slots_are_aligned_disjoint_and_in_order(model: list, ranks: int) -> None:
    layout = Layout.of(model, ranks)
    assert [(slot.name, slot.shape) for slot in layout.slots] == model
    end = 0
    for slot in layout.slots:
        assert slot.start % ALIGN == 0
        assert slot.start >= end
        assert slot.numel == math.prod(slot.shape)
        end = slot.stop
    assert end <= layout.padded
    assert layout.numel == sum(slot.numel for slot in layout.slots)


@given(models, ranks)
def test_shards_cover_the_run_equally(model: list, ranks: int) -> None:
    layout = Layout.of(model, ranks)
    intervals = [layout.interval(rank) for rank in range(ranks)]
    assert intervals[0][0] == 0
    assert intervals[-1][1] == layout.padded
    for (_, stop), (start, _) in itertools.pairwise(intervals):
        assert stop == start
    assert {stop - start for start, stop in intervals} == {layout.shard}
    assert layout.shard % ALIGN == 0


@given(models, ranks)
def test_gaps_and_slots_tile_the_run(model: list, ranks: int) -> None:
    layout = Layout.of(model, ranks)
    places = layout.gaps() + [(s.start, s.stop) for s in layout.slots if s.numel]
    places.sort()
    assert sum(stop - start for start, stop in places) == layout.padded
    for (_, stop), (start, _) in itertools.pairwise(places):
        assert stop == start


@given(models, ranks)
def test_padding_is_bounded(model: list, ranks: int) -> None:
    layout = Layout.of(model, ranks)
    assert layout.padded - layout.numel < ALIGN * (len(model) + ranks)


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_round_up(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - value < multiple


def test_what_is_persistent() -> None:
    layouts = [Layout.of([("a", (numel,)), ("b", (3,))], 2) for numel in (50, 10, 40, 20)]
    assert persistent(layouts, 0, None) == [False] * 4
    assert persistent(layouts, 40, None) == [False, True, False, True]
    assert persistent(layouts, 51, None) == [True] * 4
    assert persistent(layouts, 51, 90) == [True, True, False, True]  # 53 + 13 + 23
    assert persistent(layouts, 51, 0) == [False] * 4
