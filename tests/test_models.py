"""Models from the wild, and models made to break partitioning, at every stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import WIDTH, Block, Squared, TinyLM, feature_loss, features, lm_loss, tokens
from mpi4py import MPI
from reference import assert_close, assert_same_bits, config, plain, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpczero
from hpczero.partition.tensor import ReleasedParameter

pytestmark = pytest.mark.mpi

STAGES = [0, 1, 2, 3]
SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank


def check(
    make: Callable[[], nn.Module], loss: Callable[[Any, int], torch.Tensor], **settings: Any
) -> list[Any]:
    """Train at every stage: equal bit for bit, and equal to plain torch."""
    runs = [train(make, loss, config(stage, **settings)) for stage in STAGES]
    assert_same_bits(runs)
    if RANK == 0:
        assert_close(
            runs[0],
            plain(make, loss, config(0, **settings), SIZE),
            half=settings.get("dtype") == "bf16",
        )
    return runs


# Models that nobody here wrote #


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 37}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    )


def llama(recompute: bool = False, layers: int = 2) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=37,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            tie_word_embeddings=True,
        )
    )
    if recompute:
        model.gradient_checkpointing_enable()
    return model


def t5() -> nn.Module:
    """An encoder and a decoder that share the embedding, and a position bias across blocks."""
    transformers = pytest.importorskip("transformers")
    sizes = {"num_layers": 2, "num_heads": 2, "d_model": 16, "d_kv": 8, "d_ff": 24}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            **sizes, vocab_size=37, dropout_rate=0, decoder_start_token_id=0, use_cache=False
        )
    )


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=37,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
        )
    )


def mixtral() -> nn.Module:
    """Experts of which some get no token: there are 16 for the 20 tokens of a micro-batch."""
    transformers = pytest.importorskip("transformers")
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=37,
            hidden_size=16,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=16,
            num_local_experts=16,
            num_experts_per_tok=1,
            output_router_logits=True,
            use_cache=False,
        )
    )


def transformers_loss(model: Any, number: int) -> torch.Tensor:
    ids = tokens(number)
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize(
    "make",
    [
        gpt2, lambda: llama(recompute=True),
        *(pytest.param(make, marks=pytest.mark.slow) for make in (llama, t5, bert, mixtral)),
    ],
    ids=["gpt2", "llama-recomputed", "llama", "t5", "bert", "mixtral"],
)  # fmt: skip
def test_transformers(make: Callable[[], nn.Module], dtype: str) -> None:
    check(make, transformers_loss, dtype=dtype)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [t5, bert, mixtral], ids=["t5", "bert", "mixtral"])
def test_transformers_accumulate(make: Callable[[], nn.Module]) -> None:
    """Stages 0 and 1 add on the rank, 2 and 3 after reducing: alike in pairs."""
    runs = [
        train(make, transformers_loss, config(stage, accumulation=2, clip=0.5)) for stage in STAGES
    ]
    assert_same_bits(runs[:2])
    assert_same_bits(runs[2:])
    if RANK == 0:
        settings = config(0, accumulation=2, clip=0.5)
        reference = plain(make, transformers_loss, settings, SIZE)
        assert_close(runs[0], reference)
        assert_close(runs[2], reference)


def lora() -> nn.Module:
    """A frozen base of eight layers, and adapters on two of each layer's matrices."""
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(layers=8), adapters)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_lora_keeps_its_frozen_base_partitioned(dtype: str) -> None:
    engine = check(lora, transformers_loss, dtype=dtype)[3].engine
    layers = engine.module.get_base_model().model.layers
    here: list[int] = []

    def look(*_: Any) -> None:
        here.append(sum(type(layer.mlp.up_proj.weight) is nn.Parameter for layer in layers))

    for layer in layers:
        layer.register_forward_pre_hook(look)
        layer.self_attn.q_proj.lora_A.default.weight.register_hook(look)
    engine.backward(transformers_loss(engine, RANK))
    look()
    engine.step()
    assert len(here) == 2 * len(layers) + 1
    assert max(here) <= 3  # of eight: the one that runs, the next one, and the last one
    assert here[-1] == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lora_adapters_are_saved_whole(tmp_path: Path) -> None:
    """peft's own saving: of a gathered model, or of gathered adapters handed to it."""
    peft = pytest.importorskip("peft")
    saved: list[dict[str, torch.Tensor]] = []
    for stage in (0, 3):
        engine = train(lora, transformers_loss, config(stage)).engine
        model = engine.module
        adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        folders = [tmp_path / f"{stage}-{name}" for name in ("model", "adapters")]
        with hpczero.zero.GatheredParameters(model):
            if RANK == 0:
                saved.append(tensors(peft.get_peft_model_state_dict(model)))
                model.save_pretrained(folders[0])
        with hpczero.zero.GatheredParameters(list(adapters.values())):
            if stage == 3:
                assert isinstance(model.get_input_embeddings().weight, ReleasedParameter)
            if RANK == 0:
                state = {name: parameter.detach() for name, parameter in adapters.items()}
                saved.append(tensors(peft.get_peft_model_state_dict(model, state_dict=state)))
                model.save_pretrained(folders[1], state_dict=state)
        if RANK == 0:
            saved.extend(tensors(peft.load_peft_weights(folder)) for folder in folders)
    if RANK != 0:
        return
    assert len(saved[0]) == 8 * 2 * 2
    assert {tuple(value.shape) for value in saved[0].values()} == {(3, 16), (16, 3), (8, 3)}
    assert all(value.any() for value in saved[0].values())  # B is zero until it is trained
    for other in saved[1:]:
        assert other.keys() == saved[0].keys()
        assert all(torch.equal(other[name], value) for name, value in saved[0].items())


