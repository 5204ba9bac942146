"""The contenders: the same GPT, data, precision and AdamW (torch's fused one, but for ours).

bf16 is what each does best, always with float32 masters:

- floor, DDP, ZeroRedundancyOptimizer: a bf16 model; MasterAdamW keeps the masters of what it
  updates. DDP sums bf16 gradients in bf16.
- FSDP2: float32 shards are the masters; gathers and sums are bf16 (MixedPrecisionPolicy).
- DeepSpeed: `bf16.enabled`, its own masters; sums are bf16.
- hpczero: `bf16.enabled`; bf16 travels, sums are float32.

DeepSpeed's buckets hold 20M elements, as its default of 500M is more than these models have, and
`gradient_clipping` is 0, as elsewhere (its default is 1). Its ops aren't compiled: its all-reduce
in shared memory is for inference, and its CPUAdam is as fast as torch's fused one.

    mpiexec -n 2 python -m benchmarks.contenders NAME ADDRESS MODEL DTYPE BATCH    # by jobs.py only
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LR = float(os.environ.get("BENCHMARK_LR", "1e-4"))
"""Of all contenders; jobs.py sets it."""
BUCKET = 20_000_000
STAGES = range(4)


@dataclass(frozen=True)
class Contender:
    """Hold what one training step is made of."""

    backward: Callable[[Any, Any], Any]
    """Run forward and backward; return the loss."""
    update: Callable[[], None]
    sent: Callable[[], int | None] = lambda: None
    """Return the bytes that a rank sent in the last step, if the contender counts them."""


# ---- contenders


def loop(model: Any, optimizer: Any) -> Contender:
    def backward(tokens: Any, targets: Any) -> Any:
        loss = model(tokens, targets)
        loss.backward()
        return loss

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Contender(backward, update)


def engine_loop(engine: Any, sent: Callable[[], int | None] = lambda: None) -> Contender:
    """Return the loop of an engine, DeepSpeed's or ours."""

    def backward(tokens: Any, targets: Any) -> Any:
        loss = engine(tokens, targets)
        engine.backward(loss)
        return loss

    return Contender(backward, engine.step, sent)


def adamw(params: Iterable[Any], half: bool) -> Any:
    kind, more = adamw_kind(half)
    return kind(params, lr=LR, **more)


def adamw_kind(half: bool) -> tuple[Any, dict[str, Any]]:
    """Return an optimizer's class and arguments: torch's fused AdamW, on masters for bf16."""
    import torch

    class MasterAdamW(torch.optim.Optimizer):
        """Update float32 masters of bf16 parameters."""

        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})
            self.params = [p for group in self.param_groups for p in group["params"]]
            self.masters = [p.detach().float() for p in self.params]
            self.inner = torch.optim.AdamW(self.masters, lr=lr, fused=True)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for master, param in zip(self.masters, self.params, strict=True):
                master.grad = param.grad.float()
            self.inner.step()
            for master, param in zip(self.masters, self.params, strict=True):
                master.grad = None
                param.copy_(master)

    return (MasterAdamW, {}) if half else (torch.optim.AdamW, {"fused": True})


def floor(model: Any, half: bool) -> Contender:
    """Return a plain loop: no communication."""
    model = model.bfloat16() if half else model
    return loop(model, adamw(model.parameters(), half))


def replicated(model: Any, half: bool) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    gloo()
    return DistributedDataParallel(
        model.bfloat16() if half else model, gradient_as_bucket_view=True
    )


def ddp(model: Any, half: bool) -> Contender:
    model = replicated(model, half)
    return loop(model, adamw(model.parameters(), half))


def ddp_zero(model: Any, half: bool) -> Contender:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = replicated(model, half)
    kind, more = adamw_kind(half)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, lr=LR, **more)
    return loop(model, optimizer)


def fsdp2(reshard: bool) -> Callable[[Any, bool], Contender]:
    def build(model: Any, half: bool) -> Contender:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        gloo()
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half else None)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)  # the root is never worth a reshard
        return loop(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True))

    return build


def deepspeed(stage: int) -> Callable[[Any, bool], Contender]:
    def build(model: Any, half: bool) -> Contender:
        zero = {
            "stage": stage,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            "stage3_prefetch_bucket_size": BUCKET,
        }
        return deepspeed_engine(model, half, zero)

    return build


def deepspeed_engine(model: Any, half: bool, zero: dict[str, Any]) -> Contender:
    """Return DeepSpeed with torch's fused AdamW, as its own would be compiled first."""
    import deepspeed
    import deepspeed.ops
    import torch

    deepspeed.ops.__compatible_ops__ = {}  # nor is its all-reduce compiled
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=LR, fused=True),
        config={
            "train_micro_batch_size_per_gpu": 1,  # says nothing: the loop gives the batches
            "gradient_clipping": 0.0,
            "bf16": {"enabled": half},
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        },
    )
    return engine_loop(engine)


def ours(stage: int) -> Callable[[Any, bool], Contender]:
    return lambda model, half: our_engine(model, half, {"stage": stage})


def ours_in_files(stage: int) -> Callable[[Any, bool], Contender]:
    """Return ours, with all that the stage shards in files."""
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": in_files()}
    if stage == 3:
        zero["offload_param"] = in_files()
    return lambda model, half: our_engine(model, half, zero)


def in_files() -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": str(Path(tempfile.gettempdir()) / "offload")}


