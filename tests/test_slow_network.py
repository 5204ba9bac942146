"""Train on two nodes joined by a network: namespaces of one machine, as the benchmark makes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from launch import ROOT, alive, environment, mpiexec

NETNS = ROOT / "benchmarks" / "netns.py"
SENT = Path("/sys/class/net/veth/statistics/tx_bytes")
# Without namespaces, MPICH can still be told that the first two ranks are a node, and the others.
TWO_NODES = {
    "MPIR_CVAR_NUM_CLIQUES": "2",
    "MPIR_CVAR_CLIQUES_BY_BLOCK": "1",
    "UCX_TLS": "tcp,self",
}

pytestmark = pytest.mark.slow


def start(*argv: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(NETNS), *map(str, argv)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment({}),
    )


def run(*argv: object) -> tuple[int, str]:
    process = start(*argv)
    try:
        output = process.communicate(timeout=100)[0]
    finally:
        process.terminate()
        process.wait()
    return process.returncode, output


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in listed.stdout.splitlines()]


@pytest.fixture(scope="module", autouse=True)
def _needs_namespaces() -> None:
    code, output = run()
    if code == 77:
        pytest.skip(f"no two nodes here: {output.strip()}")
    assert code == 0, output


def test_two_nodes_train_in_the_bits_of_one_machine(tmp_path: Path) -> None:
    for name in ("network", "machine"):
        (tmp_path / name).mkdir()
    code, output = run("--timeout", 90, __file__, tmp_path / "network")
    assert code == 0, output
    job = mpiexec(4, __file__, str(tmp_path / "machine"), timeout=90, env=TWO_NODES)
    assert job.returncode == 0, job.stdout
    for rank in range(4):
        mine, other = (
            json.loads((tmp_path / name / f"{rank}.json").read_text())
            for name in ("network", "machine")
        )
        assert mine["nodes"] == other["nodes"] == 2
        assert mine["losses"] == other["losses"]
        assert mine["sent"] > 8 * mine["model"]  # each step moves more than half a model


def test_nothing_stays_after_sigterm(tmp_path: Path) -> None:
    job, ranks = sleeping_job(tmp_path)
    job.terminate()
    job.communicate(timeout=30)
    assert job.returncode == 128 + signal.SIGTERM
    assert not [name for name in namespaces() if str(job.pid) in name]
    assert not any(alive(pid) for pid in ranks)


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    job, ranks = sleeping_job(tmp_path)
    job.kill()
    job.wait()
    assert [name for name in namespaces() if str(job.pid) in name]
    assert run()[0] == 0
    job.communicate(timeout=30)  # its ranks held the pipe
    assert not [name for name in namespaces() if str(job.pid) in name]
    assert not any(alive(pid) for pid in ranks)


def test_a_failed_job_fails(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text("raise SystemExit(3)\n")
    before = namespaces()
    assert run(script)[0] == 3
    assert set(namespaces()) <= set(before)


def sleeping_job(folder: Path) -> tuple[subprocess.Popen[str], Sequence[int]]:
    """Start four ranks that do nothing, and return their ids too."""
    script = folder / "sleep.py"
    script.write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(folder)!r}, f'pid{{os.getpid()}}').touch()\n"
        "time.sleep(300)\n"
    )
    job = start(script)
    deadline = time.monotonic() + 30
    while len(found := list(folder.glob("pid*"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(found) == 4
    return job, [int(path.name[3:]) for path in found]


def train(folder: Path) -> None:
    """Train two steps at each stage, in both precisions, and write the losses; all ranks call."""
    from models import TinyLM, lm_loss

    import hpczero
    from hpczero.comm.world import World

    world = World.of()
    losses, model = {}, 0
    before = int(SENT.read_text()) if SENT.exists() else 0
    for half in (False, True):
        for stage in range(4):
            torch.manual_seed(0)
            module = TinyLM()
            model = sum(p.nbytes for p in module.parameters())
            engine = hpczero.Engine(
                module,
                {
                    "zero_optimization": {"stage": stage},
                    "bf16": {"enabled": half},
                    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                },
            )
            for step in range(2):
                loss = lm_loss(engine, 4 * step + world.rank)
                engine.backward(loss)
                engine.step()
                losses[f"stage {stage}, half {half}, step {step}"] = float(loss.detach()).hex()
            losses[f"stage {stage}, half {half}, norm"] = engine.grad_norm.hex()
    sent = int(SENT.read_text()) - before if SENT.exists() else 0
    result = {"losses": losses, "nodes": world.nodes, "model": model, "sent": sent}
    (folder / f"{world.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    train(Path(sys.argv[1]))
