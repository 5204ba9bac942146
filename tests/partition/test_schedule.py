"""Schedule: foresees the next units, and copes when the order changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpczero.partition.schedule import Schedule


def run(schedule: Schedule[str], order: str) -> list[str]:
    """Run a pass and return what was foreseen after each visit, nearest first."""
    schedule.begin()
    foreseen = []
    for unit in order:
        schedule.visit(unit)
        foreseen.append("".join(schedule.ahead()))
    return foreseen


def test_the_first_pass_foresees_nothing_and_the_second_everything() -> None:
    schedule: Schedule[str] = Schedule()
    assert run(schedule, "abcb") == ["", "", "", ""]
    assert run(schedule, "abcb") == ["bcb", "cb", "b", ""]


def test_a_skipped_branch_and_a_new_unit() -> None:
    schedule: Schedule[str] = Schedule()
    run(schedule, "abcd")
    assert run(schedule, "acd") == ["bcd", "d", ""]
    assert run(schedule, "axcd") == ["cd", "cd", "d", ""]


def test_the_next_pass_is_the_last_one() -> None:
    schedule: Schedule[str] = Schedule()
    assert list(schedule.next_pass()) == []
    run(schedule, "abc")
    assert list(schedule.next_pass()) == ["a", "b", "c"]
    schedule.begin()
    assert list(schedule.next_pass()) == ["a", "b", "c"]
    schedule.visit("b")
    assert list(schedule.next_pass()) == ["b"]


def test_an_empty_pass_forgets_nothing() -> None:
    schedule: Schedule[str] = Schedule()
    run(schedule, "ab")
    schedule.begin()
    assert run(schedule, "ab") == ["b", ""]


@given(st.text("abcd", min_size=1), st.text("abcd"))
def test_any_order_after_any_order(first: str, second: str) -> None:
    schedule: Schedule[str] = Schedule()
    run(schedule, first)
    for ahead in run(schedule, second):
        assert first.endswith(ahead)
