"""Make two nodes out of one machine: network namespaces joined by a wire of limited rate.

    python benchmarks/netns.py --rate 1gbit --ranks 2 script.py ARGUMENTS

runs `python script.py ARGUMENTS` as one MPI job with two ranks on each node. Needs Linux, root,
iproute2 and MPICH; exits with 77 and the reason where two nodes can't be made.

[Note: two nodes]
MPICH's launcher sees two hosts, so each namespace is a node to MPI. Inside one, MPICH has its own
shared memory; across, UCX is held to TCP over the wire. UCX's shared memory must stay off: it knows
no namespaces, and would reach the other node past the wire.

[Note: payload]
A device counts 66 bytes of Ethernet, IP and TCP headers per packet, of up to 64 KiB as nobody
segments them here. What is left after those is payload: that of MPI or gloo with their own headers.
Rank 0's node also has the launcher, whose output and questions cross the wire when a rank of the
other node starts, prints or ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

DEVICE = "veth"
ADDRESSES = "10.0.0.1", "10.0.0.2"
"""Seen in these namespaces only."""
HEADERS = 66
BURST = "128kb"
"""What may pass at once after a pause; at least a packet."""
PREFIX = "hpczero"
CANNOT = 77

ENVIRONMENT = {
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": DEVICE,
    "GLOO_SOCKET_IFNAME": DEVICE,
    "MASTER_ADDR": ADDRESSES[0],
    "MASTER_PORT": "29500",
    "OMP_NUM_THREADS": "1",
}
"""How MPICH, gloo and torch find the wire."""

# Called as `ssh -x HOST COMMAND`; the last number of an address is that of the namespace.
_LAUNCHER = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
namespace={prefix}-${{1##*.}}
shift
exec ip netns exec "$namespace" sh -c "$*"
"""


class CannotError(RuntimeError):
    """Say why this machine can't be made into two nodes."""


@dataclass(frozen=True)
class Nodes:
    """Two namespaces, and a script that starts a command in either."""

    names: tuple[str, str]
    launcher: Path
    mpiexec: str

    def run(
        self,
        ranks: int,
        *argv: str,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        timeout: float = 600,
    ) -> None:
        """Run a command as one job with so many ranks on each node, and wait for its end.

        Its output goes into `log`, if given.

        Raises:
            CalledProcessError: the job failed.
            TimeoutExpired: it still ran after `timeout` seconds.
        """
        hosts = ",".join(f"{address}:{ranks}" for address in ADDRESSES)
        launch = ["-launcher", "ssh", "-launcher-exec", str(self.launcher)]
        where = ["-localhost", ADDRESSES[0], "-hosts", hosts, "-n", str(ranks * len(ADDRESSES))]
        with log.open("w") if log else contextlib.nullcontext() as output:
            subprocess.run(
                ["ip", "netns", "exec", self.names[0], self.mpiexec, *launch, *where, *argv],
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                env={**os.environ, **ENVIRONMENT, **(env or {})},
                timeout=timeout,
            )

    def wire(self) -> str:
        """Return how the wire is limited, in tc's words."""
        return _ip("tc", "-n", self.names[0], "qdisc", "show", "dev", DEVICE).strip()


@contextlib.contextmanager
def two_nodes(rate: str = "1gbit") -> Iterator[Nodes]:
    """Make two nodes that can send one another `rate` each; remove them and their processes after.

    Also after SIGTERM, which becomes SystemExit while they are there. Nodes that a killed process
    left behind are removed first. Costs 0.1 s, and a second at most until the wire is up.

    Raises:
        CannotError: the machine doesn't allow it.
    """
    mpiexec = _mpiexec()
    names = f"{PREFIX}-{os.getpid()}-1", f"{PREFIX}-{os.getpid()}-2"
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        with tempfile.TemporaryDirectory(prefix="netns") as folder:
            try:
                _remove_dead()
                _make(names, rate)
                launcher = Path(folder) / "launcher"
                launcher.write_text(_LAUNCHER.format(prefix=names[0].rpartition("-")[0]))
                launcher.chmod(0o700)
                yield Nodes(names, launcher, mpiexec)
            finally:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not stop this
                for name in names:
                    _remove(name)
    finally:
        signal.signal(signal.SIGTERM, before)


