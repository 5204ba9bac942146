"""An ordinary PyTorch loop becomes ours in a few changed lines, and the README shows them."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import mpiexec

ROOT = Path(__file__).parent.parent
PLAIN, OURS = ROOT / "examples" / "plain.py", ROOT / "examples" / "partitioned.py"


def code(path: Path) -> list[str]:
    """Return the lines below the docstring and blank lines."""
    text = path.read_text().split('"""', 2)[2]
    return [line for line in text.splitlines() if line.strip()]


def changes() -> list[str]:
    diff = difflib.unified_diff(code(PLAIN), code(OURS), lineterm="", n=0)
    return [line for line in diff if line[0] in "+-" and line[:3] not in ("+++", "---")]


def test_at_most_six_lines_change() -> None:
    added = [line for line in changes() if line.startswith("+")]
    assert len(added) <= 6, added


def test_the_readme_shows_the_change() -> None:
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"```diff\n(.*?)```", readme, re.DOTALL)
    assert block is not None
    shown = [line for line in block[1].splitlines() if line[:1] in ("+", "-")]
    assert shown == changes()


def last_loss(text: str) -> float:
    found = re.findall(r"loss (\d+\.\d+)", text)
    assert found, text
    return float(found[-1])


@pytest.mark.slow
def test_both_learn_the_same_on_one_rank() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    losses = [
        last_loss(subprocess.check_output([sys.executable, path], text=True, env=environment))
        for path in (PLAIN, OURS)
    ]
    assert abs(losses[0] - losses[1]) < 2e-3
    assert losses[0] < 0.3


def test_ours_runs_on_two_ranks() -> None:
    done = mpiexec(2, str(OURS))
    assert done.returncode == 0, done.stdout
    assert last_loss(done.stdout) < 0.3
