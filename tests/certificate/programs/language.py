"""Models of transformers, tiny, made from their configurations."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tests.certificate.programs.catalog import program, train
from tests.certificate.run import Run


def import_libraries() -> None:
    for create in (gpt2, bert, t5, llama):
        create()


def gpt2(**options: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**small, bos_token_id=0, eos_token_id=0, **options))


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    return BertForSequenceClassification(config)


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=63,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


@cache
def ids(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(
        1, 62, (batch, length), generator=torch.Generator(torch.empty(0).device).manual_seed(1)
    )


@program("language")
def gpt_2(run: Run) -> None:
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    train(run, model, optimizer, lambda: model(ids(), labels=ids()).loss)


@program("language")
def bert_fine_tuning(run: Run) -> None:
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters())
    labels = torch.tensor([0, 1])
    train(run, model, optimizer, lambda: model(ids(), attention_mask=ids() > 9, labels=labels).loss)


@program("language")
def bert_in_evaluation(run: Run) -> None:
    model = bert().eval()
    with run.window(model) as step, torch.no_grad():
        run.value(model(ids(), output_hidden_states=True, output_attentions=False).hidden_states)
        step()


@program("language")
def t_5(run: Run) -> None:
    model = t5()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(run, model, optimizer, lambda: model(input_ids=ids(), labels=ids(2, 5)).loss)


@program("language")
def llama_with_clipping_and_schedule(run: Run) -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=10)
    with run.window(model, optimizer) as step:
        for _ in range(2):
            loss = model(ids(), labels=ids()).loss
            loss.backward()
            run.value([loss, torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step()


@program("language")
def gradient_checkpointing_of_transformers(run: Run) -> None:
    model = gpt2(use_cache=False)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters())
    train(run, model, optimizer, lambda: model(ids(), labels=ids()).loss)


@program("language")
def low_rank_adapters(run: Run) -> None:
    """LoRA by hand: linear layers are replaced in the window, and the adapters merged at its end."""

    class Adapted(torch.nn.Module):
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = torch.nn.Linear(base.in_features, 2, bias=False)
            self.up = torch.nn.Linear(2, base.out_features, bias=False)
            torch.nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    model = llama().requires_grad_(False)
    with run.window(model) as step:
        for layer in model.model.layers:
            for name in ("q_proj", "v_proj"):
                setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
        for _ in range(2):
            loss = model(ids(), labels=ids()).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.value(loss)
            step()
        with torch.no_grad():
            for layer in model.model.layers:
                for name in ("q_proj", "v_proj"):
                    adapted = getattr(layer.self_attn, name)
                    adapted.base.weight += adapted.up.weight @ adapted.down.weight
                    setattr(layer.self_attn, name, adapted.base)
        run.value(model(ids()).logits)
    run.keep(optimizer=optimizer)
