"""DeepSpeed as the oracle: its training scripts, one changed import, the same losses."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launch import end_tree, environment, mpiexec

SCRIPTS = Path(__file__).parent / "oracle"
RANKS = 2
TOLERANCE = 1e-5
# Else DeepSpeed compiles an all-reduce in shared memory when it starts: that takes a compiler and
# half a minute. Without it gloo reduces.
COMPILE_NOTHING = """
import runpy, sys, deepspeed.ops
deepspeed.ops.__compatible_ops__ = {}
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="needs DeepSpeed: pip install '.[bench]', as .ci/run does",
    ),
]


def deepspeed(script: Path, *flags: str, log: Path) -> None:
    """Run a script on DeepSpeed, with the variables that its launcher would set."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world |= {"BACKEND": "deepspeed", "DS_ACCELERATOR": "cpu"}
    with log.open("w") as output:  # a file: a full pipe would stop one rank while another waits
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", COMPILE_NOTHING, str(script), *flags],
                env=environment(world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank in range(RANKS)
        ]
        try:
            codes = [process.wait(timeout=120) for process in processes]
        finally:
            for process in processes:
                end_tree(process.pid)
    assert codes == [0] * RANKS, log.read_text()


def losses(folder: Path) -> list[list[float]]:
    """Return each rank's loss at every micro-step."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("stage", ["0", "2", "3"])
@pytest.mark.parametrize(
    ("script", "micro_steps", "learned"), [("classify.py", 20, 0.3), ("finetune.py", 40, 1.0)]
)
def test_the_losses_are_deepspeeds(
    script: str, micro_steps: int, learned: float, stage: str, tmp_path: Path
) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    deepspeed(SCRIPTS / script, "--stage", stage, "--out", str(theirs), log=tmp_path / "log")
    job = mpiexec(
        RANKS, str(SCRIPTS / script), "--stage", stage, "--out", str(ours),
        env={"BACKEND": "hpczero"}, timeout=100,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout
    for rank, (expected, found) in enumerate(zip(losses(theirs), losses(ours), strict=True)):
        print(f"{script}, stage {stage}, rank {rank}: DeepSpeed, hpczero, difference")
        for step, (a, b) in enumerate(zip(expected, found, strict=True), 1):
            print(f"{step:4d} {a:.7f} {b:.7f} {b - a:+.1e}")
        assert len(found) == micro_steps
        assert found == pytest.approx(expected, rel=0, abs=TOLERANCE)
        assert sum(expected[-4:]) / 4 < expected[0] - learned  # it is training that agrees
