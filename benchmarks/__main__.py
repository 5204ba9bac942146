"""List, run and tabulate the benchmarks.

python -m benchmarks list
python -m benchmarks run                     # those without a result of this code and processor
python -m benchmarks run step-small-fp32 adam
python -m benchmarks run --quick --results /tmp/x
python -m benchmarks page                    # docs/results.md anew from benchmarks/results
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks import delayed, page, scaling
from benchmarks.machine import RESULTS, ROOT, dtypes, is_current
from benchmarks.registry import BENCHMARKS


def run(names: list[str], results: Path, quick: bool) -> None:
    """Run benchmarks one after the other; stop at the first that fails.

    Without names, those of which there is no result of this code and processor yet: so a run that
    was broken off goes on. In bf16 only where that isn't slow.
    """
    results.mkdir(parents=True, exist_ok=True)
    for name in names or _wanted(results, quick):
        command = BENCHMARKS[name].command(results.absolute() / f"{name}.json", quick=quick)
        print(f"== {name}: {shlex.join(command)}", flush=True)
        subprocess.run(command, check=True, cwd=ROOT)


def _wanted(results: Path, quick: bool) -> list[str]:
    kept = [name for name in BENCHMARKS if is_current(results / f"{name}.json")]
    slow = [name for name, benchmark in BENCHMARKS.items() if "bf16" in benchmark.arguments]
    if quick or "bf16" in dtypes():
        slow = []
    for why, left_out in (
        ("there is a result of this code", kept),
        ("this CPU is slow in bf16", slow),
    ):
        if left_out:
            print(f"== left out unless named, as {why}: {', '.join(left_out)}")
    return [name for name in BENCHMARKS if name not in {*kept, *slow}]


def main() -> None:
    """Obey the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="all benchmarks")
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("list", help="names, minutes, command lines")
    runs = commands.add_parser("run", help="run some, or all")
    runs.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    runs.add_argument("--quick", action="store_true", help="tiny sizes, to see that all run")
    runs.add_argument("--results", type=Path, default=RESULTS)
    pages = commands.add_parser("page", help="make the tables of docs/results.md")
    pages.add_argument("--check", action="store_true", help="change nothing; fail if they differ")
    args = parser.parse_args()
    if args.command == "list":
        for name, benchmark in BENCHMARKS.items():
            command = shlex.join(benchmark.command(RESULTS / f"{name}.json"))
            print(f"{name:18}{benchmark.minutes:5g} min  {command}")
    elif args.command == "run":
        unknown = [name for name in args.names if name not in BENCHMARKS]
        if unknown:
            parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
        run(args.names, args.results, args.quick)
    else:
        new = page.render(page.PAGE.read_text(), RESULTS)
        if args.check:
            sys.exit(int(new != page.PAGE.read_text()))
        page.PAGE.write_text(new)
        if [*RESULTS.glob("scaling-*.json")]:
            scaling.draw(scaling.load(RESULTS), page.PAGE.parent / "scaling.svg")
        if (RESULTS / "delayed.json").exists():
            rows = json.loads((RESULTS / "delayed.json").read_text())["rows"]
            delayed.draw(rows, page.PAGE.parent / "delayed.svg")


if __name__ == "__main__":
    main()
