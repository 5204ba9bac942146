"""Run pytest on one rank or on many.

[Note: pytest on several ranks]
`python -m pytest` runs all tests on one rank. `mpiexec -n 4 python -m pytest` runs those marked
`mpi`, all ranks in step: after each phase of a test (setup, call, teardown) the ranks tell one
another how it ended, and a test that failed on one rank has failed on all. Rank 0 reports, with the
others' tracebacks. Where a rank failed and another doesn't come, it is probably in a collective and
waits for the one that failed: after HPCZERO_TEST_GRACE seconds (10) the missing ranks show their
stacks and the job is aborted. A test that takes longer than HPCZERO_TEST_TIMEOUT seconds (120; or
the marker `timeout(seconds)`) ends likewise, on one rank too.

pytest-mpi may be installed or not; `--with-mpi` is implied where it is.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Generator, Iterator
from typing import NamedTuple, NoReturn

import pytest
import torch
from mpi4py import MPI

from hpczero.comm import watch

GRACE = float(os.environ.get("HPCZERO_TEST_GRACE", "10"))
TIMEOUT = float(os.environ.get("HPCZERO_TEST_TIMEOUT", "120"))
PRINT_SECONDS = 1.0  # for the last words of all ranks, before Abort

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
FAILED = pytest.StashKey[bool]()


class Word(NamedTuple):
    """What a rank tells the others."""

    where: str
    outcome: str  # passed, failed, skipped
    text: str


class Ranks:
    """Keep the ranks of a session in step."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self.watchdog = watchdog
        self.errors: list[str] = []

    # Hooks #

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        others = [item for item in items if not item.get_closest_marker("mpi")]
        items[:] = [item for item in items if item.get_closest_marker("mpi")]
        config.hook.pytest_deselected(items=others)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(report.longreprtext)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        tests = "\n".join(item.nodeid for item in session.items)
        outcome = "failed" if self.errors else "passed"
        words = self.exchange(Word("the collection", outcome, "\n".join(self.errors) or tests))
        failed = {rank: word.text for rank, word in enumerate(words) if word.outcome == "failed"}
        if failed and len(failed) < SIZE:
            rank, text = next(iter(failed.items()))
            pytest.exit(f"rank {rank} failed to collect:\n{text}", returncode=1)
        if not failed and (odd := [rank for rank in range(SIZE) if words[rank] != words[0]]):
            pytest.exit(f"rank {odd[0]} collected other tests than rank 0", returncode=1)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        text = ""
        if report.failed:
            text = "\n".join([report.longreprtext, *(f"{a}\n{b}" for a, b in report.sections)])
        words = self.exchange(Word(f"{item.nodeid} ({call.when})", report.outcome, text))
        merge(report, words)
        item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        words = self.exchange(Word("the end of the session", "passed", str(int(exitstatus))))
        session.exitstatus = max(int(word.text) for word in words)
        watch.release()  # all ranks exit, with the same code

    def pytest_internalerror(self, excrepr: object) -> None:
        if RANK > 0:  # rank 0 has a terminal
            watch.fail("failed inside pytest", str(excrepr))

    # Agreement #

    def exchange(self, mine: Word) -> list[Word]:
        """Return the words of all ranks, or end the job if a rank stays away from a failure."""
        peers = [rank for rank in range(SIZE) if rank != RANK]
        requests = [self.comm.isend(mine, peer) for peer in peers]
        words = {RANK: mine}
        deadline = float("inf")
        while len(words) < SIZE:
            for peer in peers:
                if peer not in words and self.comm.Iprobe(source=peer):
                    words[peer] = self.comm.recv(source=peer)
            heard = words.values()
            if any(word.outcome == "failed" or word.where != mine.where for word in heard):
                deadline = min(deadline, time.monotonic() + GRACE)
            if time.monotonic() > deadline:
                self.give_up(mine.where, words)
            time.sleep(2e-4)
        if any(word.where != mine.where for word in words.values()):
            self.give_up(mine.where, words)
        MPI.Request.waitall(requests)
        return [words[rank] for rank in range(SIZE)]

    def give_up(self, where: str, words: dict[int, Word]) -> NoReturn:
        """Say which ranks are where, let the missing ones show their stacks, and abort."""
        speaker = min(words, key=lambda rank: (words[rank].outcome != "failed", rank))
        if speaker != RANK:
            time.sleep(PRINT_SECONDS + 5)  # the speaker aborts first
        lines = [f"the ranks parted at {where}:"]
        for rank in range(SIZE):
            word = words.get(rank)
            state = f"{word.outcome} {word.where}" if word else f"missing after {GRACE:g} s"
            lines.append(f"  rank {rank}: {state}")
        for rank, word in words.items():
            if word.outcome == "failed":
                lines.append(f"rank {rank} failed:\n{word.text}")
        say("\n".join(lines))
        for rank in range(SIZE):
            if rank not in words:
                self.watchdog.comm.isend(where, rank)
        time.sleep(PRINT_SECONDS)
        end_all()