def tensors(state: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in state.items()}


class Recurrent(nn.Module):
    """torch's LSTM hands its weights on as a list that it keeps, not by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(WIDTH, 7, num_layers=2, bidirectional=True)  # at the root
        self.rest = nn.ModuleList(nn.LSTM(14, 14) for _ in range(2))  # blocks
        self.head = nn.Linear(14, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.first(x.view(2, 2, WIDTH))
        for lstm in self.rest:
            x, _ = lstm(x)
        return self.head(x).square().sum(-1).mean()


def test_lstm() -> None:
    check(Recurrent, feature_loss)


class ConvNet(nn.Module):
    def __init__(self) -> None:  # no biases before the norms: their gradients are rounding
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(),
            nn.Conv2d(5, 7, 3, stride=2, bias=False), nn.BatchNorm2d(7), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(7, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.features(x).mean((2, 3))).float(), y)


def images(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4)


def test_batch_norm_keeps_rank_0s_statistics() -> None:
    """Per-rank batches with averaged gradients; buffers are rank 0's in every forward."""
    runs = []
    for stage in STAGES:
        torch.manual_seed(0)
        engine = hpczero.Engine(ConvNet(), config(stage))
        for step in range(3):
            engine.backward(engine(*images(step * SIZE + RANK)))
            engine.step()
        norms = engine.grad_norm
        runs.append((norms, engine.full_state_dict()))
        assert engine.traffic()["by_purpose"]["buffers"]["calls"] == 2  # floats and counters
    assert all(norm == runs[0][0] for norm, _ in runs)
    if RANK != 0:
        return
    for _, state in runs[1:]:
        assert all(torch.equal(state[name], value) for name, value in runs[0][1].items())
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        kept = {}
        for rank in range(SIZE):  # rank 0's statistics go on; the others' are thrown away
            before = {n: b.clone() for n, b in model.named_buffers()}
            (model(*images(step * SIZE + rank)) / SIZE).backward()
            kept = kept if rank else {n: b.clone() for n, b in model.named_buffers()}
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(runs[0][1][name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_batch_norm_statistics_follow_the_compute_dtype() -> None:
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2))
    model.register_buffer("frequencies", torch.arange(3.0))
    hpczero.Engine(model, config(0, "bf16"))
    assert model[1].running_mean.dtype == torch.bfloat16
    assert model[1].num_batches_tracked.dtype == torch.int64
    assert model.frequencies.dtype == torch.float32


# Shapes #