def payload() -> int:
    """Return the payload that has crossed the wire so far, both ways; called inside a node."""
    folder = Path(f"/sys/class/net/{DEVICE}/statistics")
    count = {path: int((folder / path).read_text()) for path in _COUNTERS}
    packets = count["rx_packets"] + count["tx_packets"]
    return count["rx_bytes"] + count["tx_bytes"] - HEADERS * packets


_COUNTERS = "rx_bytes", "tx_bytes", "rx_packets", "tx_packets"


def _make(names: tuple[str, str], rate: str) -> None:
    try:
        for name in names:
            _ip("ip", "netns", "add", name)
        ends = [["name", DEVICE, "netns", name] for name in names]
        _ip("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("ip", "-n", name, "link", "set", DEVICE, "addrgenmode", "none")  # no IPv6 chatter
            _ip("ip", "-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            limit = ["tbf", "rate", rate, "burst", BURST, "latency", "50ms"]
            _ip("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", *limit)
            for device in ("lo", DEVICE):
                _ip("ip", "-n", name, "link", "set", device, "up")
        deadline = time.monotonic() + 10
        # UCX overlooks a device that isn't up yet.
        while not all("state UP" in _ip("ip", "-n", n, "link", "show", DEVICE) for n in names):
            if time.monotonic() > deadline:
                raise CannotError(f"{DEVICE} is not up after 10 s")
            time.sleep(0.02)
    except subprocess.CalledProcessError as error:
        raise CannotError(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error


def _mpiexec() -> str:
    """Return MPICH's mpiexec, the one beside this Python first."""
    if os.geteuid():
        raise CannotError("network namespaces need root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise CannotError(f"no {tool}: install iproute2")
    beside = os.path.dirname(sys.executable)  # noqa: PTH120 - a venv's python is a link: don't follow
    found = shutil.which("mpiexec", path=beside) or shutil.which("mpiexec")
    if found is None:
        raise CannotError("no mpiexec: install MPICH")
    if "HYDRA" not in _ip(found, "--version"):
        raise CannotError(f"{found} is not MPICH's: another can't be told how to reach a node")
    return found


def _remove_dead() -> None:
    for line in _ip("ip", "netns", "list").splitlines():
        found = re.match(rf"{PREFIX}-(\d+)-[12]\b", line)
        if found and not Path("/proc", found[1]).exists():
            _remove(found[0])


def _remove(name: str) -> None:
    """Kill what runs in a namespace and remove it, with its end of the wire, if it is there."""
    path = Path("/run/netns", name)
    if not path.exists():
        return
    try:
        for _ in range(100):  # what has just been started may start more
            pids = _ip("ip", "netns", "pids", name).split()
            if not pids:
                break
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.02)
        _ip("ip", "netns", "delete", name)
    except subprocess.CalledProcessError:
        if path.exists():  # else another run was faster
            raise


def _ip(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> None:
    """Run a script on two nodes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="1gbit", help="of each direction, in tc's words")
    parser.add_argument("--ranks", type=int, default=2, help="on each node")
    parser.add_argument("--timeout", type=float, default=600, help="seconds")
    parser.add_argument("argv", nargs=argparse.REMAINDER, metavar="SCRIPT ...")
    args = parser.parse_args()
    try:
        with two_nodes(args.rate) as nodes:
            if args.argv:
                nodes.run(args.ranks, sys.executable, *args.argv, timeout=args.timeout)
    except CannotError as error:
        print(error, file=sys.stderr)
        sys.exit(CANNOT)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)


if __name__ == "__main__":
    main()
