"""A training script for DeepSpeed: fine-tune a causal language model of transformers."""

import argparse
import importlib
import json
import os
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

deepspeed = importlib.import_module(os.environ["BACKEND"])

RANKS, STEPS, MICRO, ACCUMULATION, VOCABULARY = 2, 20, 2, 2, 61


def parse_args():
    parser = argparse.ArgumentParser(description="Fine-tune a causal language model")
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--local_rank", type=int, default=-1, help="passed from the launcher")
    parser.add_argument("--stage", type=int, default=0, choices=[0, 1, 2, 3])
    parser.add_argument("--out", type=Path, help="folder of the losses, a file per rank")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


class Prompts(Dataset):
    """Count upwards from somewhere in steps of 1 to 3; prompts have several lengths."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(2)
        self.starts = torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()
        self.strides = torch.randint(1, 4, (count,), generator=generator).tolist()
        self.lengths = torch.randint(8, 17, (count,), generator=generator).tolist()

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, index):
        ids = self.starts[index] + self.strides[index] * torch.arange(self.lengths[index])
        return ids % VOCABULARY


def collate(prompts):
    """Pad to the longest; the loss looks at no padding."""
    pad = torch.nn.utils.rnn.pad_sequence
    ones = [torch.ones_like(prompt) for prompt in prompts]
    return {
        "input_ids": pad(prompts, batch_first=True),
        "attention_mask": pad(ones, batch_first=True),
        "labels": pad(prompts, batch_first=True, padding_value=-100),
    }


def get_optimizer_grouped_parameters(model, weight_decay):
    no_decay = ("bias", "ln_1.weight", "ln_2.weight", "ln_f.weight")
    named = list(model.named_parameters())
    return [
        {
            "params": [p for n, p in named if not n.endswith(no_decay)],
            "weight_decay": weight_decay,
        },
        {"params": [p for n, p in named if n.endswith(no_decay)], "weight_decay": 0.0},
    ]


def get_train_ds_config(args):
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "steps_per_print": 2000,
        "gradient_clipping": 0.5,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": args.learning_rate, "betas": [0.9, 0.95], "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": args.learning_rate,
                "warmup_num_steps": 4,
                "total_num_steps": STEPS,
            },
        },
        "zero_optimization": {
            "stage": args.stage,
            "overlap_comm": False,
            "stage3_param_persistence_threshold": 10,
        },
    }


def main():
    args = parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(args.seed)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=VOCABULARY,
            bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip
    model, _, train_dataloader, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=get_optimizer_grouped_parameters(model, args.weight_decay),
        training_data=Prompts(STEPS * ACCUMULATION * MICRO * RANKS),
        collate_fn=collate,
        config=get_train_ds_config(args),
    )
    model.train()
    losses = []
    for batch in train_dataloader:
        batch = {key: value.to(model.device) for key, value in batch.items()}
        loss = model(**batch, use_cache=False).loss
        model.backward(loss)
        model.step()
        losses.append(loss.item())
    (args.out / f"{model.global_rank}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
