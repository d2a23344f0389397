"""An MLP on data of a loader, with accuracy, a schedule, clipped gradients and the best result."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data = TensorDataset(torch.randn(300, 512), torch.randint(0, 10, (300,)))
loader = DataLoader(data, batch_size=64, shuffle=True, pin_memory=False)
model = nn.Sequential(nn.Linear(512, 4096), nn.GELU(), nn.Dropout(0.1), nn.Linear(4096, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
best = 0.0
for _epoch in range(2):
    correct = 0
    for batch, labels in loader:
        batch, labels = batch.to(device), labels.to(device)
        output = model(batch)
        loss = nn.functional.cross_entropy(output, labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"loss {loss:.3f}")
        correct += (output.argmax(1) == labels).sum().item()
    schedule.step()
    print(f"{correct} of {len(data)} right")
    if correct / len(data) > best:
        best = correct / len(data)
