"""Two networks and two optimizers; random numbers of a generator on the GPU."""

import torch
from torch import nn

device = "cuda"
generator = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 784)).to(device)
critic = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(), nn.Linear(512, 1)).to(device)
of_generator = torch.optim.Adam(generator.parameters())
of_critic = torch.optim.Adam(critic.parameters())
judge = nn.BCEWithLogitsLoss()
random = torch.Generator(device=device).manual_seed(3)
for _ in range(4):
    real = torch.rand(256, 784, device=device)
    fake = generator(torch.randn(256, 64, device=device, generator=random))
    ones, zeros = torch.ones(256, 1, device=device), torch.zeros(256, 1, device=device)
    of_critics = judge(critic(real), ones) + judge(critic(fake.detach()), zeros)
    of_critic.zero_grad()
    of_critics.backward()
    of_critic.step()
    of_generators = judge(critic(fake), ones)
    of_generator.zero_grad()
    of_generators.backward()
    of_generator.step()
    if torch.isnan(of_critics):
        raise SystemExit("not a number")
    print(of_critics.item(), of_generators.item())
