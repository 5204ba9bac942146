"""Start a contender's ranks and tell them when to step.

Each contender is a job of its own, as a user would start it. Jobs that are alive at the same time
take turns: whoever isn't told to step sleeps in a read, so that two can be compared step by step on
a noisy machine. One node only: the clock and the socket are its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT

TIMEOUT = 600.0
"""Seconds for a rank to get ready, or to do one step."""


@dataclass(frozen=True)
class Setting:
    """Say what all contenders compute."""

    model: str = "small"
    dtype: str = "fp32"
    batch: int = 4
    ranks: int = 2
    threads: int = 1
    lr: float = 1e-4

    @classmethod
    def of(cls, model: str, dtype: str, batch: int, ranks: int) -> Setting:
        """Return a setting that gives each rank its share of the cores."""
        return cls(model, dtype, batch, ranks, max(1, len(os.sched_getaffinity(0)) // ranks))


class Job:
    """Run one contender under mpiexec; ranks build their model, then obey.

    Args:
        contender: its name.
        setting: what it computes.
        watch: whether ranks sample their memory every 100 ms.

    Raises:
        RuntimeError: a rank ended or was late, at any call; with the end of what the job printed.
    """

    def __init__(self, contender: str, setting: Setting, *, watch: bool = False) -> None:
        self.setting = setting
        self.contender = contender
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark-")
        self._log = Path(self._folder.name) / "log"
        address = Path(self._folder.name) / "socket"
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(address))
        server.listen()
        server.settimeout(0.5)
        argv = [launcher(), "-n", str(setting.ranks), sys.executable, "-m", "benchmarks.contenders"]
        argv += [contender, str(address), setting.model, setting.dtype, str(setting.batch)]
        with self._log.open("w") as log:
            self.started = time.perf_counter()
            self._process = subprocess.Popen(
                [*argv, *(["--watch"] if watch else [])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment(setting),
            )
        self._ranks = []
        try:
            for _ in range(setting.ranks):
                connection = self._accept(server)
                connection.settimeout(TIMEOUT)
                self._ranks.append(connection.makefile("rw"))
            self._replies()
        except BaseException:
            self.close()
            raise
        finally:
            server.close()

    def step(self) -> dict[str, Any]:
        """Do one step; return its seconds, first start to last end, and what it cost."""
        before = loopback()
        told = self.ask("step")
        moved = loopback() - before
        start, end = min(x["start"] for x in told), max(x["end"] for x in told)
        sent = [x["sent"] for x in told]
        return {
            "seconds": end - start,
            "since_launch": end - self.started,
            "loss": sum(x["loss"] for x in told) / len(told),
            # What our ranks count themselves goes through shared memory, which no device counts.
            "sent": round(sum(sent) / len(sent)) if None not in sent else moved // len(told),
        }

    def ask(self, what: str) -> list[dict[str, Any]]:
        """Return the ranks' answers to an order."""
        for rank in self._ranks:
            rank.write(what + "\n")
            rank.flush()
        return self._replies()

    def close(self) -> None:
        """End the job; ranks leave when nobody is at the other end of their socket."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self, server: socket.socket) -> socket.socket:
        end = time.monotonic() + TIMEOUT
        while self._process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                return server.accept()[0]
        raise self._error()

    def _replies(self) -> list[dict[str, Any]]:
        replies = []
        for rank in self._ranks:
            try:
                line = rank.readline()
            except OSError:
                line = ""
            if not line:
                raise self._error()
            replies.append(json.loads(line))
        return replies

    def _error(self) -> RuntimeError:
        time.sleep(1)  # for the other ranks to print
        end = self._log.read_text()[-4000:]
        return RuntimeError(f"{self.contender} on {self.setting.ranks} ranks failed:\n{end}")


def launcher() -> str:
    """Return the mpiexec beside this Python (a wheel's), else the one on PATH.

    Raises:
        FileNotFoundError: there is none.
    """
    beside = str(Path(sys.executable).parent)
    found = shutil.which("mpiexec", path=beside) or shutil.which("mpiexec")
    if found is None:
        raise FileNotFoundError("no mpiexec: install MPI, or pip install 'hpczero[mpich]'")
    return found


def environment(setting: Setting) -> dict[str, str]:
    """Return what all ranks of a job share."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(setting.threads),
        "WORLD_SIZE": str(setting.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": "cpu",
        "BENCHMARK_LR": str(setting.lr),
    }


def loopback() -> int:
    """Return the bytes that the loopback device has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    return 0
