"""Text that is generated token by token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.certificate.programs.catalog import program
from tests.certificate.programs.language import gpt2, ids, llama, t5
from tests.certificate.run import Run


@program("generation")
def greedy_generation_of_gpt_2(run: Run) -> None:
    model = gpt2().eval()
    with run.window(model) as step:
        run.value(model.generate(ids(), max_new_tokens=6, do_sample=False, pad_token_id=0))
        step()


@program("generation")
def sampled_generation_of_llama(run: Run) -> None:
    model = llama().eval()
    with run.window(model) as step:
        run.value(model.generate(ids(), max_new_tokens=6, do_sample=True, top_k=10, num_return_sequences=2))
        step()


@program("generation")
def beam_search_of_t_5(run: Run) -> None:
    model = t5().eval()
    with run.window(model) as step:
        run.value(model.generate(ids(), max_new_tokens=5, num_beams=3))
        step()


@program("generation")
def cache_written_by_hand(run: Run) -> None:
    """Keys and values are concatenated outside of modules."""
    embed, project, head = nn.Embedding(32, 16), nn.Linear(16, 48), nn.Linear(16, 32)
    model = nn.ModuleList([embed, project, head]).eval()
    with run.window(model) as step, torch.no_grad():
        keys, values = torch.zeros(1, 0, 16), torch.zeros(1, 0, 16)
        token = torch.tensor([[3]])
        for _ in range(6):
            query, key, value = project(embed(token)).chunk(3, -1)
            keys, values = torch.cat([keys, key], 1), torch.cat([values, value], 1)
            token = head(F.scaled_dot_product_attention(query, keys, values))[:, -1].argmax(-1, keepdim=True)
            run.value(token)
            step()


@program("generation")
def generator_of_tokens(run: Run) -> None:
    """A Python generator that is left before its end, with a model inside."""
    model = nn.GRUCell(8, 8)

    def tokens():
        state = torch.zeros(1, 8)
        with torch.no_grad():
            while True:
                state = model(state, state)
                yield state

    with run.window(model) as step:
        stream = tokens()
        for _ in range(3):
            run.value(next(stream))
            step()
        stream.close()