class Ragged(nn.Module):
    """Parameters of 0, 1, 3, 5 and 7 elements, and a layer without outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(n)) for n in (0, 1, 3, 5, 7))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Linear(8, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for part in self.parts:
            total = total + (part * x[0, : part.numel()]).square().sum()
        return total * self.scalar + self.nothing(x[:, :8]).sum()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tiny_and_empty_parameters(dtype: str) -> None:
    def loss(model: Any, number: int) -> torch.Tensor:
        x = features(number, 16)
        result: torch.Tensor = model(x.bfloat16() if dtype == "bf16" else x)
        return result.float()

    check(Ragged, loss, dtype=dtype)


def test_a_model_of_one_empty_parameter() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(0, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight.sum() + x.sum()

    for stage in STAGES:
        engine = hpczero.Engine(Empty(), config(stage))
        engine.backward(engine(torch.ones(2)))
        engine.step()
        assert engine.grad_norm == 0.0
        assert engine.parameters_count == 0


class MixedTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 5).double()
        self.narrow = nn.Linear(5, 3).bfloat16()
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.narrow(self.wide(x.double()).bfloat16()).double()
        return (y.square().sum() + self.table.sum() * 0.1).float()


def test_several_dtypes_in_one_model() -> None:
    runs = [train(MixedTypes, feature_loss, config(stage)) for stage in STAGES]
    assert_same_bits(runs)
    if RANK == 0:
        assert runs[3].state["wide.weight"].dtype == torch.float64
        assert runs[3].state["narrow.weight"].dtype == torch.float32
        assert runs[3].state["table"].dtype == torch.int64
        # The bfloat16 layer has a float32 master here and none in plain torch: compare a step.
        reference = plain(MixedTypes, feature_loss, config(0), SIZE, steps=1)
        assert runs[0].norms[0] == pytest.approx(reference.norms[0], rel=1e-2)
        assert runs[0].losses[0] == pytest.approx(reference.losses[0], rel=1e-6)
        one = train(MixedTypes, feature_loss, config(0), MPI.COMM_SELF, steps=1)
        reference = plain(MixedTypes, feature_loss, config(0), 1, steps=1)
        for name in ("wide.weight", "wide.bias"):
            torch.testing.assert_close(
                one.state[name], reference.state[name].double(), rtol=1e-5, atol=1e-6
            )


# Tied, unused, frozen #


class TiedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(),
            nn.Linear(WIDTH, WIDTH),
        )  # fmt: skip
        self.layers[4].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().sum(-1).mean()


def test_a_tied_weight_is_one_weight() -> None:
    runs = [train(TiedMLP, feature_loss, config(stage), steps=20) for stage in STAGES]
    assert_same_bits(runs)
    engine = runs[3].engine
    assert engine.parameters_count == 2 * WIDTH * WIDTH + 3 * WIDTH
    assert engine.module.layers[4].weight is engine.module.layers[0].weight
    if RANK == 0:
        assert_close(runs[0], plain(TiedMLP, feature_loss, config(0), SIZE, steps=20))
        state = runs[3].state
        assert torch.equal(state["layers.0.weight"], state["layers.4.weight"])


class Branches(nn.Module):
    """Blocks of which some run, as the number of the batch says."""

    def __init__(self, rule: str) -> None:
        super().__init__()
        self.rule = rule
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.unused = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if not self.skips(index, number):
                x = block(x)
        return x.square().sum(-1).mean()

    def skips(self, index: int, number: int) -> bool:
        step, rank = divmod(number, SIZE)
        return {
            "never": False,
            "always": index == 1,
            "alternate": index in (1, 3) and step % 2 == 1,
            "reverse": index == step % 4,
            "one rank": index == 2 and rank == SIZE - 1,
        }[self.rule]


def branch_loss(model: Any, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(features(number), number)
    return loss


@pytest.mark.parametrize(
    ("rule", "prefetch"),
    [
        ("always", 0), ("alternate", "auto"), ("reverse", 10**9),
        *(pytest.param(rule, prefetch, marks=pytest.mark.slow)
          for rule in ("never", "always", "alternate", "reverse")
          for prefetch in (0, "auto", 10**9)),
    ],
)  # fmt: skip
def test_modules_that_all_ranks_skip(rule: str, prefetch: int | str) -> None:
    runs = [
        train(lambda: Branches(rule), branch_loss, config(stage, prefetch=prefetch), steps=6)
        for stage in ([1, 3] if prefetch != "auto" else STAGES)
    ]
    assert_same_bits(runs)
    if RANK == 0:
        assert_close(runs[0], plain(lambda: Branches(rule), branch_loss, config(0), SIZE, steps=6))


def test_a_module_that_one_rank_skips_is_legal_where_parameters_are_replicated() -> None:
    runs = [train(lambda: Branches("one rank"), branch_loss, config(stage)) for stage in (0, 1, 2)]
    assert_same_bits(runs)
    if RANK == 0:
        reference = plain(lambda: Branches("one rank"), branch_loss, config(0), SIZE)
        assert_close(runs[0], reference)


class UnusedOnOneRank(nn.Module):
    """A weight whose gradient exists on rank 0 only, inside a block that all ranks run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(3))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, number % SIZE == 0)
        return x.square().sum(-1).mean()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, open_: bool) -> torch.Tensor:
        x = x + self.always(x)
        return x + self.sometimes(x) if open_ else x


