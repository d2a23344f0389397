"""Record memory with torch.profiler: give it a handler, open TensorBoard, and choose the tab Memory."""

import torch
from torch import nn
from torch.profiler import profile, schedule

from tb_memplugin import memory_trace_handler

model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
optimizer = torch.optim.AdamW(model.parameters())

with profile(
    profile_memory=True,
    schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
    on_trace_ready=memory_trace_handler("runs/quickstart", model=model, optimizer=optimizer),
) as profiler:
    for _ in range(5):
        batch = torch.randn(256, 512)
        loss = nn.functional.mse_loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()

# Then: tensorboard --logdir runs
