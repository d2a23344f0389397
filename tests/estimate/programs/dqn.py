"""A replay buffer that grows on the GPU, actions by argmax, and a second copy of the network."""

import random
from collections import deque

import torch
from torch import nn


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 2)).cuda()


random.seed(0)
online, target = network(), network()
target.load_state_dict(online.state_dict())
optimizer = torch.optim.Adam(online.parameters())
replay: deque = deque(maxlen=100)
state = torch.zeros(4, device="cuda")
for step in range(150):
    with torch.no_grad():
        action = online(state).argmax().item()
    after = torch.randn(4, device="cuda")
    replay.append((state, action, 1.0, after))
    state = after
    if len(replay) >= 32:
        states, actions, rewards, afters = zip(*random.sample(replay, 32), strict=True)
        with torch.no_grad():
            best = target(torch.stack(afters)).max(1).values
        wanted = torch.tensor(rewards, device="cuda") + 0.99 * best
        chosen = online(torch.stack(states)).gather(1, torch.tensor(actions, device="cuda")[:, None])[:, 0]
        loss = nn.functional.smooth_l1_loss(chosen, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if step % 50 == 0:
        target.load_state_dict(online.state_dict())
