"""End the whole job when one rank fails.

[Note: a failing rank ends the job]
A rank that dies inside Python still reaches `MPI_Finalize`, which waits for ranks that wait for it
in a collective: the job hangs until its time is up. So every way out of a rank is watched, and a
failing one says where it was and calls `Abort`:

- an uncaught exception, in the main thread or another: `sys.excepthook`, `threading.excepthook`.
  Where a library took the hook away (rich's, say), `sys.last_value` still tells at exit.
- `sys.exit(3)`, `raise SystemExit(3)`: no hook of Python sees them, and a handler around the main
  program isn't ours to write. But the interpreter reads `SystemExit.code` after the exception has
  left the last frame, and only then is it read from no Python frame: so `code` becomes a property
  that notices. A SystemExit that is caught means nothing.
- SIGTERM: Python's own handler waits for a main thread that may sit in MPI, so a thread reads the
  wakeup file of signals.
- SIGSEGV: faulthandler shows the stack, and the launcher ends the rest, as for SIGKILL.
- a clean exit while others go on: the callbacks of `at_exit` say goodbye.

All of it is inert in a world of one rank, before MPI starts and after it ends. Forked children keep
Python's behaviour, but never reach the `MPI_Finalize` of their parent.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

FORWARD_SECONDS = 0.2  # lets the launcher forward the last lines before Abort kills it
MAIN = ("__main__", "runpy")  # modules of the outermost frame of a program
SIGTERM_SECONDS = 1.0  # Open MPI ends ranks by SIGTERM, then SIGKILL: those have nothing to say
REPORTER_SECONDS = 2.0  # what the other ranks give the reporter of a Disagreement

stderr = 2  # a test runner that captures file descriptor 2 puts a copy of the real one here
_facts: dict[str, object] = {}
_callbacks: list[Callable[[], None]] = []
_ending = threading.Lock()  # taken once, by the first failure
_owner = 0  # the process that installed the hooks
_status = 0  # what this process ends with, as far as the hooks saw
_released = False
_previous_hook = sys.excepthook
_previous_thread_hook = threading.excepthook
_code: Any = SystemExit.__dict__["code"]  # the original descriptor


def install() -> None:
    """Watch this process's ways out.

    Idempotent and local; called when hpczero is imported. Call it again once MPI has started:
    SIGTERM is taken over only then, from the main thread and where nobody else handles it.
    """
    global _owner, _previous_hook, _previous_thread_hook
    if not _owner:
        _owner = os.getpid()
        _previous_hook, sys.excepthook = sys.excepthook, _on_exception
        _previous_thread_hook, threading.excepthook = threading.excepthook, _on_thread_exception
        _notice_exit_codes()
        atexit.register(_on_exit)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=stderr)
    in_main = threading.current_thread() is threading.main_thread()
    if _active() and in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _notice_sigterm()


def here(**facts: object) -> None:
    """Record where this rank is, for the messages of a failure: `here(step=12)`; None forgets."""
    _facts.update(facts)


def where() -> str:
    """Return where this rank is: "step 12, forward, bucket blocks.3"."""
    facts = dict(_facts)
    return ", ".join(
        f"{name.replace('_', '-')} {value}" for name, value in facts.items() if value is not None
    )


def rank_line(event: str = "is") -> str:
    """Return a line like `hpczero: rank 1 of 4 on host node7 failed at step 12`."""
    mpi = _mpi()
    rank, size = (mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size) if mpi else (0, 1)
    place = where()
    return f"hpczero: rank {rank} of {size} on host {socket.gethostname()} {event}" + (
        f" at {place}" if place else ""
    )


def at_exit(callback: Callable[[], None]) -> None:
    """Call back when this process exits cleanly and MPI still runs, the last registered first."""
    _callbacks.append(callback)


def release() -> None:
    """Let this rank exit with any code; all ranks call, having agreed that all exit."""
    global _released
    _released = True


def released() -> bool:
    """Tell whether all ranks have agreed to exit."""
    return _released


def fail(event: str, details: str = "", code: int = 1, wait: float = 0.0) -> None:
    """Print the rank's line and the details as one piece, then abort all ranks; from any thread.

    Args:
        event: What happened to this rank, as in "failed".
        details: The traceback, or nothing.
        code: The exit code for the launcher.
        wait: Seconds that another rank has to report and abort first.
    """
    if not _ending.acquire(blocking=False):
        time.sleep(5)  # another thread of this rank is at it
        return
    time.sleep(wait)
    _flush()
    text = f"{rank_line(event)}\n{details}".encode(errors="replace")
    with contextlib.suppress(OSError):
        while text:
            text = text[os.write(stderr, text) :]
    time.sleep(FORWARD_SECONDS)
    mpi = _mpi()
    if mpi:
        mpi.COMM_WORLD.Abort(code)
    os._exit(code)


def _mpi() -> Any:
    """Return mpi4py's MPI while it runs, else None; never start it."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return mpi if mpi and mpi.Is_initialized() and not mpi.Is_finalized() else None