def deepspeed_in_files(model: Any, half: bool) -> Contender:
    """Return DeepSpeed with states, gradients and parameters on NVMe; its ops are compiled."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    zero = {"stage": 3, "offload_optimizer": in_files(), "offload_param": in_files()}
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": half},
            "optimizer": {"type": "AdamW", "params": {"lr": LR}},
            "zero_optimization": zero,
            "steps_per_print": 10**9,
        },
    )
    return engine_loop(engine)


def our_engine(model: Any, half: bool, zero: dict[str, Any]) -> Contender:
    """Return ours."""
    import hpczero

    engine = hpczero.Engine(
        model,
        {
            "zero_optimization": zero,
            "bf16": {"enabled": half},
            "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        },
        initialise=model.initialiser(0) if next(model.parameters()).is_meta else None,
    )
    return engine_loop(engine, lambda: int(engine.traffic()["sent"]))


FLOOR = "floor"
CONTENDERS: dict[str, Callable[[Any, bool], Contender]] = {
    FLOOR: floor,
    "DDP": ddp,
    "DDP + ZeroRedundancyOptimizer": ddp_zero,
    "FSDP2, kept gathered": fsdp2(False),
    "FSDP2, resharded": fsdp2(True),
    **{f"DeepSpeed {stage}": deepspeed(stage) for stage in STAGES},
    **{f"hpczero {stage}": ours(stage) for stage in STAGES},
}

OURS_IN_FILES: dict[str, Callable[[Any, bool], Contender]] = {
    f"hpczero {stage}, all in files": ours_in_files(stage) for stage in STAGES[1:]
}
OFFLOADED = {"DeepSpeed 3, all in files": deepspeed_in_files, **OURS_IN_FILES}
"""Those that keep what they shard in files."""
IN_PARTS = {"hpczero 3, made in parts": ours(3), **OURS_IN_FILES}
"""Ours that never make the model whole; the first keeps all in memory."""
ALL = {**CONTENDERS, **OFFLOADED, **IN_PARTS}


def gloo() -> None:
    import torch.distributed

    torch.distributed.init_process_group("gloo")  # RANK and the rest are in the environment


# ---- what a rank does


class Sampler(threading.Thread):
    """Keep this process's largest proportional set size; costs a sample every 100 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0

    def run(self) -> None:
        """Sample for ever."""
        while True:
            self.peak = max(self.peak, pss())
            time.sleep(0.1)

    def take(self) -> int:
        """Return the peak since the last take."""
        peak, self.peak = max(self.peak, pss()), 0
        return peak


def pss() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def held() -> int:
    """Return the bytes of all tensors that Python can reach; a storage counts once."""
    import torch
    from torch.distributed.tensor import DTensor

    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    local = [x._local_tensor if isinstance(x, DTensor) else x for x in tensors]
    # Parameters that are partitioned refuse to be looked at; their storage is what we ask for.
    with torch._C.DisableTorchFunctionSubclass():
        storages = [x.untyped_storage() for x in local if x.device.type == "cpu"]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


class Alone:
    """Stand for the ranks where each reads the data itself."""

    rank = 0

    def broadcast(self, tensor: Any, purpose: str) -> None:
        """Do nothing."""


def module(name: str) -> Any:
    """Load a file of hpczero without the package, whose import starts MPI."""
    path = Path(__file__).parents[1] / "hpczero" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def shape_of(gpt: Any, model: str) -> Any:
    """Return a preset by its name, or a shape: LAYERSxHIDDENxHEADSxSEQ."""
    if model in gpt.PRESETS:
        return gpt.PRESETS[model]
    layers, hidden, heads, seq = map(int, model.split("x"))
    return gpt.GPTConfig(layers=layers, hidden=hidden, heads=heads, seq=seq)


def build(name: str, gpt: Any, shape: Any, half: bool) -> Contender:
    """Return a contender on its model."""
    if name not in IN_PARTS:
        return ALL[name](gpt.GPT(shape, 0), half)
    import torch

    with torch.device("meta"):
        model = gpt.GPT(shape)
    return ALL[name](model, half)


def launched_rank() -> int:
    """Return this process's rank without MPI, which peers don't load."""
    names = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
    return int(next(os.environ[name] for name in names if name in os.environ))


def main() -> None:
    """Build the contender and obey the driver; all ranks call."""
    parser = argparse.ArgumentParser(description="one rank of a contender")
    parser.add_argument("name", choices=ALL)
    parser.add_argument("address")
    parser.add_argument("model")
    parser.add_argument("dtype", choices=["fp32", "bf16"])
    parser.add_argument("batch", type=int)
    parser.add_argument("--watch", action="store_true")
    args = parser.parse_args()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(args.address)
    orders = connection.makefile("rw")
    sampler = Sampler()
    if args.watch:
        sampler.start()
    rank, size = launched_rank(), int(os.environ["WORLD_SIZE"])
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)

    data, gpt = module("data"), module("gpt")
    shape = shape_of(gpt, args.model)
    batches = data.Batches(data.load(None, Alone()), seq=shape.seq, batch=args.batch, seed=0)
    others = held()
    contender = build(args.name, gpt, shape, args.dtype == "bf16")
    number, answer = 0, dict[str, Any](ready=True)
    while True:
        print(json.dumps(answer), file=orders, flush=True)
        order = orders.readline().strip()
        if order in ("step", "held"):
            batch = batches.micro_batch(number * size + rank)
            number += 1
        if order == "step":
            start = time.perf_counter()
            loss = float(contender.backward(*batch).detach())
            contender.update()
            answer = {"start": start, "end": time.perf_counter(), "loss": loss}
            answer["sent"] = contender.sent()
        elif order == "held":  # at the two moments when most of it is there
            contender.backward(*batch)
            with_gradients = held()
            contender.update()
            answer = {"held": max(with_gradients, held()) - others}
        elif order == "peak":
            answer = {"peak": sampler.take()}
        else:
            break
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