def test_a_parameter_that_gets_a_gradient_on_one_rank_only() -> None:
    check(UnusedOnOneRank, branch_loss)


def frozen(make: Callable[[], nn.Module], *parts: str) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = make()
        for name, parameter in model.named_parameters():
            if any(part in name for part in parts):
                parameter.requires_grad_(False)
        return model

    return made


@pytest.mark.parametrize(
    "recompute",
    [*(pytest.param(how, marks=pytest.mark.slow) for how in ("no", "reentrant")), "non-reentrant"],
)
def test_frozen_layers_cost_their_weights_only(recompute: str) -> None:
    make = frozen(lambda: TinyLM(recompute=recompute), "norm")
    runs = check(make, lm_loss)
    shapes = runs[3].engine.bucket_shapes()
    assert {shape.trainable for shape in shapes} == {True, False}
    trainable = sum(shape.numel for shape in shapes if shape.trainable)
    mean = runs[3].engine.world.mean(runs[3].engine.memory()["grads"])
    assert mean == pytest.approx(4 * trainable / SIZE)


def test_all_but_two_small_layers_frozen_stays_small_at_stage_3() -> None:
    """Gathered bytes stay within the prefetched and two more buckets (the root is one)."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(8))
            self.adapters = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.adapters[0](x)
            for block in self.blocks:
                x = block(x)
            return self.adapters[1](x).square().sum(-1).mean()

    make = frozen(Adapted, "blocks")
    runs = check(make, feature_loss)
    engine = runs[3].engine
    largest = max(shape.padded for shape in engine.bucket_shapes()) * 4
    formula = hpczero.sizing.wire_bytes(SIZE)
    assert engine.memory()["buffers"] - formula <= 3 * largest + 4096 * 4
    traffic = engine.traffic()["by_purpose"]
    assert traffic["parameters"]["multiples"] <= 2.0
    assert traffic["gradients"]["multiples"] < 0.1


def test_everything_frozen_has_nothing_to_train() -> None:
    engine = hpczero.Engine(frozen(TinyLM, "")(), config(3))
    with torch.no_grad():
        loss = engine(tokens(0))
    assert torch.isfinite(loss)
    assert engine.memory()["grads"] == engine.memory()["states"] == 0


def test_clipping_tiny_gradients_adds_epsilon_once() -> None:
    def loss(model: Any, number: int) -> torch.Tensor:
        value: torch.Tensor = feature_loss(model, number)
        return value * 1e-9

    def make() -> nn.Module:
        return Squared(nn.Linear(WIDTH, 3))

    settings = config(3, clip=1e-8)
    run = train(make, loss, settings, steps=1)
    if RANK == 0:
        reference = plain(make, loss, settings, SIZE, steps=1)
        assert run.norms[0] == pytest.approx(reference.norms[0], rel=1e-4)
        for name, value in run.state.items():
            torch.testing.assert_close(value, reference.state[name], rtol=1e-4, atol=1e-6)


# Weights used in unusual ways #


class Foreign(nn.Module):
    """Use a block's weights from elsewhere, in the way that `how` says."""

    def __init__(self, how: str, recompute: bool = False) -> None:
        super().__init__()
        self.how, self.recompute = how, recompute
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.user = User(how, self.blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        view = self.blocks[1].weight.view(-1) if self.how == "held view" else None
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=False)
                if self.recompute
                else torch.tanh(block(x))
            )
        if view is not None:
            x = x + view.view(WIDTH, WIDTH)[0]
        x = checkpoint(self.user, x, use_reentrant=False) if self.recompute else self.user(x)
        return x.square().sum(-1).mean()


