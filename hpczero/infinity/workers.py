"""Threads that do what is submitted, first in first out, and never keep a program from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple


class _Work(NamedTuple):
    do: Callable[[], None]
    future: Future[None]


_Queue = queue.SimpleQueue[_Work | None]


class Workers:
    """Run work in `count` threads.

    Not an executor of the standard library, which takes no more work as soon as the main thread has
    ended, and so breaks what is under way. Threads end with `close`, or with the process.
    """

    def __init__(self, count: int, name: str) -> None:
        self._queue: _Queue = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_run, args=(self._queue,), name=name, daemon=True)
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, do: Callable[[], None]) -> Future[None]:
        """Let a thread do something when all that was submitted before has been begun."""
        future: Future[None] = Future()
        self._queue.put(_Work(do, future))
        return future

    def end(self) -> None:
        """End the threads when all is done."""
        for _ in self._threads:
            self._queue.put(None)

    def close(self) -> None:
        """End the threads when all is done, and wait for that, unless one of them calls."""
        self.end()
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join()


def _run(waiting: _Queue) -> None:
    while (work := waiting.get()) is not None:
        _do(work)
        del work  # while this waits, nobody's tensors stay alive


def _do(work: _Work) -> None:
    try:
        work.do()
    except BaseException as error:
        work.future.set_exception(error)
    else:
        work.future.set_result(None)
