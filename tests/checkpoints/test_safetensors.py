"""Safetensors against the library that defines the format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from sources import Memory, of_every_kind, same
from torch import Tensor

from hpczero.checkpoints import source as source_module
from hpczero.checkpoints.safetensors import INDEX, SafetensorsFolder, write_file, write_folder


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "PIECE", 64)


def read_all(folder: SafetensorsFolder) -> dict[str, Tensor]:
    found = {}
    for name in folder.names("weights"):
        shape = folder.shape("weights", name)
        count = source_module.numel(folder, "weights", name)
        found[name] = folder.read("weights", name, 0, count).view(shape)
    return found


# ---- writing


@pytest.mark.usefixtures("short_pieces")
def test_file_is_the_one_that_the_library_writes(tmp_path: Path) -> None:
    tensors = of_every_kind()
    source = Memory(tensors)
    write_file(source, tmp_path / "ours.safetensors")
    safetensors.torch.save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    theirs = (tmp_path / "theirs.safetensors").read_bytes()
    assert (tmp_path / "ours.safetensors").read_bytes() == theirs
    assert source.longest <= 64


@pytest.mark.usefixtures("short_pieces")
def test_converts_floating_tensors_only(tmp_path: Path) -> None:
    tensors = {
        name: tensor for name, tensor in of_every_kind().items() if tensor.dtype != torch.complex64
    }
    write_file(Memory(tensors), tmp_path / "x.safetensors", dtype=torch.bfloat16)
    found = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same(found[name], tensor.bfloat16() if tensor.is_floating_point() else tensor), name


def test_refuses_a_type_that_overflows(tmp_path: Path) -> None:
    source = Memory({"w": torch.tensor([1.0, float("inf"), 1e6])})
    with pytest.raises(OverflowError, match=r"found 1 in 'w'.*1e\+06"):
        write_file(source, tmp_path / "x.safetensors", dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []


def test_refuses_types_that_it_cant_write(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"complex128 in 'w'"):
        write_file(Memory({"w": torch.zeros(2, dtype=torch.complex128)}), tmp_path / "x")
    with pytest.raises(ValueError, match=r"floating dtype.*int8"):
        write_file(Memory({"w": torch.zeros(2)}), tmp_path / "x", dtype=torch.int8)


def test_leaves_the_old_file_where_writing_fails(tmp_path: Path) -> None:
    write_file(Memory({"w": torch.ones(3)}), tmp_path / "x.safetensors")

    class Broken(Memory):
        def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        write_file(Broken({"w": torch.zeros(5)}), tmp_path / "x.safetensors")
    with pytest.raises(OSError, match="the disk is gone"):
        write_folder(Broken({"w": torch.zeros(5), "v": torch.zeros(5)}), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
    assert safetensors.torch.load_file(tmp_path / "x.safetensors")["w"].tolist() == [1, 1, 1]


def test_tells_its_progress(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    source = Memory({"a": torch.zeros(3), "b": torch.zeros(5)})
    write_folder(
        source,
        tmp_path,
        dtype=torch.float16,
        max_shard_bytes=8,
        progress=lambda *numbers: told.append(numbers),
    )
    assert told == [(6, 16), (16, 16)]


# ---- several files


def gpt2(**changes: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=67, n_positions=16, n_embd=32, n_layer=2, n_head=2, **changes
    )
    return transformers.GPT2LMHeadModel(config)


def source_of(model: transformers.PreTrainedModel) -> Memory:
    tied = {"lm_head.weight": "transformer.wte.weight"} if model.config.tie_word_embeddings else {}
    state = model.state_dict()
    return Memory({name: state[name] for name in state if name not in tied}, tied)


@pytest.mark.parametrize("limit", [None, 20_000, 1])
@pytest.mark.parametrize("tie", [True, False])
def test_transformers_loads_it(tmp_path: Path, limit: int | None, tie: bool) -> None:
    model = gpt2(tie_word_embeddings=tie)
    model.config.save_pretrained(tmp_path)
    write_folder(source_of(model), tmp_path, max_shard_bytes=limit)
    found, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    expected = model.state_dict()
    assert found.state_dict().keys() == expected.keys()
    assert all(same(tensor, expected[name]) for name, tensor in found.state_dict().items())
    assert (found.lm_head.weight is found.transformer.wte.weight) == tie


def test_several_files_are_those_of_transformers(tmp_path: Path) -> None:
    model = gpt2()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    write_folder(source_of(model), tmp_path / "ours", max_shard_bytes=20_000)
    theirs = sorted(path.name for path in (tmp_path / "theirs").glob("*.safetensors"))
    assert len(theirs) > 3
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == [*theirs, INDEX]
    for name in theirs:
        ours = (tmp_path / "ours" / name).read_bytes()
        assert ours == (tmp_path / "theirs" / name).read_bytes(), name
    ours, other = (
        json.loads((tmp_path / which / INDEX).read_text()) for which in ("ours", "theirs")
    )
    assert ours == other


def test_replaces_the_weights_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    many = Memory({"a": torch.zeros(4), "b": torch.ones(4), "c": torch.ones(4)})
    write_folder(many, tmp_path, max_shard_bytes=16)
    write_folder(Memory({"a": torch.ones(2)}), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    write_folder(many, tmp_path, max_shard_bytes=32)
    files = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", INDEX, *files}
    with pytest.raises(ValueError, match="max_shard_bytes above 0, found 0"):
        write_folder(many, tmp_path, max_shard_bytes=0)


# ---- reading


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = of_every_kind()
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    found = read_all(SafetensorsFolder(tmp_path / "x.safetensors"))
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensor) for name, tensor in tensors.items())


def test_reads_any_run(tmp_path: Path) -> None:
    values = torch.arange(60.0).view(3, 4, 5)
    tensors = {"first": torch.ones(7, dtype=torch.int64), "x": values.bfloat16()}
    write_folder(Memory({**tensors, "y": torch.zeros(9)}), tmp_path, max_shard_bytes=100)
    folder = SafetensorsFolder(tmp_path)
    assert folder.kinds() == ["weights"] and folder.tied() == {}
    for start, stop in [(0, 60), (0, 0), (60, 60), (1, 2), (17, 43), (59, 60)]:
        expected = tensors["x"].reshape(-1)[start:stop]
        assert same(folder.read("weights", "x", start, stop), expected)
    for start, stop in [(-1, 2), (3, 2), (0, 61)]:
        with pytest.raises(ValueError, match=r"60 elements of 'x'"):
            folder.read("weights", "x", start, stop)
    with pytest.raises(KeyError, match="exp_avg"):
        folder.names("exp_avg")
    with pytest.raises(KeyError, match="'z'"):
        folder.read("weights", "z", 0, 1)


def forged(path: Path, header: object, data: bytes = bytes(8)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: object, end: object, shape: object = (2,), dtype: object = "F32") -> object:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, "'b' to begin at byte 8.*overlap"),
        ({"a": entry(8, 16)}, "'a' to begin at byte 0.*gap"),
        ({"a": entry(0, 8), "b": entry(8, 16)}, "for 'b', found .*truncated"),
        ({"a": entry(0, 4, [1])}, "more than the header names"),
        ({"a": entry(0, 8, [3])}, "expected 12 bytes for 'a'.*found 8"),
        ({"a": entry(0, 8, [-2])}, "'a'.*found"),
        ({"a": entry(0, 8, [2.0])}, "'a'.*found"),
        ({"a": entry(0, 8, "2")}, "'a'.*found"),
        ({"a": entry(0, 8, [2], "F4")}, "known dtype of 'a'.*'F4'"),
        ({"a": entry(0, 8, [2], ["F32"])}, "'a'.*found"),
        ({"a": entry(True, 8)}, "'a'.*found"),
        ({"a": {"dtype": "F32"}}, "'a'.*found"),
        ({"a": 3}, "'a'.*found 3"),
        ([1], "JSON object"),
        (b'{"a": 1, "a": 2}', "occurs twice"),
        (b"\xff{", "expected JSON"),
        (b"[" * 100_000, "expected JSON"),
    ],
)
def test_refuses_an_unsound_header(tmp_path: Path, header: object, message: str) -> None:
    path = forged(tmp_path / "x.safetensors", header)
    with pytest.raises(ValueError, match=message) as caught:
        SafetensorsFolder(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("size", [0, 7, 8, 20])
def test_refuses_a_file_that_ends_early(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.safetensors"
    write_folder(Memory({"w": torch.ones(100)}), tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    with pytest.raises(ValueError, match=r"truncated.*") as caught:
        SafetensorsFolder(tmp_path)
    assert str(path) in str(caught.value)
    path.write_bytes(whole)
    folder = SafetensorsFolder(tmp_path)
    path.write_bytes(whole[:-4])
    with pytest.raises(ValueError, match=r"400 bytes of 'w'.*has become shorter"):
        folder.read("weights", "w", 0, 100)


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ({"a": "../x.safetensors"}, ValueError, "files beside"),
        ({"a": "/etc/passwd"}, ValueError, "files beside"),
        ({"a": "no.safetensors"}, FileNotFoundError, "no.safetensors"),
        ({"b": "model-00001-of-00002.safetensors"}, ValueError, "'b' in 'model-00001"),
        (["a"], ValueError, "weight_map"),
        ({"a": 3}, ValueError, "weight_map"),
    ],
)
def test_refuses_an_index_that_doesnt_fit(
    tmp_path: Path, where: object, error: type[Exception], message: str
) -> None:
    write_folder(
        Memory({"a": torch.ones(2), "c": torch.ones(2)}), tmp_path / "m", max_shard_bytes=8
    )
    (tmp_path / "m" / INDEX).write_text(json.dumps({"weight_map": where}))
    with pytest.raises(error, match=message):
        SafetensorsFolder(tmp_path / "m")


def test_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors or .* found neither"):
        SafetensorsFolder(tmp_path)
