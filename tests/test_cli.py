"""The command line: flags, errors, and what a run writes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from launch import mpiexec

from hpczero import cli, report
from hpczero.comm.timeline import WAITS
from hpczero.config import Config
from hpczero.partition.precision import multiplies_fast
from hpczero.train import Settings

METRICS = [
    "step", "loss", "lr", "grad_norm", "skipped", "step_seconds", "tokens_per_second", "waited",
    "carried",
]  # fmt: skip
SUMMARY = [
    "parameters", "ranks", "nodes", "stage", "dtype", "kernel", "memory", "memory_by_rank",
    "memory_formula", "memory_by_tier", "memory_formula_by_tier", "io", "io_minimum",
    "further_units", "traffic", "peak_pss", "peak_pss_by_rank", "seconds",
    "loss_first", "loss_last", "versions",
]  # fmt: skip
STATES = ["params", "grads", "states", "buffers"]
SMALL = "--layers 2 --hidden 64 --heads 2 --seq 16 --batch 2 --steps 3".split()  # noqa: SIM905


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what `hpczero train` would run with the given flags."""

    def parse(*flags: str | Path) -> Settings:
        caught: list[Settings] = []
        monkeypatch.setattr(cli, "train", lambda settings, world: caught.append(settings))
        cli.main(["train", *map(str, flags)])
        return caught[0]

    return parse


def adam(config: Config) -> dict[str, Any]:
    """Return the parameters of the optimizer."""
    parameters: dict[str, Any] = config.model_dump()["optimizer"]["params"]
    return parameters


