"""Whatever fails, all ranks raise one error, nothing hangs, and older checkpoints stay."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import TinyLM, lm_loss
from mpi4py import MPI

import hpczero
from hpczero.checkpoints import folder as folders
from hpczero.checkpoints import manifest as manifests
from hpczero.checkpoints import rankfile
from hpczero.checkpoints.folder import Folder
from hpczero.checkpoints.reader import Checkpoint
from hpczero.errors import CheckpointError

pytestmark = pytest.mark.mpi

WORLD = MPI.COMM_WORLD
SIZE, RANK = WORLD.size, WORLD.rank
SETTINGS = {
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all ranks see."""
    mine = str(tmp_path_factory.mktemp("faults")) if RANK == 0 else None
    return Path(WORLD.bcast(mine))


def on_rank_0(work: Callable[[], Any]) -> None:
    """Do something between two moments at which all ranks meet."""
    WORLD.Barrier()
    if RANK == 0:
        work()
    WORLD.Barrier()


class Model(TinyLM):
    """With a scalar and a buffer, so that files hold every kind of dataset."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(blocks=2)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(tokens) * self.scale


def engine_of() -> hpczero.Engine:
    return hpczero.Engine(Model(), SETTINGS)


def train(engine: hpczero.Engine, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = lm_loss(engine, engine.global_steps * SIZE + RANK)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@functools.cache
def undisturbed() -> list[float]:
    return train(engine_of(), 6)


@contextlib.contextmanager
def one_error(match: str) -> Iterator[None]:
    """See that all ranks raise the same CheckpointError, of one line that names no addresses."""
    with pytest.raises(CheckpointError, match=match) as caught:
        yield
    text = str(caught.value)
    assert len({*WORLD.allgather(text)}) == 1
    assert "\n" not in text and "0x" not in text, text


def contents(root: Path) -> dict[str, bytes]:
    WORLD.Barrier()
    found = {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
    WORLD.Barrier()
    return found


def verify(path: Path) -> list[str]:
    with Checkpoint(path) as checkpoint:
        return [name for name, _ in checkpoint.verify()]


# What can't be written #


FAST_LIMITS = {(0, True), (5000, False), (33000, True)}


@contextlib.contextmanager
def file_limit(nbytes: int, rank: int) -> Iterator[None]:
    """Let no file of one rank grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == RANK:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# In HDF5's head, its structures, the data, the table; on one rank that is rank 0 with the rest.
