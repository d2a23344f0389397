"""Calls of torch.cuda that programs make around a training: histories, statistics, an emptied cache, nvtx."""

import torch
from torch import nn

torch.cuda.memory._record_memory_history(max_entries=1000)
model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).cuda().bfloat16()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    with torch.cuda.nvtx.range("step"):
        output = model(torch.randn(512, 2048, device="cuda", dtype=torch.bfloat16))
        output.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(torch.cuda.memory_stats()["allocated_bytes.all.peak"], len(torch.cuda.memory_snapshot()))
    del output
    torch.cuda.empty_cache()
    print(torch.cuda.memory_reserved(), torch.cuda.get_device_name(0))
torch.cuda.memory._record_memory_history(enabled=None)
