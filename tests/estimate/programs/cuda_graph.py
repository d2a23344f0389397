"""A training step that is captured in a CUDA graph after a warm-up on a side stream."""

import torch
from torch import nn

model = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
batch, wanted = torch.randn(64, 1024, device="cuda"), torch.randn(64, 1024, device="cuda")


def step() -> torch.Tensor:
    loss = nn.functional.mse_loss(model(batch), wanted)
    loss.backward()
    optimizer.step()
    return loss


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(graph):
    loss = step()
for _ in range(3):
    batch.copy_(torch.randn(64, 1024))
    graph.replay()
    print(loss.item())