def _active() -> bool:
    """Tell whether a failure of this process has to end others."""
    mpi = _mpi() if os.getpid() == _owner and not _released else None
    return mpi is not None and mpi.COMM_WORLD.size > 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


# Exceptions #


def _on_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    global _status
    _status = 130 if issubclass(kind, KeyboardInterrupt) else 1
    if not _active():
        _previous_hook(kind, error, trace)
        return
    fail_with(error, trace, "failed")


def _on_thread_exception(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or not _active():
        _previous_thread_hook(args)
    elif not issubclass(args.exc_type, SystemExit):
        name = args.thread.name if args.thread else "unknown"
        fail_with(args.exc_value, args.exc_traceback, f"failed in thread {name!r}")


def fail_with(error: BaseException, trace: TracebackType | None, event: str) -> None:
    """Print an error as this rank's, or let its reporter do so, then abort all ranks."""
    reporter = getattr(error, "reporter", None)
    silent = reporter not in (None, _mpi().COMM_WORLD.rank)
    details = "".join(traceback.format_exception(type(error), error, trace))
    code = 130 if isinstance(error, KeyboardInterrupt) else 1
    fail(event, details, code, wait=REPORTER_SECONDS if silent else 0.0)


# Exit #


def _notice_exit_codes() -> None:
    """Put `_read_code` in the place of `SystemExit.code`, whose type is closed to setattr."""
    attributes = gc.get_referents(SystemExit.__dict__)[0]
    attributes["code"] = property(_read_code, _code.__set__, _code.__delete__, _code.__doc__)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
    if sys.version_info < (3, 12):  # its C code leaves no instance for the interpreter to read
        sys.exit = _exit


def _exit(status: str | int | None = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status)."""
    raise SystemExit(status)


def _read_code(error: SystemExit) -> object:
    code: object = _code.__get__(error)
    try:
        sys._getframe(1)
    except ValueError:
        if threading.current_thread() is threading.main_thread():
            _on_system_exit(code, error)
    return code


def _on_system_exit(code: object, error: SystemExit) -> None:
    global _status
    if code is None or code == 0 or _released:
        return
    _status = code if isinstance(code, int) and 0 < code < 256 else 1
    if _active():
        message = "" if isinstance(code, int) else f"{code}\n"
        stack = "".join(traceback.format_tb(error.__traceback__))  # empty before Python 3.12
        fail(f"left with exit code {_status}", stack + message, _status)


def _on_exit() -> None:
    last: BaseException | None = getattr(sys, "last_value", None)
    trace = last.__traceback__ if last else None
    finalized = "mpi4py.MPI" in sys.modules and _mpi() is None
    if os.getpid() != _owner:
        if _mpi() and _mpi().COMM_WORLD.size > 1:
            _flush()
            os._exit(_status)  # a forked child must not reach the MPI_Finalize of its parent
    elif last and trace and trace.tb_frame.f_globals.get("__name__") in MAIN and _active():
        fail_with(last, trace, "failed")
    elif not _status and not finalized:
        while _callbacks:
            _callbacks.pop()()


# Signals #


def _notice_sigterm() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    others = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if others != -1:
        signal.set_wakeup_fd(others)
    signal.signal(signal.SIGTERM, _on_sigterm)
    os.register_at_fork(after_in_child=lambda: _forget_sigterm(writer))
    threading.Thread(
        target=_read_signals, args=(reader,), name="hpczero-signals", daemon=True
    ).start()


def _on_sigterm(number: int, _frame: FrameType | None) -> None:
    if _ending.locked():
        return  # this may have interrupted `fail` itself
    if _active():
        fail("was ended by signal SIGTERM", code=128 + number, wait=SIGTERM_SECONDS)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _read_signals(reader: int) -> None:
    while numbers := os.read(reader, 64):
        if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is _on_sigterm:
            _on_sigterm(signal.SIGTERM, None)


def _forget_sigterm(writer: int) -> None:
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if (others := signal.set_wakeup_fd(-1)) not in (-1, writer):
        signal.set_wakeup_fd(others)
