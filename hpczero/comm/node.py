"""Memory that every rank of a node sees.

[Note: one file for a node]
The first rank of a node makes an anonymous file in memory and passes it to the others through a
socket, once. It is as good as endless and takes room only where somebody has written. Each rank
takes its memory from an interval of its own, and maps what others have in theirs when it looks
there. Nothing has a name in /dev/shm, whose size therefore doesn't matter, and nothing is left
behind, however a rank ends: the system drops the file with the last process that has it open.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import torch
from mpi4py import MPI

NAME = "hpczero"
"""What the mappings are called in /proc/PID/smaps: `/memfd:hpczero (deleted)`."""

NOWHERE = -1
"""The place of a tensor that others can't see."""

_REGION = 1 << 44
"""Bytes of each rank's interval of the file; never used twice, so far more than a node has."""

_MAPPED = 16384
"""Mappings of others' memory that are kept."""

_SOCKET_SECONDS = 10.0
"""How long ranks wait for one another to pass the file; all of them are there."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value
_FIXED = 0x10
_REMOVE = 9
_POPULATE_WRITE = 23


class NodeMemory:
    """Give tensors that all ranks of a node can reach.

    Costs what is written to it; a page is there once, however many ranks map it.
    """

    def __init__(self, file: int, rank: int, size: int) -> None:
        self.file = file
        weakref.finalize(self, os.close, file).atexit = False  # couriers may be at work until then
        self._next = rank * _REGION
        self._next_shared = self._first_shared = size * _REGION
        self._ranges: dict[int, tuple[int, int]] = {}
        """By address where it begins: where a mapping of ours ends, and its place in the file."""
        self._looks: OrderedDict[tuple[int, int], torch.Tensor] = OrderedDict()
        self.freed: set[tuple[int, int]] = set()
        """Places and bytes of shared tensors that this rank has no more."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return bytes of this rank's own; others can look at them. Communicates nothing."""
        place, self._next = self._next, self._next + _pages(nbytes)
        return self._tensor(place, nbytes, shared=False)

    def shared(self, nbytes: int) -> torch.Tensor:
        """Return bytes that are the same on all ranks of the node, zero at first.

        All ranks of the node call, in the same order. Communicates nothing.
        """
        place, self._next_shared = self._next_shared, self._next_shared + _pages(nbytes)
        return self._tensor(place, nbytes, shared=True)

    def place(self, tensor: torch.Tensor) -> int:
        """Return where others find a tensor, NOWHERE if it isn't in this memory."""
        address = tensor.data_ptr()
        for start, (stop, place) in self._ranges.copy().items():
            if start <= address < stop:
                return place + address - start
        return NOWHERE

    def is_shared(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is the same on all ranks of the node."""
        return self.place(tensor) >= self._first_shared

    def look(self, place: int, nbytes: int) -> torch.Tensor:
        """Return bytes of any rank, to be read while that rank leaves them alone."""
        begin = place // mmap.PAGESIZE * mmap.PAGESIZE
        length = _pages(place + nbytes - begin)
        window = self._looks.pop((begin, length), None)
        if window is None:
            address = _map(self.file, begin, length, mmap.MAP_SHARED)
            window = _tensor(address, length, _libc.munmap, address, length)
            while len(self._looks) >= _MAPPED:
                self._looks.popitem(last=False)
        self._looks[begin, length] = window
        return window[place - begin : place - begin + nbytes]

    def drop(self, tensor: torch.Tensor) -> None:
        """Give the pages of a whole tensor back; it is zero from now on. Nobody looks at it now."""
        self._advise(tensor, _REMOVE)

    def fill(self, tensor: torch.Tensor) -> None:
        """Take all pages of a whole tensor at once, cheaper than one by one; Linux 5.14 can.

        Maps them anew: MPI may have registered pages that another rank has dropped since, which
        only its hook in this process's mmap tells it.
        """
        self.join(tensor)
        self._advise(tensor, _POPULATE_WRITE)

    def part(self, tensor: torch.Tensor) -> None:
        """Let this rank's changes of a shared tensor be its own, in place, until `join`.

        Costs the pages that are written.
        """
        self._remap(tensor, mmap.MAP_PRIVATE)

    def join(self, tensor: torch.Tensor) -> None:
        """Forget what was changed since `part`, and see the shared bytes again."""
        self._remap(tensor, mmap.MAP_SHARED)

    def reclaim(self, freed: Sequence[Iterable[tuple[int, int]]]) -> None:
        """Give the pages back of what every rank of the node has freed; told by all ranks."""
        gone = set.intersection(*map(set, freed))
        for place, nbytes in gone & self.freed:
            address = _map(self.file, place, nbytes, mmap.MAP_SHARED)
            _libc.madvise(address, nbytes, _REMOVE)
            _libc.munmap(address, nbytes)
        self.freed -= gone

    def _tensor(self, place: int, nbytes: int, shared: bool) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        length = _pages(nbytes)
        address = _map(self.file, place, length, mmap.MAP_SHARED)
        self._ranges[address] = (address + length, place)
        return _tensor(address, nbytes, self._free, os.getpid(), address, length, shared)

    def _free(self, owner: int, address: int, length: int, shared: bool) -> None:
        if os.getpid() != owner:
            return  # a forked worker of a loader: the memory is its parent's
        _, place = self._ranges.pop(address)
        if shared:
            self.freed.add((place, length))
        else:
            _libc.madvise(address, length, _REMOVE)
        _libc.munmap(address, length)

    def _advise(self, tensor: torch.Tensor, advice: int) -> None:
        if tensor.numel():
            address = tensor.data_ptr()
            _libc.madvise(address, self._ranges[address][0] - address, advice)

    def _remap(self, tensor: torch.Tensor, kind: int) -> None:
        if tensor.numel():
            address = tensor.data_ptr()
            stop, place = self._ranges[address]
            _map(self.file, place, stop - address, kind | _FIXED, address)


def open_node_memory(node: MPI.Intracomm) -> tuple[NodeMemory | None, str]:
    """Make the memory of a node; all its ranks call, and all get one, or none and the reason."""
    file, reason = NOWHERE, ""
    try:
        file = _make(node.size) if node.rank == 0 else NOWHERE
    except (OSError, AttributeError) as error:  # the latter where there is no Linux
        reason = f"no file in memory: {error}"
    passed = _pass(node, file, reason)
    reasons = [f"rank {rank} of the node: {text}" for rank, text in enumerate(passed[1]) if text]
    if reasons:
        if passed[0] != NOWHERE:
            os.close(passed[0])
        return None, "; ".join(reasons)
    return NodeMemory(passed[0], node.rank, node.size), ""


def _make(size: int) -> int:
    file = os.memfd_create(NAME, os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, (size + 1) * _REGION)
    except OSError:
        os.close(file)
        raise
    return file


def _pass(node: MPI.Intracomm, file: int, reason: str) -> tuple[int, list[str]]:
    """Give the first rank's file to all; return it and what went wrong on each rank.

    A socket passes it where /proc doesn't: containers may have a user namespace for each rank.
    """
    listener = None
    if node.rank == 0 and not reason and node.size > 1:
        try:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"\0{NAME}-{uuid.uuid4()}")
            listener.listen(node.size)
        except OSError as error:
            listener, reason = None, f"no socket to pass the file: {error}"
    address = node.bcast(listener and listener.getsockname())
    channel = None
    if address and node.rank > 0:
        channel = socket.socket(socket.AF_UNIX)
        channel.settimeout(_SOCKET_SECONDS)
        try:
            channel.connect(address)
        except OSError as error:
            reason = f"the first rank can't be reached: {error}"
    # Whoever has connected waits in the listener's queue, so nobody waits for one who hasn't.
    waiting = node.gather(channel is not None and not reason)
    try:
        if listener is not None and waiting is not None:
            _serve(listener, file, sum(waiting))
        elif channel is not None and not reason:
            file = _fetch(channel)
    except OSError as error:
        reason = f"the file of the first rank was not passed: {error}"
    for end in (listener, channel):
        if end is not None:
            end.close()
    return file, node.allgather(reason)


def _serve(listener: socket.socket, file: int, waiting: int) -> None:
    listener.settimeout(_SOCKET_SECONDS)
    while waiting:
        connection, _ = listener.accept()
        with connection:
            if _user(connection) == os.getuid():  # anybody may see the address and connect
                socket.send_fds(connection, [b"."], [file])
                waiting -= 1


def _fetch(channel: socket.socket) -> int:
    if _user(channel) != os.getuid():
        raise PermissionError("it belongs to another user")
    _, files, _, _ = socket.recv_fds(channel, 1, 1)
    if not files:
        raise ConnectionError("it was not sent")
    os.set_inheritable(files[0], False)  # a program that outlives the job must not keep the memory
    return files[0]


def _user(connection: socket.socket) -> int:
    """Return who is at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[1])


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _tensor(address: int, nbytes: int, free: Callable[..., object], *args: object) -> torch.Tensor:
    """Return a tensor over mapped memory; `free` is called when nobody has it or a view of it."""
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(memory, free, *args).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def _map(file: int, place: int, nbytes: int, kind: int, address: int | None = None) -> int:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    found = _libc.mmap(address, nbytes, protection, kind, file, place)
    if found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping {nbytes} bytes of node memory: {os.strerror(number)}")
    return int(found)
