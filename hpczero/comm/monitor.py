"""End a job that hangs, with a table of what each rank is in.

[Note: a hanging job]
Ranks that disagree are told by their signatures (see courier); a rank that doesn't come at all (a
loop without end, a dead file system, a debugger) leaves the others waiting for ever. So each rank
has a thread that looks, now and then, how long the Couriers have been at their collective. After
HPCZERO_TIMEOUT seconds it asks all ranks what they are in, on a communicator of its own; rank 0
prints the answers, points at the odd ones, and the job ends. A rank whose thread can't answer holds
the interpreter's lock, or is stopped; the table says so.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mpi4py import MPI

from hpczero.comm import watch
from hpczero.comm.courier import Courier, ranks_text

TIMEOUT_SECONDS = 300.0
POLL_SECONDS = 0.5
ANSWER_SECONDS = 1.0
"""What ranks have to answer."""

_ALARM, _ANSWER = 1, 2


@dataclass(frozen=True)
class Report:
    """Say what a rank is in."""

    where: str = "doesn't answer: it holds the interpreter's lock, or is stopped"
    doing: str = "?"
    waits: bool = False
    collectives: list[str] = field(default_factory=list)
    stack: str = ""


def timeout() -> float:
    """Return HPCZERO_TIMEOUT, the seconds that a rank may wait for another.

    Raises:
        ValueError: it is no positive number.
    """
    text = os.environ.get("HPCZERO_TIMEOUT", str(TIMEOUT_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ValueError(
            f"HPCZERO_TIMEOUT: expected seconds above 0 (inf: wait for ever), found {text!r}"
        )
    return seconds


class Monitor:
    """Watch the Couriers of a World; all ranks create it together.

    Costs a thread that wakes twice a second, and a duplicated communicator.
    """

    def __init__(self, comm: MPI.Intracomm, couriers: Sequence[Courier]) -> None:
        self._timeout = timeout()
        self._comm = comm.Dup()
        self._couriers = list(couriers)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpczero-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; MPI must not end before."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(min(POLL_SECONDS, self._timeout / 8)):
            waiting = [courier.busy for courier in self._couriers]
            longest = max((seconds for _, seconds in waiting), default=0.0)
            if MPI.Is_finalized():  # by the program itself, before it ends
                return
            if self._comm.Iprobe(tag=_ALARM):
                self._answer(self._comm.recv(tag=_ALARM))
            elif longest > self._timeout:
                text = next(text for text, seconds in waiting if seconds == longest)
                self._alarm(f"rank {self._comm.rank} has waited {longest:.1f} s for {text}")

    def _alarm(self, reason: str) -> None:
        requests = [
            self._comm.isend(reason, peer, _ALARM)
            for peer in range(self._comm.size)
            if peer != self._comm.rank
        ]
        self._answer(reason)
        del requests

    def _answer(self, reason: str) -> None:
        """Tell rank 0, which ends the job; end it here if it doesn't."""
        if self._comm.rank != 0:
            request = self._comm.isend(self._report(), 0, _ANSWER)
            patience = time.monotonic() + 3 * ANSWER_SECONDS
            while time.monotonic() < patience:
                request.test()
                time.sleep(0.05)
            table = _table(reason, {self._comm.rank: self._report()}, self._comm.size)
            watch.fail("ends the job, since rank 0 doesn't", table)
        reports = {0: self._report()}
        patience = time.monotonic() + ANSWER_SECONDS
        while len(reports) < self._comm.size and time.monotonic() < patience:
            status = MPI.Status()
            if self._comm.Iprobe(tag=_ANSWER, status=status):
                source = status.Get_source()
                reports[source] = self._comm.recv(source=source, tag=_ANSWER)
            else:
                time.sleep(0.01)
        watch.fail("ends the job, which hangs", _table(reason, reports, self._comm.size))

    def _report(self) -> Report:
        busy = [(courier.busy, courier.waits) for courier in self._couriers]
        waits = any(waiting for _, waiting in busy)
        longest = max(seconds for (_, seconds), _ in busy)
        idle = min(courier.idle for courier in self._couriers)
        frame: Any = sys._current_frames().get(threading.main_thread().ident or 0)
        return Report(
            where=watch.where() or "no step yet",
            doing=f"waits {longest:.1f} s" if waits else f"computes {idle:.1f} s",
            waits=waits,
            collectives=[text for (text, seconds), _ in busy if seconds],
            stack="".join(traceback.format_stack(frame)[-12:]) if frame else "",
        )


def _table(reason: str, reports: dict[int, Report], size: int) -> str:
    rows = [("rank", "", "in", "collective")]
    known = [reports.get(rank, Report()) for rank in range(size)]
    for rank, report in enumerate(known):
        rows.append((str(rank), report.doing, report.where, "; ".join(report.collectives)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    odd = _odd(known)
    stacks = [f"rank {rank} is in\n{known[rank].stack}" for rank in odd if known[rank].stack]
    return (
        f"{reason}, longer than HPCZERO_TIMEOUT:\n"
        + "\n".join(line.rstrip() for line in lines)
        + f"\nthe odd one{'s are' if len(odd) > 1 else ' is'} {ranks_text(odd)}\n"
        + "\n".join(stacks[:2])
    )


def _odd(reports: Sequence[Report]) -> list[int]:
    """Return the ranks that others wait for: those that don't wait, else the smaller camp."""
    computing = [rank for rank, report in enumerate(reports) if not report.waits]
    if computing:
        return computing
    camps: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        camps.setdefault("; ".join(report.collectives), []).append(rank)
    return min(camps.values(), key=len)