@pytest.fixture
def usage_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return what `hpczero` says when it refuses the given flags."""
    monkeypatch.setattr(cli.watch, "release", lambda: None)

    def refuse(*flags: str | Path) -> str:
        with pytest.raises(SystemExit) as caught:
            cli.main([*map(str, flags)])
        assert caught.value.code == 2
        return capsys.readouterr().err

    return refuse


def test_defaults_are_stage_3_in_bf16(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "multiplies_fast", lambda dtype: True)
    found = settings()
    assert found.config.zero_optimization.stage == 3
    assert found.config.bf16.enabled
    assert found.config.gradient_clipping == 1
    assert adam(found.config)["lr"] == 2e-3
    assert found.config.train_micro_batch_size_per_gpu == cli.BATCH
    assert found.model == cli.PRESETS[cli.MODEL]
    assert (found.steps, found.out) == (cli.STEPS, Path("runs/default"))
    assert found.progress


def test_every_flag_arrives(settings: Any, tmp_path: Path) -> None:
    flags = """--stage 1 --dtype fp32 --model small --layers 3 --hidden 96 --heads 3 --seq 64
        --batch 5 --accumulate 2 --steps 7 --lr 0.5 --clip 0 --seed 9 --no-progress"""
    found = settings(
        *flags.split(), "--data", tmp_path, "--vocab", "300", "--out", tmp_path / "out"
    )
    assert found.config.zero_optimization.stage == 1
    assert not found.config.bf16.enabled
    assert found.config.train_batch_size == 10
    assert found.config.accumulation == 2
    assert found.config.gradient_clipping == 0
    assert adam(found.config)["lr"] == 0.5
    assert list(adam(found.config)["betas"]) == [0.9, 0.95]
    assert (found.model.layers, found.model.hidden, found.model.heads) == (3, 96, 3)
    assert (found.model.seq, found.steps, found.seed) == (64, 7, 9)
    assert (found.data, found.out, found.progress) == (tmp_path, tmp_path / "out", False)
    assert found.vocabulary == 300


def test_a_config_file_stands_alone_and_flags_go_before_it(settings: Any, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps({"zero_optimization": {"stage": 2}, "optimizer": {"params": {"eps": 1e-6}}})
    )
    alone = settings("--config", path).config
    assert alone.zero_optimization.stage == 2
    assert not alone.bf16.enabled
    assert alone.gradient_clipping == 0
    flags = settings("--config", path, "--stage", "1", "--lr", "0.25", "--dtype", "bf16").config
    assert flags.zero_optimization.stage == 1
    assert flags.bf16.enabled
    assert (flags.optimizer.params["lr"], flags.optimizer.params["eps"]) == (0.25, 1e-6)


def test_errors_name_the_flag_what_was_found_and_the_cure(usage_error: Any, tmp_path: Path) -> None:
    bad = tmp_path / "ds.json"
    bad.write_text('{"zero_optimisation": {"stage": 2}}')
    for flags, texts in {
        "train --stage 4": ["--stage", "4"],
        "train --model smal": ["--model", "tiny", "found 'smal'", "did you mean 'small'?"],
        "train --steps 0": ["--steps", "expected an integer from 1, found '0'"],
        "train --lr nan": ["--lr", "expected a number from 0, found 'nan'"],
        "train --hidden 100 --heads 3": ["hidden must be a multiple of heads", "100 % 3 = 1"],
        "train --step 3": ["unrecognized arguments: --step"],  # no abbreviations
        "": ["COMMAND"],
        f"train --config {tmp_path / 'none'}": ["--config", "No such file"],
        f"train --config {bad}": ["zero_optimisation", "did you mean 'zero_optimization'?"],
        f"train --data {tmp_path / 'none'}": ["expected a file of text or tokens", "found no"],
    }.items():
        error = usage_error(*flags.split())
        assert error.startswith("usage: hpczero")
        for text in texts:
            assert text in error, (flags, error)


def test_contradicting_batch_sizes_are_a_usage_error(usage_error: Any, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 6}')
    error = usage_error("train", "--config", path, "--batch", "4")
    assert "train_batch_size 6" in error


def test_data_that_is_no_tokens_is_a_usage_error(usage_error: Any, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"odd")
    assert "two bytes each (uint16), found 3 bytes" in usage_error(
        "train", "--data", tmp_path / "x.bin"
    )
    np.full(400, 500, dtype=np.uint16).tofile(tmp_path / "y.bin")
    assert "give at least 501 (--vocab)" in usage_error(
        "train", "--data", tmp_path / "y.bin", "--vocab", "64"
    )


def test_a_config_of_deepspeed(settings: Any, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        """{
            "train_batch_size": 12,
            "train_micro_batch_size_per_gpu": 3,
            "fp16": {"enabled": false, "loss_scale": 0, "initial_scale_power": 16},
            "bf16": {"enabled": true},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-4}},
            "zero_optimization": {
                "stage": 2,
                "reduce_bucket_size": 5e8,
                "overlap_comm": true,
                "contiguous_gradients": true
            },
            "gradient_clipping": 1.0,
            "steps_per_print": 10,
            "wall_clock_breakdown": false
        }"""
    )
    found = settings("--config", path, "--lr", "0.25", "--dtype", "fp32").config
    assert (found.compute, found.zero_optimization.stage, found.accumulation) == ("fp32", 2, 4)
    assert (found.scheduler.type, found.gradient_clipping) == ("WarmupLR", 1.0)
    assert adam(found)["lr"] == 0.25
    assert list(adam(found)["betas"]) == [0.9, 0.95]
    assert settings("--config", path).config.compute == "bf16"


def check_run(out: Path, ranks: int, stage: int, dtype: str) -> None:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert [list(line) for line in metrics] == [METRICS] * 3
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert all(line["skipped"] is False for line in metrics)
    assert all(line["grad_norm"] > 0 and line["lr"] == 2e-3 for line in metrics)
    assert all(line["step_seconds"] > 0 and line["tokens_per_second"] > 0 for line in metrics)
    for line in metrics:
        assert list(line["waited"]) == list(WAITS)
        assert all(seconds >= 0 for seconds in line["waited"].values())
        assert 0 < sum(line["waited"].values()) <= line["step_seconds"]
        assert sorted(line["carried"]) == ["gather", "ranks", "reduce"]

    summary = json.loads((out / "summary.json").read_text())
    assert not (out / "summary.json.part").exists()
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(summary) == sorted(SUMMARY)
    assert (summary["ranks"], summary["nodes"]) == (ranks, 1)
    assert (summary["stage"], summary["dtype"]) == (stage, dtype)
    assert summary["parameters"] == 2 * (12 * 64**2 + 13 * 64) + (256 + 16 + 2) * 64
    assert (summary["loss_first"], summary["loss_last"]) == (metrics[0]["loss"], metrics[2]["loss"])
    assert summary["memory_by_rank"][0] == summary["memory"]
    assert len(summary["memory_by_rank"]) == len(summary["peak_pss_by_rank"]) == ranks
    mean = sum(line["step_seconds"] for line in metrics[1:]) / 2
    assert summary["seconds"]["step"] == pytest.approx(mean)
    part = summary["seconds"]["gathers_hidden"]
    # Stage 0 gathers nothing, and stage 3 on one node only looks at the weights.
    assert 0 <= part <= 1 if stage == 2 else part is None
    for memory in (summary["memory_formula"], *summary["memory_by_rank"]):
        assert list(memory) == STATES
    for state in STATES[:3]:
        assert summary["memory"][state] == pytest.approx(summary["memory_formula"][state], rel=0.01)
    assert 0 < summary["memory"]["buffers"] <= 1.01 * summary["memory_formula"]["buffers"]
    assert list(summary["traffic"]) == list(report.COLLECTIVES)
    for line in summary["traffic"].values():
        assert sorted(line) == ["bytes", "calls", "multiples", "sent"]
    multiples = sum(line["multiples"] for line in summary["traffic"].values())
    assert multiples == pytest.approx([2, 2, 2, 3][stage], rel=0.01)
    assert summary["peak_pss"] == max(summary["peak_pss_by_rank"])
    assert sorted(summary["versions"]) == ["hpczero", "mpi", "mpi4py", "numpy", "python", "torch"]


def test_a_run_on_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["train", *SMALL, "--out", str(tmp_path)])
    fast = multiplies_fast(torch.bfloat16)
    check_run(tmp_path, ranks=1, stage=3, dtype="bf16" if fast else "fp32")
    output = capsys.readouterr().out
    assert "step 1/3  loss 5." in output
    assert "plain data parallel" in output


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_run_on_two_ranks(tmp_path: Path, stage: int) -> None:
    flags = ["--stage", str(stage), "--dtype", "fp32", "--no-progress"]
    job = mpiexec(2, "-m", "hpczero", "train", *SMALL, *flags, "--out", str(tmp_path))
    assert job.returncode == 0, job.stdout
    check_run(tmp_path, ranks=2, stage=stage, dtype="fp32")
    assert "step 1/3" not in job.stdout
    assert job.stdout.count("plain data parallel") == 1


def test_without_a_dtype_bf16_is_taken_only_where_it_is_fast(
    settings: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "multiplies_fast", lambda dtype: False)
    assert settings().config.compute == "fp32"
    assert "slow in bf16" in capsys.readouterr().out
    assert settings("--dtype", "bf16").config.compute == "bf16"
    path = tmp_path / "ds.json"
    path.write_text('{"bf16": {"enabled": true}}')
    assert settings("--config", path).config.compute == "bf16"
    assert not capsys.readouterr().out


@pytest.mark.parametrize("dtype", cli.DTYPES)
def test_dtype_turns_one_on_and_the_others_off(settings: Any, tmp_path: Path, dtype: str) -> None:
    assert settings("--dtype", dtype).config.compute == dtype
    path = tmp_path / "ds.json"
    path.write_text('{"fp16": {"enabled": true}}')
    assert settings("--config", path).config.compute == "fp16"
    assert settings("--config", path, "--dtype", dtype).config.compute == dtype


def test_a_step_that_overflows_is_marked_as_skipped(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"fp16": {"enabled": true, "initial_scale_power": 40, "hysteresis": 1}}')
    cli.main(["train", *SMALL, "--config", str(path), "--out", str(tmp_path)])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert [(line["skipped"], line["grad_norm"]) for line in metrics] == [(True, None)] * 3
    assert json.loads((tmp_path / "summary.json").read_text())["dtype"] == "fp16"


@pytest.mark.parametrize("name", ["x.bin", "x.h5"])
def test_a_run_on_tokens(tmp_path: Path, name: str) -> None:
    values = (np.arange(500) ** 2 % 301).astype(np.uint16)
    if name == "x.bin":
        values.tofile(tmp_path / name)
    else:
        with h5py.File(tmp_path / name, "w") as file:
            file["tokens"] = values
    cli.main(["train", *SMALL, "--data", str(tmp_path / name), "--out", str(tmp_path)])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["parameters"] == 2 * (12 * 64**2 + 13 * 64) + (320 + 16 + 2) * 64
    assert summary["loss_first"] == pytest.approx(math.log(320), rel=0.02)


def test_a_trace_shows_all_ranks_on_one_clock(tmp_path: Path) -> None:
    flags = [
        "--trace",
        "--stage",
        "2",
        "--no-progress",
        "--save-every",
        "2",
        "--out",
        str(tmp_path),
    ]
    job = mpiexec(2, "-m", "hpczero", "train", *SMALL, *flags)
    assert job.returncode == 0, job.stdout
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    for rank in (0, 1):
        mine = [bar for bar in bars if bar["pid"] == rank]
        causes = {bar["cat"] for bar in mine}
        assert {"forward", "backward", "optimizer", "gather", "reduce", "io"} <= causes
        assert {"wait", "wait for new weights", "wait for exchange"} <= causes
        assert sum(bar["name"] == "forward" for bar in mine) == 3
        assert {bar["tid"] for bar in mine} == {0, 1, 2, 3}
    # A collective ends for one rank when the other has come: their clocks must agree on that.
    ends = [
        [b["ts"] + b["dur"] for b in bars if (b["pid"], b["tid"], b["cat"]) == (r, 2, "reduce")]
        for r in (0, 1)
    ]
    starts = [
        [b["ts"] for b in bars if (b["pid"], b["tid"], b["cat"]) == (r, 2, "reduce")]
        for r in (0, 1)
    ]
    slack = 5e4  # microseconds
    assert all(b < e + slack for b, e in zip(starts[0], ends[1], strict=True))
    assert all(b < e + slack for b, e in zip(starts[1], ends[0], strict=True))


def test_a_larger_vocabulary_can_be_asked_for(tmp_path: Path) -> None:
    cli.main(["train", *SMALL, "--vocab", "1000", "--out", str(tmp_path), "--no-progress"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    # Nothing is learned yet. (Runs of one letter, which tied weights foresee, are in any text.)
    assert math.log(512) < summary["loss_first"] < math.log(1100)


def test_offloading_changes_places_and_no_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for offload in ("none", "host", "file"):
        out = tmp_path / offload
        cli.main(["train", *SMALL, "--offload", offload, "--out", str(out), "--no-progress"])
        lines = (out / "metrics.jsonl").read_text().splitlines()
        summary = json.loads((out / "summary.json").read_text())
        found[offload] = [json.loads(line)["loss"] for line in lines]
        where = {kind: summary["memory_by_tier"][_tier(offload, kind)][kind] for kind in STATES[:3]}
        assert where == {kind: summary["memory"][kind] for kind in STATES[:3]}
        told = capsys.readouterr().out
        assert ("States of rank 0 by tier" in told) == (offload != "none")
        assert ("Moved by rank 0" in told) == (offload != "none")
        for way, least in summary["io_minimum"].items():
            assert 0 <= summary["io"][way] - least < 4096 * 100
            assert (least > 0) == (offload == ("host" if "host" in way else "file"))
            assert (report.MOVES[way] in told) == (least > 0)
    assert found["none"] == found["host"] == found["file"]
    assert not list((tmp_path / "file" / "offload").iterdir())


def _tier(offload: str, kind: str) -> str:
    return {"none": "device", "host": "device" if kind == "params" else "host"}.get(offload, "file")


def test_flags_of_offloading_are_keys(settings: Any, tmp_path: Path) -> None:
    def keys(*flags: str) -> tuple[Any, ...]:
        zero = settings(*flags).config.zero_optimization
        optimizer, param = zero.offload_optimizer, zero.offload_param
        return param.device, zero.gradients_on, optimizer.device, optimizer.nvme_path

    assert keys() == ("none", "none", "none", None)
    assert keys("--offload", "host") == ("none", "cpu", "cpu", None)
    assert keys("--offload", "host", "--stage", "1") == ("none", "none", "cpu", None)
    here = ("--offload-dir", "/here")
    assert keys("--offload", "file", *here) == ("nvme", "nvme", "nvme", "/here")
    assert keys("--offload", "file", "--stage", "2", *here) == ("none", "nvme", "nvme", "/here")
    assert keys("--states-on", "file", *here) == ("none", "nvme", "nvme", "/here")
    assert keys("--states-on", "file", "--grads-on", "device", *here)[1] == "none"
    assert keys("--params-on", "host") == ("cpu", "none", "none", None)
    path = tmp_path / "ds.json"
    optimizer = {"device": "nvme", "nvme_path": "/there"}
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, "offload_optimizer": optimizer}}))
    for flags in ((), ("--offload", "file"), ("--grads-on", "device")):
        assert keys("--config", str(path), *flags)[2:] == ("nvme", "/there")
        assert keys("--config", str(path), *flags, *here)[2:] == ("nvme", "/here")


# Resuming #


def losses(out: Path) -> list[float]:
    """Return the losses in metrics.jsonl, whose steps follow one another."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


@pytest.fixture
def run_train(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs `hpczero train`, here or on ranks, and gives what it prints."""

    def run(out: Path, steps: int, *flags: str | Path, ranks: int = 1, batch: int = 2) -> str:
        size = [*SMALL, "--steps", str(steps), "--batch", str(batch), "--save-every", "2"]
        argv = ["train", *size, *map(str, flags), "--out", str(out)]
        if ranks == 1:
            cli.main(argv)
            return capsys.readouterr().out
        job = mpiexec(ranks, "-m", "hpczero", *argv)
        assert job.returncode == 0, job.stdout
        return job.stdout

    return run


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_run(tmp_path: Path, run_train: Any, ranks: int) -> None:
    flags = ["--accumulate", "2", "--keep-last", "2", "--resume", "auto"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_train(whole, 6, *flags, ranks=ranks)
    assert "resumed" not in run_train(parts, 3, *flags, ranks=ranks)
    # As if killed in step 4: its line is half there, its checkpoint isn't.
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 9')
    output = run_train(parts, 6, *flags, ranks=ranks)
    assert output.count(f"resumed {parts / 'checkpoints' / 'global_step3'} after step 3") == 1
    assert "step 3/6" not in output
    assert "step 6/6  loss" in output
    assert losses(parts) == losses(whole)
    found = {path.name for path in (parts / "checkpoints").iterdir()}
    assert found == {"global_step4", "global_step6", "latest", ".lock"}
    assert json.loads((parts / "summary.json").read_text())["loss_first"] == losses(whole)[0]
    assert "step 6 is done already, of 6" in run_train(parts, 6, *flags, ranks=ranks)
    assert losses(parts) == losses(whole)


@pytest.mark.slow
def test_a_run_resumes_on_other_ranks_from_any_folder(tmp_path: Path, run_train: Any) -> None:
    flags = ["--dtype", "fp32", "--no-progress"]
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    run_train(whole, 6, *flags, ranks=2, batch=2)
    saved = whole / "checkpoints" / "global_step2"
    run_train(rest, 6, *flags, "--stage", "1", "--resume", saved, batch=4)
    lines = [json.loads(line) for line in (rest / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 4, 5, 6]
    assert [line["loss"] for line in lines] == pytest.approx(losses(whole)[2:], rel=1e-5)


def test_nothing_to_resume_from_is_one_line(tmp_path: Path) -> None:
    flags = [*SMALL, "--dtype", "fp32", "--out", str(tmp_path / "out"), "--resume", str(tmp_path)]
    job = mpiexec(2, "-m", "hpczero", "train", *flags)
    assert job.returncode == 1
    line = f"hpczero: --resume: expected a checkpoint in {tmp_path}, found none"
    ours, _, launchers = job.stdout.partition("-" * 40)  # Open MPI says that a rank exited with 1
    assert [text for text in ours.splitlines() if text] == [line]
    assert "hpczero:" not in launchers and "Traceback" not in launchers


def test_a_checkpoint_of_another_model_is_an_error(
    tmp_path: Path,
    run_train: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli.watch, "release", lambda: None)
    run_train(tmp_path, 2)
    with pytest.raises(SystemExit) as caught:
        run_train(tmp_path, 3, "--hidden", "32", "--resume", "auto")
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert error.count("entries don't match the model") == 1
    assert "other shape: parameter 'embed.weight' is (256, 32) here, (256, 64) there" in error
    assert len(losses(tmp_path)) == 2


def steps(count: int, loss: float = 1.0) -> list[report.Step]:
    return [report.Step(n, loss / n, 0.1 * n, 1.0, False, 0.5, 2.0) for n in range(1, count + 1)]


@pytest.mark.parametrize("count", [1, 3, 300])
def test_the_loss_is_drawn(tmp_path: Path, count: int) -> None:
    path = tmp_path / "loss.png"
    report.draw(path, steps(count))
    picture = path.read_bytes()
    assert picture.startswith(b"\x89PNG")
    width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (960, 600)
    report.draw(path, steps(count, loss=float("nan")))


def test_without_matplotlib_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report.draw(tmp_path / "loss.png", steps(2))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("no loss.png: ")
    assert "pip install matplotlib" in lines[0]
    assert not (tmp_path / "loss.png").exists()


def test_a_usage_error_is_printed_once_and_ends_all_ranks(tmp_path: Path) -> None:
    for flags in (["--model", "smal"], ["--data", str(tmp_path / "missing")]):
        job = mpiexec(2, "-m", "hpczero", "train", *SMALL, *flags, "--out", str(tmp_path / "out"))
        assert job.returncode == 2
        assert job.stdout.count("hpczero train: error:") == 1
        assert "Traceback" not in job.stdout


def test_json_has_no_nan() -> None:
    step = report.Step(1, float("nan"), 0.1, float("inf"), False, 0.5, 2.0)
    assert json.loads(report.to_json(step._asdict()))["loss"] is None
    assert json.loads(report.to_json({"a": [float("nan"), 1 / 3]})) == {"a": [None, 1 / 3]}


def test_the_import_of_hpczero_is_light() -> None:
    heavy = ("h5py", "cupy", "rich", "matplotlib", "hpczero.cli", "hpczero.train")
    program = f"import hpczero, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(done.stdout.replace("'", '"')))
    assert loaded <= {"argparse"}  # which torch may load