class User(nn.Module):
    def __init__(self, how: str, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.how = how
        self.others = [blocks]  # in a list: not a submodule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.others[0][0], self.others[0][1]
        if self.how == "x @ w.t()":
            return x @ first.weight.t()
        if self.how == "einsum":
            return torch.einsum("bi,oi->bo", x, first.weight) + first.bias
        if self.how == "two at once":
            return x @ torch.cat([first.weight, second.weight]).t()
        if self.how == "call":
            return second(first(x))
        if self.how == "function":
            return Product.apply(x, first.weight)
        if self.how == "norm":
            return x * first.weight.norm() + second.weight.abs().max()
        return x


class Product(torch.autograd.Function):
    """Keep the weight on the context instead of saving it for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.pair = (x, weight)
        return x * 1.0 @ (weight * 1.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight = ctx.pair
        return grad @ weight.t(), x.t() @ grad


HOW = ["x @ w.t()", "einsum", "two at once", "call", "function", "norm", "held view"]


@pytest.mark.parametrize(
    "recompute", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["saved", "recomputed"]
)
@pytest.mark.parametrize("how", HOW)
def test_weights_used_outside_their_module(how: str, recompute: bool) -> None:
    check(lambda: Foreign(how, recompute), feature_loss)


class SharedBlock(nn.Module):
    """One block at several depths: alone, or in turn with another."""

    def __init__(self, order: str, recompute: str) -> None:
        super().__init__()
        self.order, self.recompute = order, recompute
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for letter in self.order:
            block = self.blocks["abc".index(letter)]
            if self.recompute == "no":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return x.square().sum(-1).mean()


@pytest.mark.parametrize(
    ("order", "recompute"),
    [
        ("aaa", "reentrant"), ("abcab", "non-reentrant"),
        *(pytest.param(order, recompute, marks=pytest.mark.slow)
          for order in ("aaa", "abab", "abcab")
          for recompute in ("no", "reentrant", "non-reentrant")),
    ],
)  # fmt: skip
def test_a_shared_block(order: str, recompute: str) -> None:
    def loss(model: Any, number: int) -> torch.Tensor:
        x = features(number).requires_grad_()  # reentrant recomputation wants a graph
        value: torch.Tensor = model(x)
        return value

    runs = [train(lambda: SharedBlock(order, recompute), loss, config(stage)) for stage in STAGES]
    assert_same_bits(runs)
    if RANK == 0:
        assert_close(runs[0], plain(lambda: SharedBlock(order, recompute), loss, config(0), SIZE))


class TwiceRecomputed(nn.Module):
    """A weight inside one block, used in two recomputed regions of it: its gradient comes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"w": nn.Linear(WIDTH, WIDTH)}) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            for _ in range(2):
                x = torch.tanh(checkpoint(block["w"], x, use_reentrant=True))
        return x.square().sum(-1).mean()


def test_a_gradient_that_comes_twice() -> None:
    def loss(model: Any, number: int) -> torch.Tensor:
        value: torch.Tensor = model(features(number).requires_grad_())
        return value

    runs = [train(TwiceRecomputed, loss, config(stage)) for stage in STAGES]
    assert_same_bits(runs)
    if RANK == 0:
        assert_close(runs[0], plain(TwiceRecomputed, loss, config(0), SIZE))


# Touching released parameters #


def test_a_released_parameter_is_refused_with_the_cure() -> None:
    engine = hpczero.Engine(TinyLM(), config(3))
    weight = engine.module.blocks[0].up.weight
    assert weight.shape == (3 * WIDTH + 1, WIDTH)
    assert weight.numel() == (3 * WIDTH + 1) * WIDTH
    assert weight.requires_grad
    assert weight.grad is None
    assert isinstance(weight, nn.Parameter)
    assert "shape=(37, 12)" in repr(weight)
    touches: list[Callable[[], Any]] = [
        lambda: weight * 2,
        lambda: weight.norm(),
        lambda: F.linear(torch.ones(1, WIDTH), weight),
        lambda: torch.einsum("oi,i->o", weight, torch.ones(WIDTH)),
        lambda: torch.stack([weight, weight]),
        lambda: weight.detach(),
        lambda: weight.data,
        lambda: weight.tolist(),
        lambda: weight[0],
        lambda: engine.module.state_dict(),
        lambda: engine.module.blocks[0].up.forward(torch.ones(1, WIDTH)),
        lambda: weight.numpy(),
        lambda: weight.data_ptr(),
        lambda: weight.clone(),
    ]
    for touch in touches:
        with pytest.raises(RuntimeError, match=r"GatheredParameters|full_state_dict"):
            touch()
    engine.backward(engine(tokens(RANK)))
    engine.step()


def test_a_view_held_over_a_release_is_never_freed_memory() -> None:
    engine = hpczero.Engine(TinyLM(), config(3))
    block = engine.module.blocks[0]
    held = []
    block.up.register_forward_hook(lambda module, args, output: held.append(module.weight.data))
    engine.backward(engine(tokens(RANK)))
    engine.step()
    assert torch.isfinite(held[0].sum())
    state = engine.full_state_dict()
    held.clear()
    engine.backward(engine(tokens(RANK)))
    engine.step()
    assert RANK or state
