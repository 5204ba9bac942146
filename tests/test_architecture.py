"""Imports point down, and importing the package stays light."""

from __future__ import annotations

import ast
import graphlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, environment

import hpczero

PACKAGE = ROOT / "hpczero"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Which folders and files of the package each of them may import, besides itself.
BASE = {"compiled", "errors", "plan", "sizing"}
SIDES = {"comm", "gpu", "infinity"}  # these never import one another
ENGINE = BASE | SIDES | {"config", "partition"}
MAY_IMPORT = {
    **{name: set() for name in BASE},
    "deepspeed_keys": set(),
    "schema": {"errors", "deepspeed_keys"},
    "schedules": {"errors", "schema"},
    "config": BASE | {"schema", "schedules"},
    **{name: BASE | {"config"} for name in SIDES},
    "partition": BASE | SIDES | {"config"},
    "optimizers": BASE | {"config", "partition"},
    "checkpoints": ENGINE,
    "engine": ENGINE | {"checkpoints", "schedules", "optimizers"},
    "loader": set(),
    "initialize": ENGINE | {"engine", "loader", "optimizers"},
    "data": BASE,
    "gpt": BASE,
    "report": ENGINE | {"engine", "__init__"},
    "train": ENGINE | {"engine", "checkpoints", "data", "gpt", "report", "__init__"},
    "page": {"comm", "report"},
    "commands": ENGINE | {"checkpoints", "page", "report"},
    "cli": ENGINE
    | {"engine", "checkpoints", "commands", "data", "doctor", "gpt", "report", "train", "__init__"},
    "diagnosis": {"comm", "infinity"},
    "doctor": ENGINE | {"data", "diagnosis", "report", "train", "__init__"},
    "zero": ENGINE | {"engine", "checkpoints", "__init__"},
    "__init__": ENGINE | {"engine", "checkpoints", "initialize", "zero"},
    "__main__": {"cli"},
}
# Formats of others, which see a checkpoint as a Source only.
FOREIGN = {
    "source", "files", "safetensors", "torchfile", "deepspeed", "deepspeed_files",
    "consolidate",
}  # fmt: skip
# Which may import a library; all others may not.
LIBRARIES = {
    "mpi4py": ("comm/",),
    "h5py": ("infinity/", "checkpoints/", "data.py"),
    "cupy": ("gpu/",),
    "rich": ("cli.py", "report.py"),
    "argparse": ("cli.py", "initialize.py"),
}


def name_of(path: Path) -> str:
    """Return 'comm.courier' for hpczero/comm/courier.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


NAMES = {name_of(path) for path in MODULES}


def imports(path: Path) -> set[str]:
    """Return all that a file imports, also inside functions; our modules as 'hpczero.<name>'."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner.removeprefix("hpczero.") in NAMES else node.module)
    return {"hpczero.__init__" if name == "hpczero" else name for name in found}


def ours(path: Path) -> set[str]:
    """Return which modules of the package a file imports."""
    return {name.removeprefix("hpczero.") for name in imports(path) if name.startswith("hpczero.")}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    part = name_of(path).split(".")[0]
    assert part in MAY_IMPORT, f"say here what {part} may import"
    forbidden = {name for name in ours(path) if name.split(".")[0] not in MAY_IMPORT[part] | {part}}
    assert not forbidden


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_foreign_format_knows_a_source_only(name: str) -> None:
    allowed = {f"checkpoints.{other}" for other in FOREIGN} | {
        "errors",
        "infinity.hdf5",
        "infinity.__init__",
    }
    assert ours(PACKAGE / "checkpoints" / f"{name}.py") <= allowed


def test_nothing_imports_in_a_circle() -> None:
    graph = {name_of(path): ours(path) for path in MODULES}
    assert set().union(*graph.values()) <= NAMES
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("library", LIBRARIES)
def test_library_is_imported_in_its_place_only(library: str) -> None:
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in MODULES
        if library in {name.split(".")[0] for name in imports(path)}
    }
    assert {user for user in users if not user.startswith(LIBRARIES[library])} == set()


def test_import_is_light() -> None:
    code = "import json, sys, torch; before = set(sys.modules); import hpczero; print(json.dumps("
    code += "[sorted(sys.modules), sorted(set(sys.modules) - before)]))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment({}),
        check=True,
    )
    everything, new = json.loads(run.stdout)
    loaded = {name.removeprefix("hpczero.") for name in new if name.startswith("hpczero")}
    assert not loaded & {"cli", "train", "report", "data", "gpt", "checkpoints"}
    assert len(loaded) <= 58
    libraries = {name.split(".")[0] for name in everything}
    assert not libraries & {"h5py", "cupy", "rich", "typer", "click", "transformers"}
    assert not {name for name in new if name.startswith(("torch._dynamo", "torch._inductor"))}


@pytest.mark.parametrize("name", hpczero.__all__)
def test_public_name_is_documented(name: str) -> None:
    value = getattr(hpczero, name)
    if name == "__version__":
        assert isinstance(value, str)
        return
    assert value.__doc__
    for attribute, member in vars(value).items():
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function) and not attribute.startswith("_"):
            assert function.__doc__, f"{name}.{attribute}"


def test_every_module_says_what_it_is() -> None:
    silent = [
        name_of(path) for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []
