"""The command line: flags and a DeepSpeed-style JSON become one Settings."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch

from hpczero.comm import probe, watch
from hpczero.comm.world import World
from hpczero.config import Config
from hpczero.data import DataError
from hpczero.doctor import doctor
from hpczero.errors import CheckpointError, ConfigError
from hpczero.gpt import PRESETS, GPTConfig
from hpczero.partition.offload import TIERS
from hpczero.partition.precision import multiplies_fast
from hpczero.train import CHECKPOINTS, Settings, train

DEVICES: dict[str, str] = {tier: device for device, tier in TIERS.items()}
"""The tiers, and DeepSpeed's names of them."""

OFFLOADS: dict[str, dict[str, str]] = {
    "none": dict.fromkeys(("params", "grads", "states"), "device"),
    "host": {"grads": "host", "states": "host"},
    "file": dict.fromkeys(("params", "grads", "states"), "file"),
}
"""What each --offload keeps where, as far as the stage shards it."""

# What holds without --config; Config() itself is DeepSpeed's bare default, stage 0 in fp32. Also in
# fp32 where bf16 is slow.
DEFAULTS: Mapping[str, Any] = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "gradient_clipping": 1.0,  # against the first steps' large gradients
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.95]}},
}
# The loss falls to half within two minutes on two cores, even without bf16 instructions.
MODEL = "tiny"
BATCH = 4
STEPS = 200
# Each but fp32 is a section of the config with `enabled`.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(argv: Sequence[str] | None = None) -> None:
    """Run `hpczero`; all ranks call with the same arguments.

    Usage errors are printed by rank 0 alone and end every rank with exit code 2. The doctor ends
    every rank with 1 after warnings, with 3 after errors.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command == "doctor":
        if code := doctor(args.json, args.io):
            watch.release()  # `doctor` has told all ranks
            sys.exit(code)
        return
    if args.command != "train":
        _alone(args)
        return
    try:
        train(_settings(args), World.of())
    except (UsageError, ConfigError, DataError) as error:
        args.parser.error(str(error))
    except CheckpointError as error:
        args.parser.exit(1, f"hpczero: {error}\n")


def _alone(args: argparse.Namespace) -> None:
    """Run a command of one process."""
    from hpczero import commands  # h5py and others, when used

    if World.of().size > 1:
        args.parser.error(f"{args.command} is for one process: run it without mpiexec or srun")
    try:
        if args.command == "inspect":
            commands.inspect(args.checkpoint, verify=args.verify, as_json=args.json)
        elif args.command == "consolidate":
            commands.consolidate(
                args.checkpoint,
                args.out,
                args.format,
                args.dtype and DTYPES[args.dtype],
                args.max_shard_size,
            )
        elif args.command == "report":
            commands.report_runs(args.runs, args.out)
        else:
            commands.import_deepspeed(args.folder, args.out, args.tag)
    except commands.FAILURES as error:
        args.parser.exit(1, f"hpczero: {commands.in_words(error)}\n")


class UsageError(ValueError):
    """Say which flags contradict each other."""


def _settings(args: argparse.Namespace) -> Settings:
    return Settings(
        model=_model(args),
        config=_config(args).resolve(World.of().size),
        steps=args.steps,
        seed=args.seed,
        data=args.data,
        vocabulary=args.vocab,
        out=args.out,
        progress=args.progress,
        save_every=args.save_every,
        keep_last=args.keep_last,
        resume=args.out / CHECKPOINTS
        if args.resume == "auto"
        else args.resume and Path(args.resume),
        must_resume=args.resume != "auto",
        trace=args.trace,
    )


def _model(args: argparse.Namespace) -> GPTConfig:
    shape = {name: getattr(args, name) for name in ("layers", "hidden", "heads", "seq")}
    try:
        return replace(PRESETS[args.model], **{k: v for k, v in shape.items() if v is not None})
    except ValueError as error:
        raise UsageError(str(error)) from None


def _config(args: argparse.Namespace) -> Config:
    """Return the Config of --config, or of our defaults, with the given flags on top."""
    if args.config is None:
        base = _defaults(args)
    else:
        try:
            base = Config.load(args.config).model_dump(exclude_unset=True)
        except OSError as error:
            raise UsageError(f"--config: {error.strerror}: {str(args.config)!r}") from None
    flags = {
        **({f"{name}.enabled": args.dtype == name for name in [*DTYPES][1:]} if args.dtype else {}),
        "zero_optimization.stage": args.stage,
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": args.clip,
        "optimizer.params.lr": args.lr,
    }
    config = dict(base)
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"}.intersection(config):
        config["train_micro_batch_size_per_gpu"] = BATCH
    for path, value in flags.items():
        if value is not None:
            config = _with(config, path.split("."), value)
    return Config.load(_offload(args, config))


def _defaults(args: argparse.Namespace) -> Mapping[str, Any]:
    """Return DEFAULTS, in fp32 where rank 0's CPU is slow in bf16."""
    if args.dtype is not None or probe.share(multiplies_fast(torch.bfloat16)):
        return DEFAULTS
    if args.progress and World.of().rank == 0:
        print("in fp32, since this CPU is slow in bf16 (--dtype bf16 takes it all the same)")
    return _with(DEFAULTS, ["bf16", "enabled"], False)