@pytest.mark.parametrize(
    ("nbytes", "asynchronous"),
    [
        pytest.param(nbytes, late, marks=[] if (nbytes, late) in FAST_LIMITS else pytest.mark.slow)
        for nbytes in (0, 1000, 5000, 13000, 33000)
        for late in (False, True)
    ],
)
def test_a_file_that_cannot_grow(nbytes: int, asynchronous: bool, folder: Path) -> None:
    engine, expected = engine_of(), undisturbed()
    losses = train(engine, 1)
    engine.save_checkpoint(folder)
    before = contents(folder)
    losses += train(engine, 1)
    name = rf"rank_{SIZE - 1:05d}\.h5"
    message = (
        rf"'global_step2' was not saved; .*: rank {SIZE - 1} of {SIZE}: .*{name}: File too large"
    )
    with file_limit(nbytes, SIZE - 1), one_error(message):
        engine.save_checkpoint(folder, asynchronous=asynchronous)
        engine._checkpoints().wait()
    assert contents(folder) == before
    losses += train(engine, 1)
    engine.save_checkpoint(folder)
    WORLD.Barrier()
    verify(folder / "global_step3")
    again = engine_of()
    again.load_checkpoint(folder, "global_step1")
    assert train(again, 2) == expected[1:3]
    assert losses + train(engine, 3) == expected


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a disk for a few checkpoints that all ranks see; needs the right to."""
    mounted = None
    if RANK == 0:
        command = ["mount", "-t", "tmpfs", "-o", f"size={400 * SIZE}k", "hpczero-test", str(folder)]
        with contextlib.suppress(FileNotFoundError):
            mounted = subprocess.run(command, capture_output=True).returncode == 0
    if not WORLD.bcast(mounted):
        pytest.skip("needs the right to mount")
    yield folder
    on_rank_0(lambda: subprocess.run(["umount", str(folder)], check=True))


def test_a_full_disk(small_disk: Path) -> None:
    engine, expected = engine_of(), undisturbed()
    losses = train(engine, 1)
    engine.save_checkpoint(small_disk)
    losses += train(engine, 1)
    ballast = small_disk / "ballast"
    free = 0
    # From no room at all to almost enough, so that each of the files meets the full disk.
    for _ in range(200):
        WORLD.Barrier()

        def fill(free: int = free) -> None:
            ballast.unlink(missing_ok=True)
            room = shutil.disk_usage(small_disk).free
            with ballast.open("wb") as file:
                file.write(b"x" * max(0, room - free))

        on_rank_0(fill)
        before = contents(small_disk)
        try:
            with one_error("'global_step2' was not saved; .*: No space left on device"):
                engine.save_checkpoint(small_disk)
        except pytest.fail.Exception:
            break  # it had room enough
        assert contents(small_disk) == before
        free += 8192 * SIZE
    else:
        raise AssertionError("it never had room enough")
    assert free > 4 * 8192 * SIZE
    WORLD.Barrier()
    assert folders.find(small_disk, None) == small_disk / "global_step2"
    assert verify(small_disk / "global_step1") and verify(small_disk / "global_step2")
    assert losses + train(engine, 4) == expected


def test_a_read_only_folder(small_disk: Path) -> None:
    engine = engine_of()
    losses = train(engine, 1)
    engine.save_checkpoint(small_disk)
    before = contents(small_disk)
    options = ["mount", "-o"]
    on_rank_0(lambda: subprocess.run([*options, "remount,ro", str(small_disk)], check=True))
    losses += train(engine, 1)
    for asynchronous in (False, True):
        with one_error("'global_step2' was not saved; .*: rank 0 of .*: .*Read-only file system"):
            engine.save_checkpoint(small_disk, asynchronous=asynchronous)
            engine._checkpoints().wait()
    assert contents(small_disk) == before
    on_rank_0(lambda: subprocess.run([*options, "remount,rw", str(small_disk)], check=True))
    engine.save_checkpoint(small_disk)
    assert losses + train(engine, 4) == undisturbed()


def test_a_file_in_the_place_of_the_folder(folder: Path) -> None:
    engine = engine_of()
    losses = train(engine, 1)
    on_rank_0(lambda: (folder / "file").write_text("mine"))
    for path, message in [("file", "File exists"), ("file/below", "Not a directory")]:
        with one_error(f"'global_step1' was not saved; .*: rank 0 of .*/file.*: {message}"):
            engine.save_checkpoint(folder / path)
    assert contents(folder) == {"file": b"mine"}
    assert losses + train(engine, 5) == undisturbed()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_checkpoint_is_never_replaced(kind: str, folder: Path) -> None:
    engine = engine_of()
    engine.save_checkpoint(folder, "good")
    mine = folder / "global_step0"
    target = mine if kind == "file" else mine / "zero_pp_rank_0_optim_states.pt"
    target.parent.mkdir(exist_ok=True)
    on_rank_0(lambda: target.write_text("of another program"))
    before = contents(folder)
    with one_error("/global_step0: expected a checkpoint of hpczero to replace, or nothing"):
        engine.save_checkpoint(folder)
    assert contents(folder) == before
    assert engine.load_checkpoint(folder)[0] == folder / "good"


def test_a_failure_at_the_last_moment_brings_the_older_one_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of()
    train(engine, 1)
    engine.save_checkpoint(folder, "best")
    before = contents(folder)
    train(engine, 1)
    real, calls = Path.replace, [0]

    def replace(path: Path, target: Path) -> Path:
        calls[0] += 1
        if target.name == "latest":
            raise OSError(5, "Input/output error", str(target))
        return real(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace)
        with one_error("'best' was not saved; .*latest: Input/output error"):
            engine.save_checkpoint(folder, "best")
    assert calls == [1 if RANK == 0 else 0]
    assert contents(folder) == before
    engine.save_checkpoint(folder, "best")
    again = engine_of()
    again.load_checkpoint(folder)
    assert again.global_steps == 2


def test_old_checkpoints_that_stay_are_no_failure(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of()
    engine.save_checkpoint(folder, "a")
    train(engine, 1)
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == "a":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    engine.save_checkpoint(folder, "b", keep_last=1)
    WORLD.Barrier()
    assert folders.find(folder, None) == folder / "b"
    assert ("an old checkpoint was not removed: " in caplog.text) == (RANK == 0)


def test_a_fork_does_not_keep_the_lock(folder: Path) -> None:
    if RANK == 0:
        first = Folder(folder, "a")
        assert first._lock is not None
        inherited = os.dup(first._lock)  # as a loader's worker has it, forked while a thread saves
        first.close(failed=True)
        Folder(folder, "b").close(failed=True)
        os.close(inherited)


# Two jobs #


def test_two_jobs_in_one_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = engine_of(), hpczero.Engine(Model(), SETTINGS, WORLD.Dup())
    losses = train(first, 1)
    train(second, 2)
    begun, go_on = threading.Event(), threading.Event()
    real = rankfile.write

    def slow(*arguments: Any) -> Any:
        monkeypatch.undo()
        begun.set()
        assert go_on.wait(30)
        return real(*arguments)

    monkeypatch.setattr(rankfile, "write", slow)
    first.save_checkpoint(folder, asynchronous=True)
    assert begun.wait(30)
    for asynchronous in (False, True):
        with one_error("'global_step2' was not saved; .*: another job is saving a checkpoint here"):
            second.save_checkpoint(folder, asynchronous=asynchronous)
            second._checkpoints().wait()
    go_on.set()
    first._checkpoints().wait()
    WORLD.Barrier()
    assert folders.tags(folder) == ["global_step1"]
    verify(folder / "global_step1")
    second.save_checkpoint(folder)
    assert losses + train(first, 5) == undisturbed()


# What can't be read #


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << (at % 8)
    path.write_bytes(content)


def flip_dataset(name: str) -> Callable[[Path], None]:
    """Return what damages a dataset in the file of the first rank that has something in it."""

    def damage(path: Path) -> None:
        with Checkpoint(path) as checkpoint:
            for rank in range(SIZE):
                file = checkpoint.file(rank)
                entry = file.entries.get(name)
                if entry is not None and entry.nbytes:
                    flip(file.path, entry.offset + entry.nbytes // 2)
                    return
        raise AssertionError(f"no rank has {name}")

    return damage


def flip_structure(path: Path) -> None:
    name = path / f"rank_{SIZE - 1:05d}.h5"
    flip(name, name.read_bytes().index(b"OHDR" if b"OHDR" in name.read_bytes() else b"TREE"))


def flip_table(path: Path) -> None:
    seal = manifests.load(path).files[-1]
    flip(path / seal.name, seal.table_offset + seal.table_bytes // 2)


LAST = f"rank_{SIZE - 1:05d}.h5"
# What is done to a checkpoint's folder, the error, and whether loading needs what is damaged.
DAMAGE: dict[str, tuple[Callable[[Path], object], str, bool]] = {
    "missing": (lambda path: (path / LAST).unlink(), f"{LAST}: No such file", True),
    "truncated": (lambda path: os.truncate(path / LAST, 5000), f"{LAST}: .*: .* truncated", True),
    "emptied": (lambda path: os.truncate(path / LAST, 0), f"{LAST}: .* found 0: .*truncated", True),
    "longer": (lambda path: os.truncate(path / LAST, 10**6), f"{LAST}: .*changed", True),
    "weights": (flip_dataset("weights/root"), "'weights/root', block 0", True),
    "exp_avg": (flip_dataset("exp_avg/root"), "'exp_avg/root', block 0", True),
    "exp_avg_sq": (flip_dataset("exp_avg_sq/blocks.1"), "'exp_avg_sq/blocks.1', block 0", True),
    "buffers": (flip_dataset("buffers/calls"), "rank_00000.h5: dataset 'buffers/calls'", True),
    "random": (flip_dataset("random/torch"), "dataset 'random/torch', block 0", True),
    "scalars": (flip_dataset("scalars/weights/scale"), "dataset 'scalars/weights/scale'", False),
    "table": (flip_table, f"{LAST}: table of checksums: expected checksum", True),
    "structure": (flip_structure, f"{LAST}: HDF5 structures: expected checksum", True),
    "padding": (lambda path: flip(path / LAST, (path / LAST).stat().st_size - 1), LAST, True),
    "index": (lambda path: flip(path / "index.h5", 999), r"index\.h5: expected checksum", False),
    "no index": (lambda path: (path / "index.h5").unlink(), r"index\.h5: No such file", False),
    "manifest": (lambda path: flip(path / "manifest.json", 999), r"manifest\.json: .*", True),
    "no manifest": (
        lambda path: (path / "manifest.json").unlink(),
        r"expected checkpoint 'global_step2' in .*latest names it\), found: global_step1",
        True,
    ),
    "no checkpoint": (shutil.rmtree, "expected checkpoint 'global_step2' in .*names it", True),
    "latest": (lambda path: (path.parent / "latest").write_bytes(b"\xff"), "'\ufffd'", True),
    "no tag": (lambda path: (path.parent / "latest").write_text(""), "/latest: .* ''", True),
}


FAST_DAMAGE = {"missing", "truncated", "weights", "random", "table", "structure", "manifest"}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in FAST_DAMAGE else pytest.mark.slow) for k in DAMAGE]
)
def test_damage(kind: str, folder: Path) -> None:
    engine = engine_of()
    losses = train(engine, 1)
    old = engine.save_checkpoint(folder)
    losses += train(engine, 1)
    path = engine.save_checkpoint(folder)
    damage, message, loading = DAMAGE[kind]
    on_rank_0(lambda: damage(path))
    if loading:
        with one_error(message):
            engine.load_checkpoint(folder)
    if path.exists() and kind not in ("latest", "no tag"):
        with pytest.raises(CheckpointError, match=message if kind != "no manifest" else "No such"):
            verify(path)
    assert verify(old)
    assert engine.load_checkpoint(folder, old.name)[0] == old
    expected = undisturbed()
    engine.load_checkpoint(folder, old.name)  # with the random state that was saved
    assert losses[:1] + train(engine, 1) == expected[:2]
    engine.save_checkpoint(folder, "repaired")
    WORLD.Barrier()
    assert folders.find(folder, None) == folder / "repaired"
    assert train(engine, 4) == expected[2:]


def test_a_flipped_bit_anywhere(folder: Path) -> None:
    """Flip single bits over all files; each is found."""
    engine = engine_of()
    train(engine, 1)
    path = engine.save_checkpoint(folder)
    WORLD.Barrier()
    generator = torch.Generator().manual_seed(RANK)
    mine = folder / f"copy{RANK}"
    shutil.copytree(path, mine)
    for file in sorted(mine.iterdir()):
        whole = file.read_bytes()
        for bit in torch.randint(8 * len(whole), (30,), generator=generator).tolist():
            content = bytearray(whole)
            content[bit // 8] ^= 1 << bit % 8
            file.write_bytes(content)
            with pytest.raises(CheckpointError, match=rf"{file.name}"):
                verify(mine)
        file.write_bytes(whole)
    assert verify(mine)
    WORLD.Barrier()


def test_a_tag_that_does_not_exist(folder: Path) -> None:
    engine = engine_of()
    losses = train(engine, 1)
    engine.save_checkpoint(folder)
    for tag in ("global_step7", "../faults", "latest"):
        with one_error(
            "expected checkpoint 'global_step7' in .*found: global_step1|a plain folder"
        ):
            engine.load_checkpoint(folder, tag)
    assert losses + train(engine, 5) == undisturbed()


@pytest.mark.mpi(min_size=2)
def test_a_folder_that_not_all_ranks_see(folder: Path) -> None:
    engine = engine_of()
    train(engine, 1)
    engine.save_checkpoint(folder)
    mine = folder if RANK == 0 else folder / "of another node"
    with one_error(
        "expected the same checkpoint on all ranks, found 'global_step1' .*None on rank 1"
    ):
        engine.load_checkpoint(mine)
    with one_error(r"'global_step1' was not saved; .*: rank 1.*: .*No such file or directory"):
        engine.save_checkpoint(mine)
    engine.load_checkpoint(folder)
    train(engine, 1)


# In a thread #


@pytest.mark.parametrize("rank", {0, SIZE - 1})
def test_a_failed_save_is_heard_of_by_the_next_step(rank: int, folder: Path) -> None:
    """On all ranks in one step, which is complete: the run goes on as if nothing had been."""
    engine = engine_of()
    losses = train(engine, 1)
    engine.save_checkpoint(folder)
    before = contents(folder)
    with file_limit(5000, rank):
        engine.save_checkpoint(folder, "bad", asynchronous=True)
        while not engine._checkpoints().failed:
            time.sleep(0.01)
    loss = lm_loss(engine, SIZE + RANK)
    engine.backward(loss)
    with one_error(rf"'bad' was not saved; .*: rank {rank} of .*File too large"):
        engine.step()
    assert engine.global_steps == 2
    assert contents(folder) == before
    assert [*losses, loss.item(), *train(engine, 2)] == undisturbed()[:4]
    engine.save_checkpoint(folder, asynchronous=True)
    assert losses + train(engine, 0) == undisturbed()[:1]
    engine.load_checkpoint(folder)  # waits
    assert engine.global_steps == 4
