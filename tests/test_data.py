"""The text and the batches cut from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpczero import data
from hpczero.data import Batches, DataError


class Tape:
    """Record what rank 0 broadcasts, and play it to another rank."""

    def __init__(self, rank: int, tape: list[Tensor]) -> None:
        self.rank = rank
        self.tape = tape

    def broadcast(self, tensor: Tensor, purpose: str) -> None:
        if self.rank == 0:
            self.tape.append(tensor.clone())
        else:
            tensor.copy_(self.tape.pop(0))


def load_on_two(source: Path | None) -> list[Tensor]:
    tape: list[Tensor] = []
    return [data.load(source, Tape(rank, tape)) for rank in (0, 1)]


def test_the_standard_library_is_real_text() -> None:
    texts = load_on_two(None)
    assert torch.equal(texts[0], texts[1])
    assert 1 << 20 < len(texts[0]) <= data.LIMIT
    assert b"import sys\n" in bytes(texts[0].numpy())


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\x00\xffabc")
    assert [text.tolist() for text in load_on_two(path)] == [[0, 255, 97, 98, 99]] * 2


def test_a_folder_is_joined_in_sorted_order_without_hidden_and_binary_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, content in {
        "b/1.txt": b"two",
        "a.txt": b"one",
        "c": b"",
        ".git/x": b"no",
        "z.bin": b"n\0o",
    }.items():
        (tmp_path / name).write_bytes(content)
    assert [bytes(text.numpy()) for text in load_on_two(tmp_path)] == [b"onetwo"] * 2


def test_every_rank_learns_what_is_wrong_with_the_source(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    for source, problem in {
        tmp_path / "missing": "found no",
        tmp_path / "empty": "the empty file",
        tmp_path: "none with text in the folder",
    }.items():
        tape: list[Tensor] = []
        for rank in (0, 1):
            with pytest.raises(DataError, match=problem):
                data.load(source, Tape(rank, tape))


def test_a_text_that_is_too_short_names_both_lengths() -> None:
    with pytest.raises(DataError, match="more than seq = 8 bytes, found 8"):
        Batches(torch.zeros(8, dtype=torch.uint8), seq=8, batch=1, seed=0)
    Batches(torch.zeros(9, dtype=torch.uint8), seq=8, batch=1, seed=0).micro_batch(0)


def batches(batch: int, seed: int = 0) -> Batches:
    text = torch.arange(4000).remainder(251).to(torch.uint8)
    return Batches(text, seq=16, batch=batch, seed=seed)


def test_targets_are_the_next_tokens() -> None:
    tokens, targets = batches(3).micro_batch(5)
    assert tokens.shape == targets.shape == (3, 16)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_a_global_batch_is_the_same_at_any_world_size() -> None:
    whole = batches(12).micro_batch(7)[0]
    for pieces in (2, 3, 4):
        part = batches(12 // pieces)
        numbers = range(7 * pieces, 8 * pieces)
        assert torch.equal(whole, torch.cat([part.micro_batch(n)[0] for n in numbers]))


def test_another_seed_or_number_draws_other_samples() -> None:
    first = batches(4).micro_batch(0)[0]
    assert torch.equal(first, batches(4).micro_batch(0)[0])
    assert not torch.equal(first, batches(4).micro_batch(1)[0])
    assert not torch.equal(first, batches(4, seed=1).micro_batch(0)[0])


def test_samples_cover_the_text() -> None:
    starts = {data.scramble(0, index) % 100 for index in range(1000)}
    assert len(starts) == 100