def _offload(args: argparse.Namespace, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with what the flags of offloading ask for."""
    stage = config.get("zero_optimization", {}).get("stage", 0)
    asked = OFFLOADS.get(args.offload, {})
    params = args.params_on or (asked.get("params") if stage == 3 else None)
    grads = args.grads_on or (asked.get("grads") if stage >= 2 else None)
    states = args.states_on or asked.get("states")
    for section, key, tier in (
        ("offload_param", "device", params),
        ("offload_optimizer", "device", states),
        ("offload_optimizer", "gradients", grads),
    ):
        if tier is not None:
            config = _with(config, ["zero_optimization", section, key], DEVICES[tier])
    folder = str(args.offload_dir or args.out / "offload")
    for section in ("offload_param", "offload_optimizer"):
        found = config.get("zero_optimization", {}).get(section, {})
        in_files = "nvme" in (found.get("device"), found.get("gradients"))
        if in_files and (args.offload_dir or not found.get("nvme_path")):
            config = _with(config, ["zero_optimization", section, "nvme_path"], folder)
    return config


def _with(config: Mapping[str, Any], path: Sequence[str], value: object) -> dict[str, Any]:
    """Return the config with one value replaced."""
    key, *rest = path
    return {**config, key: _with(config.get(key, {}), rest, value) if rest else value}


# ---- flags


def _parser() -> _Parser:
    parser = _Parser(prog="hpczero", description="ZeRO over MPI.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands)
    command = _command(
        commands,
        "doctor",
        help="examine the machine and the job",
        description="Examine MPI, ranks, cores, devices, shared memory and bandwidth: "
        "mpiexec -n 4 hpczero doctor",
        epilog="Exit code: 0 all well or notes only, 1 warnings, 3 errors, 2 usage.",
    )
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    command.add_argument(
        "--io", type=Path, metavar="DIR", help="measure a folder for offloading (256 MiB a rank)"
    )
    _add_inspect(commands)
    _add_consolidate(commands)
    _add_import(commands)
    _add_report(commands)
    return parser


def _command(commands: argparse._SubParsersAction[_Parser], name: str, **texts: Any) -> _Parser:
    command = commands.add_parser(name, allow_abbrev=False, **texts)
    command.set_defaults(parser=command)
    return command


def _add_inspect(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = _command(
        commands,
        "inspect",
        help="show what a checkpoint holds",
        description="Show what a checkpoint holds: hpczero inspect runs/default/checkpoints",
        epilog="Exit code: 0 all well, 1 no checkpoint or damage, 2 usage.",
    )
    _add_checkpoint(command)
    command.add_argument("--verify", action="store_true", help="read all of it, check every byte")
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _add_consolidate(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = _command(
        commands,
        "consolidate",
        help="write a checkpoint's weights for other programs",
        description="Write a checkpoint's weights whole, in the memory of a few MiB. A folder of "
        "safetensors with the model's config.json loads by from_pretrained of transformers.",
    )
    _add_checkpoint(command)
    command.add_argument(
        "out", type=Path, metavar="OUT",
        help="a file; for safetensors a folder, unless it ends in .safetensors",
    )  # fmt: skip
    command.add_argument(
        "--format", choices=("safetensors", "torch", "hdf5"), default="safetensors",
        help="(safetensors)",
    )  # fmt: skip
    command.add_argument("--dtype", choices=DTYPES, help="of floating tensors (as saved)")
    command.add_argument(
        "--max-shard-size", type=_bytes, metavar="5GB",
        help="cut a folder of safetensors into files of at most so many bytes (one file)",
    )  # fmt: skip


def _add_import(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = _command(
        commands,
        "import-deepspeed",
        help="turn a DeepSpeed checkpoint into one of ours",
        description="Turn a DeepSpeed checkpoint of ZeRO (stages 1 to 3) into one that "
        "engine.load_checkpoint loads, with optimizer states. DeepSpeed isn't needed, and nothing "
        "in the files is executed.",
    )
    command.add_argument("folder", type=Path, metavar="DIR", help="as given to save_checkpoint")
    command.add_argument("out", type=Path, metavar="OUT", help="a folder of our checkpoints")
    command.add_argument("--tag", help="which checkpoint in DIR (what `latest` names)")


def _add_checkpoint(command: _Parser) -> None:
    command.add_argument(
        "checkpoint", type=Path, metavar="CKPT",
        help="a checkpoint, or a folder of checkpoints: what `latest` names",
    )  # fmt: skip


def _add_report(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = _command(
        commands,
        "report",
        help="show runs side by side on one page",
        description="Write one HTML page of runs: loss, tokens per second, time by cause (of runs "
        "with --trace), memory beside the formula, traffic.",
    )
    command.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="--out of hpczero train")
    command.add_argument(
        "--out", type=Path, default=Path("report.html"), metavar="FILE", help="(report.html)"
    )


def _add_train(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = _command(
        commands,
        "train",
        help="train a GPT on text or tokens",
        description="Train a GPT on text or tokens: mpiexec -n 4 hpczero train",
        epilog="Without --config: stage 3, bf16 (fp32 where the CPU is slow in it), clip 1, "
        "lr 2e-3. With it, its keys and DeepSpeed's defaults hold. Flags go before both.",
    )
    run = command.add_argument_group("the run")
    run.add_argument("--stage", type=int, choices=range(4), help="what is partitioned (3)")
    run.add_argument(
        "--offload", choices=OFFLOADS,
        help="keep states (and, from stage 2, gradients) in host memory, or in files, at stage 3 "
        "parameters too (none)",
    )  # fmt: skip
    run.add_argument(
        "--offload-dir", type=Path, metavar="DIR", help="where files are kept (OUT/offload)"
    )
    for what in ("params", "grads", "states"):
        run.add_argument(f"--{what}-on", choices=DEVICES, help=f"keep only {what} elsewhere")
    run.add_argument("--dtype", choices=DTYPES, help="of the computation (bf16, if fast here)")
    run.add_argument("--config", type=Path, metavar="JSON", help="a config in DeepSpeed's keys")
    run.add_argument("--batch", type=_at_least(1), help=f"samples per micro-batch, rank ({BATCH})")
    run.add_argument("--accumulate", type=_at_least(1), help="micro-steps per step (1)")
    run.add_argument("--steps", type=_at_least(1), default=STEPS, help=f"({STEPS})")
    run.add_argument("--lr", type=_not_negative, help="learning rate of AdamW (2e-3)")
    run.add_argument("--clip", type=_not_negative, help="clip the gradient norm, 0: don't (1)")
    run.add_argument("--seed", type=_at_least(0), default=0, help="of weights and data (0)")
    model = command.add_argument_group("the model")
    model.add_argument(
        "--model", type=_preset, default=MODEL, help=f"{', '.join(PRESETS)} ({MODEL})"
    )
    for name in ("layers", "hidden", "heads"):
        model.add_argument(f"--{name}", type=_at_least(1), help="instead of the model's")
    model.add_argument("--seq", type=_at_least(1), help="tokens per sample (the model's)")
    model.add_argument(
        "--vocab", type=_at_least(1), metavar="N",
        help="tokens that the model knows (256 for text, else what --data needs, up to 64s)",
    )  # fmt: skip
    files = command.add_argument_group("files")
    files.add_argument(
        "--data", type=Path, metavar="PATH",
        help="a text file or a folder of them (Python's standard library); x.bin: tokens in "
        "uint16; x.h5[:DATASET]: integers",
    )  # fmt: skip
    files.add_argument(
        "--out", type=Path, default=Path("runs/default"), metavar="DIR",
        help="for metrics.jsonl, summary.json and loss.png (runs/default)",
    )  # fmt: skip
    files.add_argument(
        "--save-every", type=_at_least(1), metavar="N",
        help="save a checkpoint every N steps and at the end, in DIR/checkpoints",
    )  # fmt: skip
    files.add_argument(
        "--keep-last", type=_at_least(1), metavar="K", help="keep only the newest K checkpoints"
    )
    files.add_argument(
        "--resume", metavar="PATH",
        help="go on from a checkpoint or from the latest of a folder, on any number of ranks; "
        "auto: from DIR/checkpoints if there is one",
    )  # fmt: skip
    files.add_argument(
        "--trace", action="store_true",
        help="write DIR/trace.json: what each rank did when; open it in ui.perfetto.dev",
    )  # fmt: skip
    files.add_argument(
        "--no-progress", dest="progress", action="store_false", help="print no line per step"
    )


def _bytes(text: str) -> int:
    """Return the bytes of "5GB", "200MiB" or "1000"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(I?)B?|B?)", text.upper())
    count = 0
    if found is not None:
        number, prefix, binary = found.groups()
        power = "KMGT".index(prefix) + 1 if prefix else 0
        count = int(float(number) * (1024 if binary else 1000) ** power)
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 5GB, found {text!r}")
    return count


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"expected an integer from {least}, found {text!r}")
        return value

    return parse


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number from 0, found {text!r}")
    return value


def _preset(text: str) -> str:
    if text not in PRESETS:
        close = difflib.get_close_matches(text, PRESETS, n=1)
        hint = f": did you mean {close[0]!r}?" if close else ""
        raise argparse.ArgumentTypeError(
            f"expected one of {', '.join(PRESETS)}, found {text!r}{hint}"
        )
    return text


class _Parser(argparse.ArgumentParser):
    """Parse on all ranks, print on rank 0."""

    @cached_property
    def _world(self) -> World:
        return World.of()

    def _print_message(self, message: str, file: Any = None) -> None:
        if self._world.rank == 0:
            print(message, end="", file=file or sys.stderr, flush=True)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Leave together, once rank 0 has printed."""
        self._print_message(message or "")
        self._world.mean(0.0)
        watch.release()
        sys.exit(status)