def merge(report: pytest.TestReport, words: list[Word]) -> None:
    """Fail a report that failed on any rank, and show each different traceback once."""
    outcomes = {word.outcome for word in words}
    if outcomes == {report.outcome}:
        if report.outcome != "failed":
            return
    elif "failed" not in outcomes:
        each = ", ".join(f"rank {rank} {word.outcome}" for rank, word in enumerate(words))
        report.outcome, report.longrepr = "failed", f"the ranks disagree: {each}"
        return
    shown: dict[str, list[int]] = {}
    for rank, word in enumerate(words):
        if word.outcome == "failed":
            shown.setdefault(word.text, []).append(rank)
    if not report.failed:
        culprits = ranks_text([rank for ranks in shown.values() for rank in ranks])
        report.outcome, report.longrepr = "failed", f"passed here, failed on {culprits}"
    if RANK == 0:
        for text, culprit in shown.items():
            body = "as above" if RANK in culprit else text
            report.sections.append((f"failed on {ranks_text(culprit)}", body))


def ranks_text(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


# Timeout #


class Watchdog(threading.Thread):
    """End the job at the deadline of a test, and show this rank's stacks where others ask."""

    def __init__(self) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.comm = MPI.COMM_WORLD.Dup()
        self.test = ""
        self.seconds = TIMEOUT
        self.deadline = float("inf")
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.1):
            if time.monotonic() > self.deadline:
                say(f"{self.test} took longer than {self.seconds:g} s; {here(self.test)}")
                time.sleep(PRINT_SECONDS)
                end_all()
            if self.comm.Iprobe():
                say(here(self.comm.recv()))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        marker = item.get_closest_marker("timeout")
        self.test, self.seconds = item.nodeid, float(marker.args[0]) if marker else TIMEOUT
        self.deadline = time.monotonic() + self.seconds
        # This thread can't run where the main thread holds Python's lock: then faulthandler can.
        faulthandler.dump_traceback_later(self.seconds + 10, exit=True, file=watch.stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            self.deadline = float("inf")

    def pytest_unconfigure(self) -> None:
        self.stopped.set()
        self.join()


def here(where: str) -> str:
    """Return the stacks of this rank's threads, without the frames that are pytest's."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = [f"rank {RANK} of {SIZE} is here in {where}:"]
    for ident, frame in sys._current_frames().items():
        stack = [
            place
            for place in traceback.extract_stack(frame)
            if not any(
                part in place.filename for part in ("pytest/", "pluggy/", "frozen", "threading")
            )
        ]
        if ident != threading.get_ident() and stack:
            lines.append(f"thread {names.get(ident, ident)}:")
            lines.extend(line.rstrip() for line in traceback.format_list(stack))
    return "\n".join(lines)


def say(text: str) -> None:
    """Print past pytest's capture, in one piece."""
    os.write(watch.stderr, f"\n{text}\n".encode())


def end_all() -> NoReturn:
    MPI.COMM_WORLD.Abort(1)
    os._exit(1)


# Session #


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timeout(seconds): how long the test may take")
    config.addinivalue_line("markers", "mpi(min_size): runs in every world size, from min_size on")
    config.option.with_mpi = True
    watch.stderr = os.dup(2)  # capture is off while pytest configures
    watchdog = Watchdog()
    watchdog.start()
    config.pluginmanager.register(watchdog, "hpczero-watchdog")
    if SIZE == 1:
        return
    config.pluginmanager.register(Ranks(watchdog), "hpczero-ranks")
    # Ranks that share the numbered folders in /tmp remove old ones under one another's hands.
    folder = tempfile.mkdtemp(prefix=f"pytest-rank-{RANK}-")
    os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch.set_num_threads(1)
    if RANK > 0:
        config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: PTH123, SIM115
    with contextlib.suppress(ImportError):
        from hypothesis import settings

        settings.register_profile("ranks", derandomize=True, deadline=None, database=None)
        settings.load_profile("ranks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("mpi")
        least = marker.kwargs.get("min_size", 1) if marker else 1
        if least > SIZE:
            item.add_marker(pytest.mark.skip(reason=f"needs mpiexec with {least} ranks or more"))


@pytest.fixture
def world_comm(request: pytest.FixtureRequest) -> Iterator[MPI.Intracomm]:
    """Give a communicator of all ranks for one test, freed unless the test failed."""
    comm = MPI.COMM_WORLD.Dup()
    yield comm
    if not request.node.stash.get(FAILED, False):
        comm.Free()
