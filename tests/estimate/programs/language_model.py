"""A small GPT-2 of transformers, in the loop that most people write."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config(vocab_size=5000, n_layer=2, n_embd=256, n_head=4)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step in range(3):
    tokens = torch.randint(0, 5000, (4, 256), device="cuda")
    output = model(input_ids=tokens, labels=tokens)
    output.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, output.loss.item())
