"""Every way in which one rank can fail ends all ranks within seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launch import ROOT, Job, alive, mpiexec

SECONDS = 5  # from an event to the end of all ranks

# The package without what its __init__ imports (torch): most of these jobs need no more.
START = f"""
import os, signal, sys, threading, time, types
sys.modules["hpczero"] = package = types.ModuleType("hpczero")
package.__path__ = [{str(ROOT / "hpczero")!r}]
from mpi4py import MPI
from hpczero.comm import watch
watch.install()
watch.here(step=12)
world = MPI.COMM_WORLD
notes = os.environ["NOTES"]
open(f"{{notes}}/{{os.getpid()}}", "x").close()
world.Barrier()

def event():
    with open(f"{{notes}}/event", "x") as file:
        file.write(str(time.time()))
"""

# Rank 1 of several does this while the others wait for it in a barrier.
FAILURES = {
    "exception": "event(); raise ValueError('this is it')",
    "exception beside a thread in MPI": """
threading.Thread(target=world.Barrier, daemon=True).start()
time.sleep(0.2)
event()
raise ValueError('this is it')
""",
    "exception with a foreign hook": """
sys.excepthook = lambda *error: print('pretty')
event()
raise ValueError('this is it')
""",
    "thread": """
def work():
    event()
    raise ValueError('this is it')
threading.Thread(target=work, name='worker').start()
world.Barrier()
""",
    "loader thread": """
import concurrent.futures
def load():
    event()
    raise ValueError('this is it')
with concurrent.futures.ThreadPoolExecutor(1) as pool:
    print(pool.submit(load).result())
""",
    "forward hook": """
import torch
model = torch.nn.Linear(2, 2)
def hook(*args):
    event()
    raise ValueError('this is it')
model.register_forward_hook(hook)
model(torch.ones(1, 2))
""",
    "gradient hook": """
import torch
model = torch.nn.Linear(2, 2)
def hook(*args):
    event()
    raise ValueError('this is it')
model.weight.register_post_accumulate_grad_hook(hook)
model(torch.ones(1, 2)).sum().backward()
""",
    "loader worker": """
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        raise ValueError('this is it')
event()
list(torch.utils.data.DataLoader(Data(), num_workers=1))
""",
    "keyboard interrupt": "event(); signal.raise_signal(signal.SIGINT)",
}

EXITS = {
    "sys.exit(3)": "event(); sys.exit(3)",
    "raise SystemExit(3)": "event(); raise SystemExit(3)",
    "exit(3)": "event(); exit(3)",
    "sys.exit(text)": "event(); sys.exit('this is it')",
    "in a function": "def main():\n    event()\n    return 3\nsys.exit(main())",
    "argparse": "import argparse; event(); argparse.ArgumentParser().parse_args(['--odd'])",
    "os._exit(3)": "event(); os._exit(3)",
}

KILLS = {
    "SIGTERM": "event(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
    "SIGTERM in a barrier": """
late = threading.Timer(0.3, lambda: (event(), os.kill(os.getpid(), signal.SIGTERM)))
late.start()
world.Barrier()
""",
    "SIGSEGV": "import ctypes; event(); ctypes.string_at(0)",
    "SIGKILL": "event(); os.kill(os.getpid(), signal.SIGKILL)",
}

FINE = {
    "caught SystemExit": """
try:
    sys.exit(3)
except SystemExit as error:
    assert error.code == 3
""",
    "exit of a thread": """
thread = threading.Thread(target=sys.exit, args=(3,))
thread.start()
thread.join()
""",
    "forked child raises": """
if not (child := os.fork()):
    raise ValueError('only in the child')
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
""",
    "forked child exits": """
if not (child := os.fork()):
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
""",
    "forked child ended by SIGTERM": """
if not (child := os.fork()):
    time.sleep(60)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
""",
    "loader workers": """
