"""A training script for DeepSpeed: classify small images, as its CIFAR-10 example does."""

import argparse
import importlib
import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

deepspeed = importlib.import_module(os.environ["BACKEND"])


def add_argument():
    parser = argparse.ArgumentParser(description="CIFAR")
    parser.add_argument("-e", "--epochs", default=1, type=int, help="number of total epochs")
    parser.add_argument("--local_rank", type=int, default=-1, help="passed from the launcher")
    parser.add_argument("--stage", default=0, type=int, choices=[0, 1, 2, 3])
    parser.add_argument("--out", type=Path, help="folder of the losses, a file per rank")
    return deepspeed.add_config_arguments(parser).parse_args()


def images(count=320):
    """Give each of ten classes a picture of its own, under noise."""
    generator = torch.Generator().manual_seed(1)
    classes = torch.randn(10, 3, 32, 32, generator=generator)
    labels = torch.randint(0, 10, (count,), generator=generator)
    noise = torch.randn(count, 3, 32, 32, generator=generator)
    return TensorDataset(0.5 * classes[labels] + 0.3 * noise, labels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def get_ds_config(args):
    return {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {
                "lr": 0.005,
                "betas": [0.8, 0.999],
                "eps": 1e-8,
                "weight_decay": 3e-7,
                "torch_adam": True,
            },
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.005, "warmup_num_steps": 5},
        },
        "gradient_clipping": 1.0,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": args.stage,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "cpu_offload": False,
        },
    }


def main(args):
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, _, trainloader, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=parameters,
        training_data=images(),
        config=get_ds_config(args),
    )
    criterion = nn.CrossEntropyLoss()
    losses = []
    for _ in range(args.epochs):
        for data in trainloader:
            inputs, labels = data[0].to(model_engine.device), data[1].to(model_engine.device)
            outputs = model_engine(inputs)
            loss = criterion(outputs, labels)
            model_engine.backward(loss)
            model_engine.step()
            losses.append(loss.item())
    (args.out / f"{model_engine.global_rank}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(add_argument())
