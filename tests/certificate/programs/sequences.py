"""Encoders, recurrent networks, speech, graphs and reinforcement learning."""

from __future__ import annotations

import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

from tests.certificate.programs.catalog import program, train
from tests.certificate.run import Run


def encoder(width: int = 32, dropout: float = 0.0, **options) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=dropout, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2)


@program("encoder")
def encoder_in_evaluation(run: Run) -> None:
    """torch's fast path: it needs layers without hooks."""
    model = encoder().eval()
    with run.window(model) as step, torch.no_grad():
        for _ in range(2):
            run.value(model(torch.randn(4, 16, 32)))
            step()


@program("encoder", observed=False)
def encoder_with_padding(run: Run) -> None:
    """The fast path on nested tensors, on which torch's observer crashes under a dispatch mode."""
    model = encoder(activation="gelu").eval()
    mask = torch.arange(16)[None] >= torch.tensor([[4], [9], [16], [12]])
    with run.window(model) as step, torch.no_grad():
        run.value(model(torch.randn(4, 16, 32), src_key_padding_mask=mask))
        step()


@program("encoder")
def encoder_with_validation_in_each_step(run: Run) -> None:
    model = nn.Sequential(encoder(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss():
        model.eval()
        with torch.no_grad():
            run.value(model(torch.randn(8, 16, 32)).square().mean())
        model.train()
        return F.cross_entropy(model(torch.randn(2, 16, 32)).flatten(0, 1), torch.arange(32) % 10)

    train(run, model, optimizer, loss)


@program("encoder")
def encoder_in_training(run: Run) -> None:
    model = encoder(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train(run, model, optimizer, lambda: model(torch.randn(2, 16, 32)).square().mean())


@program("encoder")
def encoder_and_decoder(run: Run) -> None:
    model = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
    optimizer = torch.optim.Adam(model.parameters())
    train(run, model, optimizer, lambda: model(torch.randn(2, 8, 32), torch.randn(2, 6, 32)).square().mean())


@program("encoder")
def attention_in_evaluation(run: Run) -> None:
    """The fast path of nn.MultiheadAttention by itself."""
    model = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    with run.window(model) as step, torch.inference_mode():
        x = torch.randn(2, 8, 32)
        run.value(model(x, x, x, need_weights=False)[0])
        run.value(model(x, x, x)[1])
        step()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(48, 50)
        self.cells = kind(16, 24, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, ids):
        return self.head(self.cells(self.embed(ids))[0]).flatten(0, 1)


@program("recurrent")
def long_short_term_memory(run: Run) -> None:
    model = Recurrent(nn.LSTM)
    optimizer = torch.optim.RMSprop(model.parameters())
    ids = torch.randint(0, 50, (4, 9))
    train(run, model, optimizer, lambda: F.cross_entropy(model(ids[:, :-1]), ids[:, 1:].flatten()))


@program("recurrent")
def gated_recurrent_unit_on_packed_sequences(run: Run) -> None:
    cells, head = nn.GRU(8, 16), nn.Linear(16, 1)
    model = nn.ModuleDict({"cells": cells, "head": head})
    optimizer = torch.optim.Adagrad(model.parameters())

    def loss():
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(7, 3, 8), torch.tensor([7, 5, 2]))
        padded, _ = nn.utils.rnn.pad_packed_sequence(cells(packed)[0])
        return head(padded).abs().mean()

    train(run, model, optimizer, loss)


@program("recurrent")
def truncated_backpropagation(run: Run) -> None:
    """The state of an LSTM cell goes from step to step."""
    cell, head = nn.LSTMCell(4, 8), nn.Linear(8, 4)
    model = nn.ModuleList([cell, head])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = torch.zeros(2, 8), torch.zeros(2, 8)
    with run.window(model, optimizer) as step:
        for _ in range(3):
            loss = torch.zeros(())
            for x in torch.randn(3, 2, 4):
                state = cell(x, state)
                loss = loss + (head(state[0]) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state = state[0].detach(), state[1].detach()
            run.value([loss, *state])
            step()


@program("speech")
def speech_with_connectionist_temporal_classification(run: Run) -> None:
    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frames = nn.Sequential(
                nn.Conv1d(1, 16, 5, stride=2), nn.GELU(), nn.Conv1d(16, 16, 5, stride=2)
            )
            self.gru, self.head = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 6)

        def forward(self, waves):
            states, _ = self.gru(self.frames(waves).transpose(1, 2))
            return self.head(states).log_softmax(-1).transpose(0, 1)

    model = Speech()
    optimizer = torch.optim.AdamW(model.parameters())

    def loss():
        scores = model(torch.randn(2, 1, 80))
        return F.ctc_loss(
            scores, torch.randint(1, 6, (2, 4)), torch.tensor([len(scores)] * 2), torch.tensor([4, 3])
        )

    train(run, model, optimizer, loss)


@program("speech")
def spectrograms(run: Run) -> None:
    model = nn.Sequential(
        nn.Conv1d(17, 8, 3), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(8, 2)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    window = torch.hann_window(32)

    def loss():
        spectrum = torch.stft(torch.randn(2, 256), 32, 16, window=window, return_complex=True).abs()
        return F.cross_entropy(model(spectrum), torch.tensor([0, 1]))

    train(run, model, optimizer, loss)


@program("graph")
def message_passing(run: Run) -> None:
    class Convolution(nn.Module):
        def __init__(self, width_in: int, width_out: int) -> None:
            super().__init__()
            self.own, self.neighbors = nn.Linear(width_in, width_out), nn.Linear(width_in, width_out)

        def forward(self, x, edges):
            messages = self.neighbors(x)[edges[0]]
            sums = torch.zeros(len(x), messages.shape[1]).index_add(0, edges[1], messages)
            most = torch.zeros_like(sums).scatter_reduce(
                0, edges[1][:, None].expand_as(messages), messages, "amax", include_self=False
            )
            return self.own(x) + sums + most

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Convolution(8, 16), Convolution(16, 4)])

        def forward(self, x, edges):
            for layer in self.layers:
                x = F.relu(layer(x, edges))
            return x

    model = Network()
    optimizer = torch.optim.Adam(model.parameters())
    edges, labels = torch.randint(0, 30, (2, 80)), torch.randint(0, 4, (30,))
    train(run, model, optimizer, lambda: F.cross_entropy(model(torch.randn(30, 8), edges), labels))


@program("graph")
def sparse_adjacency(run: Run) -> None:
    edges = torch.randint(0, 20, (2, 60))
    adjacency = torch.sparse_coo_tensor(edges, torch.ones(60), (20, 20)).coalesce()
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(
        run, model, optimizer, lambda: torch.sparse.mm(adjacency, model(torch.randn(20, 6))).square().mean()
    )


@program("reinforcement learning")
def deep_q_network(run: Run) -> None:
    """A replay buffer of tensors, and a target network that follows."""
    policy = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    target = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    target.load_state_dict(policy.state_dict())
    optimizer = torch.optim.Adam(policy.parameters())
    buffer: deque[tuple[torch.Tensor, ...]] = deque(maxlen=64)
    state = torch.randn(4)
    run.keep(target=target)
    with run.window(policy, optimizer) as step:
        for number in range(24):
            with torch.no_grad():
                action = policy(state).argmax() if random.random() > 0.2 else torch.tensor(number % 2)
            following = state * 0.9 + 0.1 * torch.randn(4)
            buffer.append((state, action, -following.norm(), following))
            state = following
            if number % 8 == 7:
                states, actions, rewards, next_states = map(
                    torch.stack, zip(*random.sample(buffer, 8), strict=True)
                )
                with torch.no_grad():
                    goal = rewards + 0.9 * target(next_states).amax(1)
                loss = F.smooth_l1_loss(policy(states).gather(1, actions[:, None])[:, 0], goal)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_value_(policy.parameters(), 1.0)
                optimizer.step()
                for slow, fast in zip(target.parameters(), policy.parameters(), strict=True):
                    slow.data.lerp_(fast.data, 0.1)
                run.value(loss)
                step()


@program("reinforcement learning")
def policy_gradient(run: Run) -> None:
    """Actions are sampled, log probabilities kept until the episode ends."""
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with run.window(model, optimizer) as step:
        for _ in range(2):
            state, chances, rewards = torch.randn(3), [], []
            for _ in range(6):
                actions = torch.distributions.Categorical(logits=model(state))
                action = actions.sample()
                chances.append(actions.log_prob(action))
                state = state.roll(int(action)) * 0.5
                rewards.append(float(state.sum()))
            returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
            loss = -(torch.stack(chances) * (returns - returns.mean())).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.value(loss)
            step()
