"""The loop of plain.py with its states partitioned: mpiexec -n 4 python examples/partitioned.py."""

import torch
import torch.nn.functional as F
from torch import nn

import hpczero

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
engine = hpczero.Engine(model, {"zero_optimization": {"stage": 3}}, optimizer=optimizer)

for step in range(100):
    torch.manual_seed(step * engine.world_size + engine.rank)
    points = torch.randn(32, 2)
    quadrants = (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long()
    loss = F.cross_entropy(engine(points), quadrants)
    engine.backward(loss)
    engine.step()
    scheduler.step()

print(f"loss {loss.item():.4f}")
