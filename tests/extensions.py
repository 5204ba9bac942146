"""Build a compiled kernel once more, for one instruction set."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from launch import ROOT

from hpczero import compiled

GXX = shutil.which("g++")
LEVELS = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512vl"}
OPTIONS = ["-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]

each_level = pytest.mark.parametrize(
    "level",
    [x if x == "x86-64-v3" else pytest.param(x, marks=pytest.mark.slow) for x in LEVELS],
)


def assert_built(folder: str, name: str) -> None:
    """See that the installation built a kernel; skip the test where there is no compiler."""
    if compiled.library(str(ROOT / folder), name) is None:
        assert GXX is None, f"there is a compiler, but {name} wasn't built"
        pytest.skip("no compiler")


def build(source: Path, library: Path, level: str, *options: str) -> None:
    """Build a library for one instruction set; skip the test where that doesn't run."""
    if GXX is None or LEVELS[level] not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"no compiler, or this machine doesn't run {level}")
    command = [GXX, "-shared", "-fPIC", *OPTIONS, f"-march={level}", "-DCLONES=", *options]
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
