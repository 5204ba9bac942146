"""The text and the batches cut from it."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

from hpczero import data
from hpczero.data import Batches, DataError, Tokens


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


def load_on_two(source: Path | None, vocabulary: int | None = None) -> list[Tokens]:
    tape: list[Tensor] = []
    return [data.load(source, Tape(rank, tape), vocabulary) for rank in (0, 1)]


def text(tokens: Tokens) -> bytes:
    return bytes(tokens.run[: tokens.size].tolist())


def error_on_two(source: Path, vocabulary: int | None = None) -> str:
    """Return what both ranks say when they refuse a source."""
    tape: list[Tensor] = []
    messages = set()
    for rank in (0, 1):
        with pytest.raises(DataError) as caught:
            data.load(source, Tape(rank, tape), vocabulary)
        messages.add(str(caught.value))
    assert len(messages) == 1
    assert not tape
    return messages.pop()


def test_the_standard_library_is_real_text() -> None:
    texts = load_on_two(None)
    assert text(texts[0]) == text(texts[1])
    assert 1 << 20 < texts[0].size <= data.LIMIT
    assert b"import sys\n" in text(texts[0])
    assert texts[0].vocabulary == 256


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\x00\xffabc")
    assert [text(tokens) for tokens in load_on_two(path)] == [b"\x00\xffabc"] * 2
    assert [tokens.vocabulary for tokens in load_on_two(path)] == [256, 256]


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
    assert [text(tokens) for tokens in load_on_two(tmp_path)] == [b"onetwo"] * 2


def test_every_rank_learns_what_is_wrong_with_the_source(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    for source, problem in {
        tmp_path / "missing": "found no",
        tmp_path / "empty": "the empty file",
        tmp_path: "none with text in the folder",
    }.items():
        assert problem in error_on_two(source)


# ---- token files


def token_file(path: Path, tokens: list[int], dtype: str = "uint16") -> Path:
    """Write a `.bin`, or an HDF5 file with the dataset `a/tokens` and two of other kinds."""
    array = np.array(tokens, dtype=dtype)
    if path.suffix == ".bin":
        array.tofile(path)
    else:
        with h5py.File(path, "w") as file:
            file["a/tokens"] = array
            file["images"] = np.zeros((2, 3))
            file["names"] = ["x"]
    return path


@pytest.mark.parametrize("name", ["x.bin", "x.h5", "x.hdf5"])
def test_tokens(tmp_path: Path, name: str) -> None:
    values = [0, 65535, 258, 1, 50256]
    for tokens in load_on_two(token_file(tmp_path / name, values)):
        assert (tokens.size, tokens.vocabulary) == (5, 65536)
        assert tokens.run[1:4].long().tolist() == values[1:4]


@pytest.mark.parametrize(("largest", "vocabulary"), [(0, 64), (63, 64), (64, 128), (50256, 50304)])
def test_the_vocabulary_covers_the_data_in_64s(
    tmp_path: Path, largest: int, vocabulary: int
) -> None:
    path = token_file(tmp_path / "x.bin", [0, largest, 0])
    assert load_on_two(path)[1].vocabulary == vocabulary


def test_the_largest_token_is_found_in_any_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "PIECE", 4)
    path = token_file(tmp_path / "x.bin", [1] * 9 + [700])
    assert load_on_two(path)[0].vocabulary == 704
    assert load_on_two(path, vocabulary=80)[0].vocabulary == 80  # looks at the first piece only


def test_a_given_vocabulary_holds(tmp_path: Path) -> None:
    path = token_file(tmp_path / "x.h5", [1, 2, 99])
    assert load_on_two(path, vocabulary=100)[1].vocabulary == 100
    error = error_on_two(path, vocabulary=99)
    assert "below the vocabulary of 99, found 99: give at least 100 (--vocab)" in error


def test_a_dataset_is_chosen_by_name(tmp_path: Path) -> None:
    path = token_file(tmp_path / "x.h5", [1, 2, 3], "int64")
    with h5py.File(path, "a") as file:
        file["b"] = np.array([4, 5], dtype="int8")
    for name, expected in {"a/tokens": [1, 2, 3], "/b": [4, 5]}.items():
        tokens = load_on_two(Path(f"{path}:{name}"))[1]
        assert tokens.run[0 : tokens.size].tolist() == expected
    error = error_on_two(path)
    assert "found 2 to choose from" in error
    assert "a/tokens int64[3]" in error


def test_a_missing_or_other_dataset_lists_those_there_are(tmp_path: Path) -> None:
    path = token_file(tmp_path / "x.h5", [1, 2, 3])
    for name in ("c", "images", "names", "a"):
        error = error_on_two(Path(f"{path}:{name}"))
        assert f"found {name!r} in '{path}'" in error
        assert "Its datasets: a/tokens uint16[3], images float64[2, 3], names object[1]" in error


def test_files_that_hold_no_tokens(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "text.h5").write_bytes(b"some text")
    token_file(tmp_path / "none.h5", [])
    token_file(tmp_path / "negative.h5", [3, -7], "int32")
    token_file(tmp_path / "times.h5", [1700000000], "int64")
    for name, problem in {
        "odd.bin": "two bytes each (uint16), found 3 bytes",
        "empty.bin": "the empty file",
        "text.h5": "expected HDF5 in",
        "none.h5": "the empty dataset 'a/tokens'",
        "negative.h5": "expected tokens from 0, found -7",
        "times.h5": "found 1,700,000,000: are these tokens?",
        "missing.h5:x": "found no",
    }.items():
        assert problem in error_on_two(tmp_path / name), name


# ---- batches


def flat(values: Tensor, vocabulary: int = 256) -> Tokens:
    return Tokens(values, len(values), vocabulary)


def test_data_that_is_too_short_names_both_lengths() -> None:
    with pytest.raises(DataError, match="more than seq = 8 tokens, found 8"):
        Batches(flat(torch.zeros(8, dtype=torch.uint8)), seq=8, batch=1, seed=0)
    Batches(flat(torch.zeros(9, dtype=torch.uint8)), seq=8, batch=1, seed=0).micro_batch(0)


def test_a_token_beyond_the_vocabulary_is_named() -> None:
    for token in (90, -1):
        tokens = flat(torch.full((99,), token), vocabulary=64)
        with pytest.raises(
            ValueError, match=rf"from 0 to 63, found {token} in the batch from sample 6"
        ):
            Batches(tokens, seq=8, batch=2, seed=0).micro_batch(3)


@pytest.mark.parametrize("name", ["x.bin", "x.h5"])
def test_batches_of_a_file_are_those_of_its_tokens(tmp_path: Path, name: str) -> None:
    values = torch.arange(1000) % 321
    tokens = load_on_two(token_file(tmp_path / name, values.tolist()))[1]
    expected = Batches(flat(values, 384), seq=16, batch=3, seed=5)
    found = Batches(tokens, seq=16, batch=3, seed=5)
    for number in (0, 7):
        for mine, theirs in zip(
            found.micro_batch(number), expected.micro_batch(number), strict=True
        ):
            assert mine.dtype == torch.int64
            assert torch.equal(mine, theirs)


def batches(batch: int, seed: int = 0) -> Batches:
    values = torch.arange(4000).remainder(251).to(torch.uint8)
    return Batches(flat(values), seq=16, batch=batch, seed=seed)


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
