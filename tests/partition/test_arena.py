"""Arena and Ledger: memory is lent again, counted, and never waited for in vain."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch

from hpczero.partition import arena
from hpczero.partition.arena import Arena, Ledger


def done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def test_a_buffer_comes_back_when_its_reduction_is_done() -> None:
    ledger = Ledger()
    lender = Arena(ledger)
    first = lender.lend(100, torch.float32)
    lender.give_back(first, done())
    second = lender.lend(200, torch.bfloat16)
    assert second.data_ptr() == first.data_ptr()
    assert (second.numel(), second.dtype) == (200, torch.bfloat16)
    assert ledger.last()["device"]["buffers"] == 400


def test_a_busy_buffer_is_not_lent() -> None:
    lender = Arena(Ledger())
    first = lender.lend(100, torch.float32)
    lender.give_back(first, Future())
    assert lender.lend(100, torch.float32).data_ptr() != first.data_ptr()


def test_waiting_for_a_stuck_reduction_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "PATIENCE_SECONDS", 0.05)
    lender = Arena(Ledger())
    for _ in range(4):
        lender.give_back(lender.lend(10, torch.float32), Future())


def test_what_a_slow_rank_made_necessary_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "PATIENCE_SECONDS", 1e-3)
    ledger = Ledger()
    lender = Arena(ledger)
    slow: list[Future[None]] = [Future() for _ in range(3 * arena.MOST_FREE)]
    for number, future in enumerate(slow):
        lender.give_back(lender.lend(100 + number, torch.uint8), future)
    for future in slow:
        future.set_result(None)
    lender.give_back(lender.lend(100, torch.uint8), done())
    lender.lend(100, torch.uint8)
    ledger.mark()
    ledger.mark()
    kept = range(len(slow) - arena.MOST_FREE, len(slow))  # the largest serve all
    assert ledger.last()["device"]["buffers"] == sum(100 + number for number in kept)


def test_small_free_buffers_are_not_hoarded() -> None:
    ledger = Ledger()
    lender = Arena(ledger)
    for numel in (10, 20, 40, 80):
        lender.give_back(lender.lend(numel, torch.uint8), done())
    lender.lend(80, torch.uint8)
    ledger.mark()
    ledger.mark()
    assert ledger.last()["device"]["buffers"] == 80


def test_high_water_marks_belong_to_a_step() -> None:
    ledger = Ledger()
    ledger.add("grads", 100)
    ledger.add("buffers", 50)
    ledger.add("buffers", -50)
    ledger.mark()
    assert ledger.last()["device"] == {"params": 0, "grads": 100, "states": 0, "buffers": 50}
    ledger.mark()
    assert ledger.last()["device"] == {"params": 0, "grads": 100, "states": 0, "buffers": 0}
