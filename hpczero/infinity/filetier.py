"""The tier that is a file: one HDF5 file per rank, whose bytes move beside HDF5.

[Note: HDF5 without HDF5's roads]
h5py makes a contiguous dataset for each array, so that any HDF5 tool can read the file; then the
file is closed and bytes move by preadv and pwritev at the dataset's place, from several threads.
(HDF5 itself holds one lock for all threads and copies.) Each dataset takes whole blocks of 4096
bytes, its last elements are padding: HDF5 puts its own structures into gaps, which writes of whole
blocks would destroy. The attribute `numel` says how many elements count.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import h5py
import torch

from hpczero.infinity.hdf5 import name_of, naming, reserve
from hpczero.infinity.tier import CUT, Array, Moved
from hpczero.plan import TierName
from hpczero.sizing import BACKLOG

BLOCK = 4096
"""Bytes that a dataset begins and ends at multiples of: of pages, and of direct I/O."""

REQUEST = 1 << 23
"""Bytes of one call of the system, at most."""

THREADS = 3
"""Calls of the system at a time; more gain nothing on the disks that were tried."""


_NORESERVE = 0x4000  # Linux's; the module mmap has it since Python 3.13


class FileTier:
    """Keep arrays in an HDF5 file of this rank in `folder`.

    Costs address space as large as the arrays, a few threads, and memory only for parts that are
    read or not yet written. The file loses its name when `seal`ed, so that nothing is left however
    the job ends, unless it is to be kept.

    Args:
        folder: made if missing; any file system.
        rank: part of the file's name.
        account: is told bytes of memory that are taken or, negative, given back; by any thread.
        keep: whether the file stays.

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
    ) -> None:
        self.account = account
        self.path = folder / f"hpczero-{uuid.uuid4().hex[:12]}-rank{rank:05d}.h5"
        self._keep = keep
        with naming(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            room = {"alignment_threshold": 1, "alignment_interval": BLOCK}
            with h5py.File(self.path, "x", libver=("earliest", "v110"), **room):
                pass
            self._number = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        self._direct = _open_direct(self.path)
        """The same file without the system's cache; None where its file system can't."""
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="hpczero-file")
        self._lock = threading.Lock()
        self._moved = Moved(0, 0)
        self._settling: deque[tuple[int, Future[None]]] = deque()
        files = [number for number in (self._number, self._direct) if number is not None]
        remove = None if keep else self.path
        self._finalizer = weakref.finalize(self, _close, self._pool, files, remove)

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
            free = _free(self.path)
            if free < nbytes:
                raise OSError(
                    errno.ENOSPC, f"{name} needs {nbytes} bytes, free are {free}", str(self.path)
                )
            with h5py.File(self.path, "r+", libver=("earliest", "v110")) as file:
                shape = (nbytes // dtype.itemsize,)
                offset = reserve(file, name, name_of(dtype), shape)
                file[name].attrs["numel"] = numel
            os.posix_fallocate(self._number, offset, nbytes)
        return FileArray(self, name, numel, dtype, offset, nbytes)

    def seal(self) -> None:
        """Take the file's name away, unless it is to be kept: there will be no more arrays."""
        if not self._keep:
            self.path.unlink(missing_ok=True)

    @property
    def moved(self) -> Moved:
        """Return the bytes that were moved since the file was made."""
        return self._moved

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
        return self._pool.submit(work)

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
        with contextlib.suppress(OSError):
            self._place.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(self._place)
        self._item = dtype.itemsize
        self._writing: list[tuple[int, int, Future[None]]] = []
        """Bytes that are on their way to the file; who reads them waits."""
        self._lock = threading.Lock()  # an update goes on in another thread than a forward
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
        with self._lock:
            self._writing = [entry for entry in self._writing if not _succeeded(entry[2])]
            self._writing.append((lo, hi, future))
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
        with self._lock:
            self._writing.append((lo, hi, written))

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
            error = filled.exception()
            if error is None:
                self._tier.submit(work)
                self._tier.owe(hi - lo, written)
            else:
                settled.set_exception(error)
                written.set_exception(error)

        filled.add_done_callback(begin)
        return settled

    def filling(self, adds: bool) -> contextlib.AbstractContextManager[object]:
        """Wait for what is added to, if so, and for room."""
        return self._filling(self.read() if adds else None)

    @contextlib.contextmanager
    def _filling(self, reading: Future[None] | None) -> Iterator[None]:
        self._tier.wait_for_room()
        if reading is None:
            self.take()
        else:
            reading.result()
        yield

    def _bytes(self, start: int, stop: int | None) -> tuple[int, int]:
        numel = self.tensor.numel()
        stop = numel if stop is None else stop
        lo = start * self._item
        hi = len(self._memory) if stop == numel else stop * self._item
        assert lo % BLOCK == 0 and hi % BLOCK == 0, f"{self._name}: cut at {start}, {stop}"
        return lo, hi

    def _under_way(self, lo: int, hi: int) -> list[Future[None]]:
        with self._lock:
            return [future for a, b, future in self._writing if a < hi and lo < b]

    def _move(self, lo: int, hi: int, *, out: bool) -> None:
        self._tier.move(self._memory[lo:hi], self._offset + lo, self._name, out=out)

    def _give_back(self, lo: int, hi: int) -> None:
        if lo < hi:
            self._place.madvise(mmap.MADV_DONTNEED, lo, hi - lo)
            self._tier.account(lo - hi)


def _succeeded(future: Future[None]) -> bool:
    return future.done() and future.exception() is None


def _open_direct(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except (OSError, AttributeError):
        return None


def _free(path: Path) -> int:
    """Return the bytes that this user may still write there."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _close(pool: ThreadPoolExecutor, files: list[int], remove: Path | None) -> None:
    pool.shutdown()
    for number in files:
        os.close(number)
    if remove is not None:
        remove.unlink(missing_ok=True)
