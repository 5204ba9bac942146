"""An ordinary PyTorch training loop: learn to say which quadrant a point lies in."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)

for step in range(100):
    torch.manual_seed(step)
    points = torch.randn(32, 2)
    quadrants = (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long()
    loss = F.cross_entropy(model(points), quadrants)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()

print(f"loss {loss.item():.4f}")
