"""The page of results says what the results say, and every benchmark runs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from launch import ROOT, environment

from benchmarks import machine, netns, page
from benchmarks.machine import FIELDS, RESULTS
from benchmarks.registry import BENCHMARKS


def test_the_page_is_made_from_the_results() -> None:
    text = page.PAGE.read_text()
    assert page.render(text, RESULTS) == text, "python -m benchmarks page makes it anew"


def test_every_table_is_on_the_page() -> None:
    assert sorted(page.markers(page.PAGE.read_text())) == sorted(page.TABLES)


def test_every_benchmark_has_a_table() -> None:
    assert {name for _, names in page.TABLES.values() for name in names} == {*BENCHMARKS}


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.json")))
def test_result_says_how_it_came_about(name: str) -> None:
    assert name in BENCHMARKS
    result = json.loads((RESULTS / f"{name}.json").read_text())
    assert set(FIELDS) <= set(result)
    assert {"cpu", "cores", "memory"} <= set(result["machine"])
    assert {"python", "torch", "hpczero", "mpi"} <= set(result["versions"])
    assert samples(result["rows"]) > 1


def samples(rows: object) -> int:
    """Count the times in the lists of a result."""
    if isinstance(rows, list) and all(isinstance(item, float) for item in rows):
        return len(rows)
    parts = rows.values() if isinstance(rows, dict) else rows if isinstance(rows, list) else ()
    return sum(map(samples, parts))


def test_a_missing_result_is_named(tmp_path: Path) -> None:
    text = page.render(page.PAGE.read_text(), tmp_path)
    assert text.count("Not measured yet: `python -m benchmarks run ") == len(page.TABLES)
    assert "run scaling-1 scaling-2 scaling-4`." in text


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_a_result_is_current_while_code_and_processor_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=me", "-c", "user.email=me@here")
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def current(**changes: object) -> bool:
        known = {"commit": commit, "dirty": False, "machine": {"cpu": machine.cpu()}}
        result.write_text(json.dumps(known | changes))
        return machine.is_current(result)

    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine, "RESULTS", tmp_path / "benchmarks/results")
    result, code = tmp_path / "benchmarks/results/x.json", tmp_path / "hpczero/code.py"
    for folder in (result.parent, code.parent):
        folder.mkdir(parents=True)
    code.write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "code")
    commit = git("rev-parse", "HEAD")
    assert not machine.is_current(result)
    assert current()
    git("add", ".")
    git("commit", "-m", "a result, which is no code")
    assert current()
    assert not current(dirty=True)
    assert not current(machine={"cpu": "another"})
    assert not current(commit="0" * 40)
    code.write_text("2")
    assert not current()


# Those that differ from one of these in sizes alone are left out.
ALIKE = {"step-medium-fp32", "step-medium-bf16", "collectives-4", "scaling-1", "scaling-4"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name not in ALIKE])
def test_it_runs(name: str, tmp_path: Path) -> None:
    if name == "checkpoint" and not (shutil.which("fincore") and shutil.which("findmnt")):
        pytest.skip("needs fincore and findmnt")
    out = tmp_path / f"{name}.json"
    command = BENCHMARKS[name].command(out, quick=True)
    env = environment({})
    job = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=590)
    if job.returncode == netns.CANNOT:
        pytest.skip(job.stderr.splitlines()[-1])
    assert job.returncode == 0, job.stderr
    assert set(FIELDS) <= set(json.loads(out.read_text()))