import torch
loader = torch.utils.data.DataLoader(range(8), batch_size=2, num_workers=2)
assert len(list(loader)) == 4
""",
}


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    """Run `mpiexec -n N python -c START + body`."""

    def run(n: int, body: str, before: str = "") -> Job:
        script = f"{before}{START}\n{body}"
        return mpiexec(n, "-c", script, timeout=30, env={"NOTES": str(tmp_path)})

    return run


@pytest.fixture
def rank_1(job: Callable[..., Job], tmp_path: Path) -> Callable[..., Job]:
    """Let rank 1 do the body while the others sit in a barrier, and see that all end in time."""

    def run(n: int, body: str, before: str = "") -> Job:
        indented = "\n".join(f"    {line}" for line in body.strip().split("\n"))
        done = job(n, f"if world.rank == 1:\n{indented}\nworld.Barrier()", before)
        notes = {path.name: path.read_text() for path in tmp_path.iterdir()}
        event = float(notes.pop("event", "inf"))
        assert len(notes) == n, done.stdout
        while any(alive(int(pid)) for pid in notes):
            assert time.time() < event + SECONDS, f"ranks outlive the launcher\n{done.stdout}"
            time.sleep(0.02)
        print(f"all gone {time.time() - event:.2f} s after the event\n{done.stdout}")
        assert time.time() < event + SECONDS
        return done

    return run


def header(job: Job, event: str) -> int:
    """Return where the rank's line is in the output; there must be one of them."""
    start, end = "hpczero: rank 1 of ", f" {event} at step 12"
    lines = job.stdout.splitlines()
    found = [at for at, line in enumerate(lines) if line.startswith(start) and line.endswith(end)]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("name", FAILURES)
def test_exception_ends_all_ranks(name: str, rank_1: Callable[..., Job]) -> None:
    done = rank_1(4 if name == "exception" else 2, FAILURES[name])
    assert done.returncode != 0
    at = header(done, "failed in thread 'worker'" if name == "thread" else "failed")
    after = done.stdout.splitlines()[at + 1 :]
    last = "KeyboardInterrupt" if name == "keyboard interrupt" else "ValueError: this is it"
    assert "Traceback (most recent call last):" in after
    end = max(number for number, line in enumerate(after) if line == last)
    launcher = "\n".join(after[end + 1 :])  # it and the MPI library may have the last word
    assert "hpczero" not in launcher
    assert "Traceback" not in launcher


@pytest.mark.parametrize("name", EXITS)
def test_failing_exit_ends_all_ranks(name: str, rank_1: Callable[..., Job]) -> None:
    done = rank_1(2, EXITS[name])
    assert done.returncode != 0
    if name != "os._exit(3)":  # nothing of ours runs then
        status = {"argparse": 2, "sys.exit(text)": 1}.get(name, 3)
        at = header(done, f"left with exit code {status}")
        assert name != "sys.exit(text)" or "this is it" in done.stdout.splitlines()[at + 1 :]


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KILLS)
def test_signal_ends_all_ranks(name: str, n: int, rank_1: Callable[..., Job]) -> None:
    done = rank_1(n, KILLS[name])
    assert done.returncode != 0
    if name.startswith("SIGTERM"):
        header(done, "was ended by signal SIGTERM")
    if name == "SIGSEGV":
        assert "Fatal Python error: Segmentation fault" in done.stdout
        assert 'File "<string>"' in done.stdout


@pytest.mark.parametrize("name", FINE)
def test_good_job_ends_well(name: str, rank_1: Callable[..., Job]) -> None:
    assert rank_1(2, FINE[name]).returncode == 0


def test_disagreement_is_printed_by_its_reporter_only(job: Callable[..., Job]) -> None:
    done = job(4, "from hpczero.errors import Disagreement\nraise Disagreement('odd', reporter=1)")
    assert done.returncode != 0
    assert done.stdout.count("Disagreement: odd") == 1
    header(done, "failed")


def test_disagreement_ends_the_job_without_its_reporter(job: Callable[..., Job]) -> None:
    done = job(
        2,
        "from hpczero.errors import Disagreement\n"
        "if world.rank == 1: raise Disagreement('odd', reporter=0)\n"
        "world.Barrier()",
    )
    assert done.returncode != 0
    header(done, "failed")


def test_failing_exit_that_all_agreed_on(job: Callable[..., Job]) -> None:
    done = job(2, "watch.release()\nsys.exit(3)")
    assert done.returncode == 3
    assert "hpczero:" not in done.stdout


def test_callbacks_run_at_a_clean_exit_only(job: Callable[..., Job], tmp_path: Path) -> None:
    body = """
def say(word):
    world.Barrier()
    world.rank or print(word, flush=True)
watch.at_exit(lambda: say("first"))
watch.at_exit(lambda: say("second"))
"""
    done = job(2, body)
    assert done.returncode == 0
    assert done.stdout.split() == ["second", "first"]
    failed = job(2, f"{body}\nsys.exit(3)")
    assert failed.returncode != 0
    assert "first" not in failed.stdout


def test_one_rank_is_left_alone(job: Callable[..., Job]) -> None:
    failed = job(1, "raise ValueError('this is it')")
    assert failed.returncode == 1
    assert "hpczero:" not in failed.stdout
    assert job(1, "sys.exit(7)").returncode == 7
