"""Make the tables of docs/results.md from the JSONs in benchmarks/results, and nothing else.

A table stands between `<!-- NAME -->` and `<!-- end -->`; what is around it is written by hand.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.registry import BENCHMARKS

PAGE = Path(__file__).parents[1] / "docs" / "results.md"

Result = dict[str, Any]
_MARKED = re.compile(r"(<!-- (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(text: str, results: Path) -> str:
    """Return the page with every table made anew.

    Raises:
        KeyError: a marker names no table.
    """

    def table(match: re.Match[str]) -> str:
        make, names = TABLES[match["name"]]
        paths = [results / f"{name}.json" for name in names]
        missing = [path.stem for path in paths if not path.is_file()]
        if missing:
            text = f"Not measured yet: `python -m benchmarks run {' '.join(missing)}`."
        else:
            text = make(*(json.loads(path.read_text()) for path in paths))
        return f"{match[1]}\n{text}\n\n{match[3]}"

    return _MARKED.sub(table, text)


def markers(text: str) -> list[str]:
    """Return the names of the tables in a page."""
    return [match["name"] for match in _MARKED.finditer(text)]


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def origin(result: Result) -> str:
    """Say in a line how a result came about."""
    machine, versions = result["machine"], result["versions"]
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    tree = " with changes" if result["dirty"] else ""
    memory = machine["memory"] / 2**30
    return (
        f"`{result['command']}`  \n{result['date']}, commit {result['commit']}{tree}; "
        f"{machine['cpu']}, {machine['cores']} cores, {memory:.0f} GiB; {software}."
    )


# ---- one function per kind of table


def step(result: Result) -> str:
    rows = result["rows"]
    head = ["", "step, s", "min .. max", "over the floor", "tokens/s"]
    head += ["sent per step, MB", "tensors held, MB", "peak PSS, MB", "loss"]
    lines = [
        [
            name,
            f"{row['median']:.3f}",
            f"{row['min']:.3f} .. {row['max']:.3f}",
            "{:.2f} ({:.2f} .. {:.2f})".format(row["over_floor"], *row["over_floor_quartiles"]),
            f"{row['tokens_per_second']:.0f}",
            f"{row['sent'] / 1e6:.1f}",
            f"{max(row['held']) / 1e6:.1f}",
            f"{max(row['peak_pss']) / 1e6:.0f}",
            f"{row['rounds'][0]['losses'][-1]:.5f}",
        ]
        for name, row in rows.items()
    ]
    said = (
        f"{result['model']}: {result['parameters']:,} parameters, {result['dtype']}, "
        f"{result['ranks']} ranks of {threads(result)}, micro-batch {result['micro_batch']} x "
        f"{result['seq']} tokens. {equal_work(rows)}"
    )
    absent = f" Not installed: {', '.join(result['absent'])}." if result["absent"] else ""
    return "\n\n".join([said + absent, markdown(head, lines), origin(result)])


def equal_work(rows: dict[str, Any]) -> str:
    """Say how far apart the losses of all that communicate are."""
    curves = [
        each["losses"] for name, row in rows.items() if name != "floor" for each in row["rounds"]
    ]
    if not curves:
        return ""
    apart = max(max(losses) - min(losses) for losses in zip(*curves, strict=True))
    return (
        f"Over the first {len(curves[0])} steps the losses of all contenders that communicate are "
        f"within {apart:.1e} of each other."
    )


def threads(result: Result) -> str:
    count = result["threads_per_rank"]
    return f"{count} thread{'' if count == 1 else 's'}"


def collectives(result: Result) -> str:
    names = list(result["rows"][0]["contenders"])
    lines = [
        [
            f"{row['collective']} {row['dtype']} {row['megabytes']} MB",
            *(f"{row['contenders'][name]['gigabytes_per_second']:.2f}" for name in names),
        ]
        for row in result["rows"]
    ]
    said = f"GB/s on {result['ranks']} ranks, {result['nodes']} node, {threads(result)} per rank."
    return "\n\n".join([said, markdown(["", *names], lines), origin(result)])


def scaling(*results: Result) -> str:
    from benchmarks.scaling import MODES, efficiencies

    lines = []
    for mode in MODES:
        shares = dict(efficiencies(list(results), mode))
        for result in results:
            row = result["rows"].get(mode)
            if row is None:
                continue
            lines.append(
                [
                    f"{mode}, {result['ranks']} rank{'s' if result['ranks'] > 1 else ''}",
                    str(row["micro_batch"]),
                    f"{row['median']:.3f}",
                    f"{row['tokens_per_second']:.0f}",
                    f"{row['tflops_per_rank']:.4f}",
                    f"{shares[result['ranks']]:.2f}",
                ]
            )
    first = results[0]
    head = ["", "micro-batch", "step, s", "tokens/s", "TFLOP/s per rank", "efficiency"]
    said = (
        f"{first['model']}: {first['parameters']:,} parameters, stage {first['stage']}, "
        f"{first['dtype']}, {threads(first)} per rank."
    )
    return "\n\n".join([said, markdown(head, lines), *map(origin, results)])


def startup(result: Result) -> str:
    imports = [
        [
            name,
            f"{row['median']:.2f}",
            str(row["files_opened"]),
            str(row["modules"]),
            "?" if row["system_calls"] is None else str(row["system_calls"]),
        ]
        for name, row in result["rows"]["imports"].items()
    ]
    head = ["import", "s", "files opened by Python", "modules", "calls to the file system"]
    steps = [
        [name, f"{row['median']:.2f}", f"{min(row['seconds']):.2f} .. {max(row['seconds']):.2f}"]
        for name, row in result["rows"]["first_steps"].items()
    ]
    launched = [f"mpiexec -n {result['ranks']} to the end of the first step", "s", "min .. max"]
    return "\n\n".join([markdown(head, imports), markdown(launched, steps), origin(result)])


def adam(result: Result) -> str:
    counts = list(result["rows"])
    head = [""]
    for count in counts:
        head += [f"ns per parameter, {count} thread{'' if count == '1' else 's'}", "of the sweep"]
    lines = []
    for name in result["rows"][counts[0]]:
        line = [name]
        for count in counts:
            row = result["rows"][count][name]
            line += [f"{row['ns_per_parameter']:.3f}", f"{row['of_the_sweep']:.2f}"]
        lines.append(line)
    said = (
        f"{result['parameters']:,} parameters, {result['bytes_per_parameter']} bytes each, "
        f"ours in {result['kernel']}."
    )
    return "\n\n".join([said, markdown(head, lines), origin(result)])


def checkpoint(result: Result) -> str:
    lines = [
        [
            name,
            *(f"{row[what]['gigabytes_per_second']:.2f}" for what in ("save", "load")),
            *(f"{row[what]['speed_over_dd']:.2f}" for what in ("save", "load")),
        ]
        for name, row in result["rows"].items()
        if name != "asynchronous"
    ]
    lost = result["rows"]["asynchronous"]
    said = (
        f"{result['model']}: {result['bytes'] / 1e9:.2f} GB, stage {result['stage']}, "
        f"{result['ranks']} ranks, {result['file_system']}. An asynchronous save blocks for "
        f"{lost['blocked_over_synchronous']:.0%} of a synchronous one, with the slower steps "
        f"beside it {lost['blocked_and_slower_steps_over_synchronous']:.0%}."
    )
    head = ["", "save, GB/s", "load, GB/s", "save, x dd", "load, x dd"]
    return "\n\n".join([said, markdown(head, lines), origin(result)])


def tiers(result: Result) -> str:
    def median(kind: str, name: str) -> float:
        return statistics.median(result["rows"][kind]["seconds"][name])

    disk = [
        [
            name,
            *(f"{row[way]['gigabytes_per_second']:.2f}" for way in ("read", "write")),
            ", ".join(
                f"{w}: {row[w]['setting']}" for w in ("read", "write") if "setting" in row[w]
            ),
        ]
        for name, row in result["rows"]["disk"].items()
    ]
    update, slices = result["rows"]["update"], result["rows"]["slices"]
    times = [[name, f"{median('update', name):.3f}"] for name in update["seconds"]]
    ways = [[name, f"{median('slices', name):.3f}"] for name in slices["seconds"]]
    numel, nbytes = update["parameters"], slices["bytes"]
    return "\n\n".join(
        [
            markdown([f"{result['bytes'] / 2**30:g} GiB, GB/s", "read", "write", ""], disk),
            markdown([f"update of {numel / 1e6:.0f} M parameters", "s"], times),
            f"The update in files takes {update['over_the_slower']:.2f} of the slower of the two.",
            markdown([f"{nbytes / 2**20:.0f} MiB to {result['ranks']} ranks", "s"], ways),
            origin(result),
        ]
    )


def delayed(result: Result) -> str:
    rows = result["rows"]
    marks = [step for step in (1, 39, 50, 100, 200, 300) if step <= result["steps"]]
    last = max(1, result["steps"] // 10)
    head = ["loss", *(f"step {step}" for step in marks), f"mean of the last {last}"]
    lines = [
        [name, *(f"{row[step - 1]:.4f}" for step in marks), f"{statistics.fmean(row[-last:]):.4f}"]
        for name, row in rows.items()
    ]
    return "\n\n".join([markdown(head, lines), origin(result)])


def capacity(result: Result) -> str:
    lines = [
        [name, "none", "", "", "", row["error"]]
        if "error" in row
        else [
            name,
            f"{row['parameters'] / 1e6:.0f} M",
            str(row["layers"]) + (" (the most tried)" if row["layers"] == row["at_most"] else ""),
            f"{row['peak'] / 2**20:.0f}",
            f"{row['seconds'][-1]:.1f}",
            f"{row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}",
        ]
        for name, row in result["rows"].items()
    ]
    head = [
        "",
        "parameters",
        "layers",
        "peak PSS, MiB",
        "step, s",
        f"loss, {result['steps']} steps",
    ]
    said = (
        f"At most {result['limit'] / 2**20:.0f} MiB of peak PSS per rank, {result['ranks']} ranks, "
        f"{result['dtype']}, layers of {result['shape']} (hidden x heads x tokens)."
    )
    return "\n\n".join([said, markdown(head, lines), origin(result)])


def equal(result: Result) -> str:
    lines = [
        [
            name,
            f"{row['parameters'] / 1e6:.0f} M",
            f"{row['peak'] / 2**20:.0f}",
            f"{row['seconds'][-1]:.1f}",
            " ".join(f"{loss:.6f}" for loss in row["losses"]),
        ]
        for name, row in result["rows"].items()
    ]
    head = ["", "parameters", "peak PSS, MiB", "step, s", "losses"]
    return "\n\n".join([markdown(head, lines), origin(result)])


def slow_network(result: Result) -> str:
    rows, rate = result["rows"], result["wire"]["across"]["bytes_per_second_of_64_MiB"]
    lines = []
    for name, row in rows.items():
        first, last = row["losses"][0], row["losses"][-1]
        alone, hidden = rows.get(f"floor {name.split()[-1]}"), row["gathers_hidden"]
        network = row["payload_per_step"] / 2 / rate  # half goes each way
        lines.append(
            [
                name,
                f"{row['median']:.3f}",
                f"{row['min']:.3f} .. {row['max']:.3f}",
                f"{row['payload_per_step'] / 1e6:.1f}",
                f"{network / alone['median']:.2f}" if alone else "",
                "" if hidden is None else f"{hidden:.0%}",
                f"{first:.4f} -> {last:.4f}",
            ]
        )
    head = ["", "step, s", "min .. max", "MB on the wire per step", "network / compute"]
    head += ["gathers hidden", "loss"]
    return "\n\n".join([markdown(head, lines), origin(result)])


_MAKERS: dict[str, Callable[..., str]] = {
    "step": step,
    "collectives": collectives,
    "startup": startup,
    "adam": adam,
    "checkpoint": checkpoint,
    "slow_network": slow_network,
    "capacity": capacity,
    "equal": equal,
    "delayed": delayed,
    "tiers": tiers,
}
TABLES: dict[str, tuple[Callable[..., str], list[str]]] = {
    **{
        name: (_MAKERS[benchmark.module], [name])
        for name, benchmark in BENCHMARKS.items()
        if benchmark.module in _MAKERS
    },
    "scaling": (scaling, [name for name, one in BENCHMARKS.items() if one.module == "scaling"]),
}
"""By marker: what makes the table, and the results that it takes."""
