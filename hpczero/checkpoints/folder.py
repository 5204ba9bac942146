"""The folder of checkpoints: never half of one, and never two jobs at once.

[Note: the order of writing]
A checkpoint is written into a folder with a temporary name; each rank flushes its own file, rank 0
adds index and manifest, flushes the folder, renames it, flushes its parent, and moves `latest`
last, by rename too. So `latest` always names a whole checkpoint, whenever whoever is killed. Saving
under a tag that exists moves the older folder aside first; `find` falls back to it while the newer
one isn't there yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from pathlib import Path

from hpczero.checkpoints import manifest as manifests
from hpczero.checkpoints.files import sync
from hpczero.errors import CheckpointError
from hpczero.infinity.hdf5 import naming

LATEST = "latest"
SAVING = ".saving-"
_REPLACED = ".replaced-"
_LOCK = ".lock"

log = logging.getLogger("hpczero")


class Folder:
    """Write one checkpoint into a folder of checkpoints; for rank 0.

    Raises:
        CheckpointError: another job is saving into the folder, or the tag's is no checkpoint.
        OSError: the folder can't be written.
    """

    def __init__(self, root: Path, tag: str) -> None:
        check_tag(tag)
        self.root = root
        self.final = root / tag
        self.partial = root / f"{SAVING}{tag}"
        root.mkdir(parents=True, exist_ok=True)
        self._lock: int | None = _lock(root)
        try:
            # Whoever holds the lock is alone: what others left half done is of no use to anybody.
            for rubbish in root.glob(f"{SAVING}*"):
                _remove(rubbish)
            self._recover()
            if self.final.exists() and not (self.final / manifests.FILE).is_file():
                raise CheckpointError(
                    f"{self.final}: expected a checkpoint of hpczero to replace, or nothing, found "
                    "other files, which stay: give another tag or folder"
                )
            self.partial.mkdir()
        except BaseException:
            self.close()
            raise

    def commit(self, keep_last: int | None) -> None:
        """Give the whole checkpoint its name, let `latest` name it, and remove old ones."""
        sync(self.partial)
        latest = self.root / f"{SAVING}{LATEST}"
        write(latest, f"{self.final.name}\n")  # all that needs room comes before what can be seen
        aside = self.root / f"{_REPLACED}{self.final.name}"
        replaces = self.final.exists()
        if replaces:
            self.final.rename(aside)
        try:
            self.partial.rename(self.final)
            sync(self.root)
            latest.replace(self.root / LATEST)
        except BaseException:
            if self.final.exists():
                self.final.rename(self.partial)
            if replaces:
                aside.rename(self.final)
            raise
        sync(self.root)
        _remove(aside)
        if keep_last is not None:
            try:
                self._prune(keep_last)
            except OSError as error:
                log.warning(f"an old checkpoint was not removed: {describe(error)}")

    def close(self, failed: bool = False) -> None:
        """Let others save; remove what a failure left."""
        if self._lock is None:
            return
        if failed:
            _remove(self.partial)
            _remove(self.root / f"{SAVING}{LATEST}")
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a forked worker of a loader may have it open
        os.close(self._lock)
        self._lock = None

    def _recover(self) -> None:
        """Finish what a killed job began when it replaced a checkpoint."""
        for aside in self.root.glob(f"{_REPLACED}*"):
            final = self.root / aside.name.removeprefix(_REPLACED)
            if final.exists():
                _remove(aside)
            else:
                aside.rename(final)

    def _prune(self, keep_last: int) -> None:
        found = []
        for path in (self.root / tag for tag in tags(self.root)):
            if path != self.final:
                with contextlib.suppress(CheckpointError):
                    found.append((manifests.load(path).counters["global_steps"], path))
        for _, path in sorted(found)[: max(0, len(found) - (keep_last - 1))]:
            gone = self.root / f"{SAVING}{path.name}"
            path.rename(gone)
            _remove(gone)


def find(root: Path, tag: str | None) -> Path | None:
    """Return the folder of a checkpoint: of the tag, or of what `latest` names (None: nothing).

    Raises:
        CheckpointError: there is no such checkpoint, though there should be.
    """
    if tag is None:
        try:
            tag = (root / LATEST).read_text(errors="replace").strip()
            check_tag(tag)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise CheckpointError(f"{root / LATEST}: {error}") from None
        named = f"{root / LATEST} names it"
    else:
        named = "asked for"
        check_tag(tag)
    for path in (root / tag, root / f"{_REPLACED}{tag}"):
        if (path / manifests.FILE).is_file():
            return path
    there = ", ".join(tags(root)) or "none"
    raise CheckpointError(f"expected checkpoint {tag!r} in {root} ({named}), found: {there}")


def tags(root: Path) -> list[str]:
    """Return the tags of the whole checkpoints in a folder, sorted."""
    if not root.is_dir():
        return []
    return sorted(
        path.name
        for path in root.iterdir()
        if not path.name.startswith((SAVING, _REPLACED)) and (path / manifests.FILE).is_file()
    )


def check_tag(tag: str) -> None:
    """Refuse a tag that is no plain folder name.

    Raises:
        ValueError: it is empty, hidden, or leads to another folder.
    """
    if not tag or tag.startswith(".") or "/" in tag or "\0" in tag or tag == LATEST:
        raise ValueError(
            f"expected a tag that is a plain folder name, found {tag!r}: as in 'global_step100'"
        )


def write(path: Path, text: str) -> None:
    """Write a small file and flush it to the disk."""
    with naming(path), path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    """Remove a file or folder that nobody needs; the next save tries what is still in use."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()


def _lock(root: Path) -> int:
    """Return the open lock of a folder; the system gives it up however the process ends."""
    number = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(number)
        raise CheckpointError(
            f"{root}: another job is saving a checkpoint here right now: give each job a folder of "
            "its own"
        ) from None
    except OSError:
        pass  # a file system without locks (some Lustre and NFS mounts)
    return number


def describe(error: BaseException) -> str:
    """Return what went wrong, with the path where the system names one."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror} (errno {error.errno})"
    return str(error) or type(error).__name__
