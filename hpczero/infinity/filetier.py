"""The tier that is a file: one HDF5 file per rank, whose bytes move beside HDF5.

[Note: HDF5 without HDF5's roads]
h5py makes a contiguous dataset for each array, so that any HDF5 tool can read the file; then the
file is closed and bytes move by preadv and pwritev at the dataset's place, from several threads.
(HDF5 itself holds one lock for all threads and copies.) Each dataset takes whole blocks, its last
elements are padding: HDF5 puts its own structures into gaps, which writes of whole blocks would
destroy. The attribute `numel` says how many elements count.

[Note: a file without a name]
The file loses its name as soon as it is open, unless it is to be kept. So nothing is left however
the job ends, and HDF5 reaches it through Python's file object.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
import uuid
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
import torch

from hpczero.infinity.hdf5 import name_of, naming, reserve
from hpczero.infinity.tier import CUT, Array, Moved
from hpczero.infinity.workers import Workers
from hpczero.plan import TierName
from hpczero.sizing import BACKLOG

BLOCK = max(4096, mmap.PAGESIZE)
"""Bytes that a dataset begins and ends at multiples of: of pages, and of direct I/O."""

REQUEST = 1 << 20
"""Bytes of one call of the system, at most: larger ones were a fifth slower to write."""

THREADS = 3
"""Calls of the system at a time; more gain nothing on the disks that were tried."""


log = logging.getLogger("hpczero")

_PLACES: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_LEAKED: list[mmap.mmap] = []
# A forked child has other things at these addresses, which it must not unmap.
os.register_at_fork(after_in_child=lambda: _LEAKED.extend(_PLACES))

_NORESERVE = 0x4000  # Linux's; the module mmap has it since Python 3.13


class FileTier:
    """Keep arrays in an HDF5 file of this rank in `folder`.

    Costs address space as large as the arrays, a few threads, and memory only for parts that are
    read or not yet written.

    Args:
        folder: made if missing; any file system.
        rank: part of the file's name.
        account: is told bytes of memory that are taken or, negative, given back; by any thread.
        keep: whether the file stays.
        checksums: whether what is read is compared with what was written. Costs the time of a CRC,
            about a second of a thread per GB, and 4 bytes in memory per CUT elements.

    Raises:
        OSError: the folder can't be written; names it.
    """

    name: TierName = "file"

    def __init__(
        self,
        folder: Path,
        rank: int,
        account: Callable[[int], None] = lambda nbytes: None,
        *,
        keep: bool = False,
        checksums: bool = False,
    ) -> None:
        self.account = account
        self.checksums = checksums
        self.path = folder / f"hpczero-{uuid.uuid4().hex[:12]}-rank{rank:05d}.h5"
        with naming(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._number = os.open(self.path, flags, 0o600)
            self._direct = _open_direct(self.path)
            """The same file without the system's cache; None where its file system can't."""
            if not keep:
                self.path.unlink()
            with self._open_hdf5("w"):
                pass
        self._workers = Workers(THREADS, "hpczero-file")
        self._lock = threading.Lock()
        self._moved = Moved(0, 0)
        self._settling: deque[tuple[int, Future[None]]] = deque()
        files = [number for number in (self._number, self._direct) if number is not None]
        self._finalizer = weakref.finalize(self, _close, self._workers, files, os.getpid())
        self._finalizer.atexit = False  # an update may go on; the system closes what is open

    @contextlib.contextmanager
    def _open_hdf5(self, mode: str) -> Iterator[h5py.File]:
        # The alignment isn't stored: it must be given each time.
        room = {"alignment_threshold": 1, "alignment_interval": BLOCK}
        with (
            os.fdopen(os.dup(self._number), "r+b", buffering=0) as raw,
            h5py.File(raw, mode, libver=("earliest", "v110"), **room) as file,
        ):
            yield file

    @property
    def free(self) -> tuple[int, int]:
        """Return the number of the file system, and how many bytes may still be written there."""
        return os.fstat(self._number).st_dev, _free(self._number)

    @property
    def direct(self) -> bool:
        """Tell whether bytes go to the disk without the system's cache."""
        return self._direct is not None

    def zeros(self, name: str, numel: int, dtype: torch.dtype) -> Array:
        """Return a new array of zeros, which has its room on the disk.

        Raises:
            OSError: there is no room; says how much is needed and how much is free.
        """
        if numel == 0:
            return Array(torch.empty(0, dtype=dtype))
        nbytes = -(-numel * dtype.itemsize // BLOCK) * BLOCK
        with naming(self.path):
            free = _free(self._number)
            if free < nbytes:
                raise OSError(
                    errno.ENOSPC, f"{name} needs {nbytes} bytes, free are {free}", str(self.path)
                )
            with self._open_hdf5("r+") as file:
                shape = (nbytes // dtype.itemsize,)
                offset = reserve(file, name, name_of(dtype), shape)
                file[name].attrs["numel"] = numel
            assert offset % BLOCK == 0, f"{name} begins at {offset}"
            os.posix_fallocate(self._number, offset, nbytes)
            return FileArray(self, name, numel, dtype, offset, nbytes)

    @property
    def moved(self) -> Moved:
        """Return the bytes that were moved since the file was made."""
        return self._moved

    def flush(self) -> None:
        """Wait until all is on the disk, and nothing of it in the system's cache."""
        with naming(self.path):
            os.fdatasync(self._number)
            os.posix_fadvise(self._number, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Wait for what is under way, and close the file."""
        self._finalizer()

    def owe(self, nbytes: int, written: Future[None]) -> None:
        """Take note of what was submitted to be written."""
        with self._lock:
            self._settling.append((nbytes, written))

    def wait_for_room(self) -> None:
        """Wait until no more than BACKLOG bytes wait to be written.

        Only in a thread that doesn't fill arrays itself meanwhile.
        """
        while True:
            with self._lock:
                while self._settling and self._settling[0][1].done():
                    self._settling.popleft()
                if sum(nbytes for nbytes, _ in self._settling) <= BACKLOG:
                    return
                _, oldest = self._settling[0]
            oldest.result()

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Let one of the threads do something, first in first out."""
        return self._workers.submit(work)

    def move(self, memory: memoryview, offset: int, name: str, *, out: bool) -> None:
        """Read (or write, if `out`) whole blocks, however many calls that takes.

        Raises:
            OSError: the disk fails or is full, or the file has become shorter; names the file.
        """
        call, total = os.pwritev if out else os.preadv, len(memory)
        number = self._number if self._direct is None else self._direct
        what = f"{'writing' if out else 'reading'} {name!r}"
        with naming(self.path, what):
            while memory:
                try:
                    count = call(number, [memory[:REQUEST]], offset)
                except OSError as error:
                    if error.errno != errno.EINVAL or number == self._number:
                        raise
                    self._direct, number = None, self._number  # it took the flag, but not the work
                    log.info(f"{self.path}: no direct I/O, the system's cache is used")
                    continue
                if count == 0:
                    text = f"{what}: the file ends at byte {offset}, {len(memory)} bytes too early"
                    raise OSError(errno.EIO, text, str(self.path))
                if count % BLOCK:
                    number = self._number  # direct I/O can't go on within a block
                memory, offset = memory[count:], offset + count
        with self._lock:
            moved = self._moved
            self._moved = Moved(moved.read + total * (not out), moved.written + total * out)


class FileArray(Array):
    """Hold an array of a FileTier; made by it."""

    resident = False

    def __init__(
        self, tier: FileTier, name: str, numel: int, dtype: torch.dtype, offset: int, nbytes: int
    ) -> None:
        self._tier, self._name, self._offset = tier, name, offset
        # Pages are taken when they are touched. Not to be reserved: only a little of it is ever
        # here. Larger ones make direct I/O twice as fast.
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._place = mmap.mmap(-1, nbytes, flags=kind)
        # A forked child, a loader's worker say, must neither keep pages nor share those of I/O.
        self._place.madvise(mmap.MADV_DONTFORK)
        _PLACES.add(self._place)
        with contextlib.suppress(OSError):
            self._place.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(self._place)
        self._item = dtype.itemsize
        self._writing: list[tuple[int, int, Future[None]]] = []
        """Bytes that are on their way to the file; who reads them waits."""
        self._lock = threading.Lock()  # an update goes on in another thread than a forward
        self._sums = _sums_of_zeros(nbytes, CUT * self._item) if tier.checksums else None
        """Of each CUT elements in the file."""
        super().__init__(torch.frombuffer(self._place, dtype=dtype, count=numel))

    def take(self, start: int = 0, stop: int | None = None) -> None:
        """Account the memory of a part that will be filled."""
        lo, hi = self._bytes(start, stop)
        self._tier.account(hi - lo)

    def read(self, start: int = 0, stop: int | None = None) -> Future[None]:
        """Bring a part from the file."""
        self.take(start, stop)
        lo, hi = self._bytes(start, stop)
        before = self._under_way(lo, hi)

        def work() -> None:
            for writing in before:
                writing.result()  # it was submitted before this, so a thread is at it
            self._move(lo, hi, out=False)

        return self._tier.submit(work)

    def write(self, start: int = 0, stop: int | None = None) -> Future[None]:
        """Bring a part to the file, and give its memory back."""
        lo, hi = self._bytes(start, stop)
        before = self._under_way(lo, hi)

        def work() -> None:
            for writing in before:
                writing.result()
            self._move(lo, hi, out=True)
            self._give_back(lo, hi)

        future = self._tier.submit(work)
        self._remember(lo, hi, future)
        return future

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Give the memory of a part back."""
        self._give_back(*self._bytes(start, stop))

    def values(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return a copy of any elements; costs whole pages for a while, see [Note: parts]."""
        numel = self.tensor.numel()
        stop = numel if stop is None else stop
        first, last = start // CUT * CUT, min(-(-stop // CUT) * CUT, numel)
        self.read(first, last).result()
        copy = self.tensor[start:stop].clone()
        self.drop(first, last)
        return copy

    def settle(self, filled: Future[None], look: Callable[[], None]) -> Future[None]:
        """Write everything as soon as it has been filled, and `look` has looked at it."""
        settled: Future[None] = Future()
        written: Future[None] = Future()
        lo, hi = self._bytes(0, None)
        self._remember(lo, hi, written)

        def work() -> None:
            try:
                look()
                settled.set_result(None)
                self._move(lo, hi, out=True)
                self._give_back(lo, hi)
            except BaseException as error:
                if not settled.done():
                    settled.set_exception(error)
                written.set_exception(error)
            else:
                written.set_result(None)

        def begin(filled: Future[None]) -> None:
            try:
                filled.result()
                self._tier.submit(work)
                self._tier.owe(hi - lo, written)
            except BaseException as error:  # nobody else would hear of it
                settled.set_exception(error)
                written.set_exception(error)

        filled.add_done_callback(begin)
        return settled

    def filling(self, adds: bool) -> contextlib.AbstractContextManager[object]:
        """Wait for what is added to, or was here before and is not yet written, and for room."""
        if adds:
            return self._filling([self.read()])
        return self._filling(self._under_way(0, len(self._memory)), takes=True)

    @contextlib.contextmanager
    def _filling(self, before: Sequence[Future[None]], takes: bool = False) -> Iterator[None]:
        self._tier.wait_for_room()
        for future in before:
            future.result()
        if takes:
            self.take()
        yield

    def _bytes(self, start: int, stop: int | None) -> tuple[int, int]:
        numel = self.tensor.numel()
        stop = numel if stop is None else stop
        ends = stop == numel
        assert start % CUT == 0 and (ends or stop % CUT == 0), f"{self._name}: {start}, {stop}"
        return start * self._item, len(self._memory) if ends else stop * self._item

    def _remember(self, lo: int, hi: int, writing: Future[None]) -> None:
        """Let who reads bytes wait until they are written."""
        with self._lock:
            self._writing = [entry for entry in self._writing if not _succeeded(entry[2])]
            self._writing.append((lo, hi, writing))

    def _under_way(self, lo: int, hi: int) -> list[Future[None]]:
        with self._lock:
            return [future for a, b, future in self._writing if a < hi and lo < b]

    def _move(self, lo: int, hi: int, *, out: bool) -> None:
        memory, each = self._memory[lo:hi], CUT * self._item
        known = self._sums if self._sums is None else self._sums[lo // each : -(-hi // each)]
        if out and known is not None:
            known[:] = _sums(memory, each)
        self._tier.move(memory, self._offset + lo, self._name, out=out)
        if out or known is None:
            return
        wrong = np.flatnonzero(known != _sums(memory, each))
        if len(wrong):
            first = self._offset + lo + int(wrong[0]) * each
            text = (
                f"reading {self._name!r}: the {each} bytes at {first} aren't those that were "
                f"written: the checksums of {len(wrong)} blocks of {len(known)} differ"
            )
            raise OSError(errno.EIO, text, str(self._tier.path))

    def _give_back(self, lo: int, hi: int) -> None:
        if lo < hi:
            self._place.madvise(mmap.MADV_DONTNEED, lo, hi - lo)
            self._tier.account(lo - hi)


def _sums(memory: memoryview, each: int) -> npt.NDArray[np.uint32]:
    """Return the CRC-32 of every `each` bytes."""
    starts = range(0, len(memory), each)
    return np.array([zlib.crc32(memory[at : at + each]) for at in starts], np.uint32)


def _sums_of_zeros(nbytes: int, each: int) -> npt.NDArray[np.uint32]:
    """Return what `_sums` does, without so many zeros."""
    sums = np.full(-(-nbytes // each), zlib.crc32(bytes(each)), np.uint32)
    if nbytes % each:
        sums[-1] = zlib.crc32(bytes(nbytes % each))
    return sums


def _succeeded(future: Future[None]) -> bool:
    return future.done() and future.exception() is None


def _open_direct(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except (OSError, AttributeError):
        return None


def _free(number: int) -> int:
    """Return the bytes that this user may still write to the file system of an open file."""
    found = os.fstatvfs(number)
    return found.f_bavail * found.f_frsize


def _close(workers: Workers, files: list[int], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child: the threads are its parent's
    workers.close()
    for number in files:
        os.close(number)
