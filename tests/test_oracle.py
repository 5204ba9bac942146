"""DeepSpeed as the oracle: its training scripts, one changed import, the same losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import deepspeed, mpiexec, needs_deepspeed

SCRIPTS = Path(__file__).parent / "oracle"
RANKS = 2
TOLERANCE = 1e-5
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    needs_deepspeed,
]


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
    deepspeed(RANKS, SCRIPTS / script, "--stage", stage, "--out", str(theirs), log=tmp_path / "log")
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
