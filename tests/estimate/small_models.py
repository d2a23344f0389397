"""Ten small models built from configs, without downloads. Each function returns model, loss and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, Callable[[], torch.Tensor], list[torch.Tensor]]

VOCABULARY, LENGTH, BATCH = 128, 32, 2


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, shape or (BATCH, LENGTH))


def language_model(kind: str, **config: Any) -> Built:
    import transformers

    settings = getattr(transformers, f"{kind}Config")(vocab_size=VOCABULARY, use_cache=False, **config)
    head = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}.get(kind, f"{kind}ForCausalLM")
    model = getattr(transformers, head)(settings)
    ids = tokens()
    return model, lambda: model(input_ids=ids, labels=ids).loss, [ids]


def gpt2() -> Built:
    return language_model(
        "GPT2", n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )


def llama() -> Built:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return language_model("Llama", **sizes)


def qwen2() -> Built:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return language_model("Qwen2", num_key_value_heads=2, **sizes)


def mixtral() -> Built:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return language_model(
        "Mixtral",
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="batched_mm",
        **sizes,
    )


def bert() -> Built:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return language_model("Bert", **sizes)


def t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    settings = T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        d_kv=16,
        use_cache=False,
        decoder_start_token_id=0,
    )
    model, ids = T5ForConditionalGeneration(settings), tokens()
    return model, lambda: model(input_ids=ids, labels=ids).loss, [ids]


def vit() -> Built:
    from transformers import ViTConfig, ViTForImageClassification
    from transformers.initialization import no_init_weights

    settings = ViTConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )
    with no_init_weights():  # initialisers loop until all values are within bounds
        model = ViTForImageClassification(settings)
    images = torch.randn(BATCH, 3, 32, 32)
    return model, lambda: model(pixel_values=images).logits.sum(), [images]


def resnet50() -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig())  # the default has 50 layers with bottlenecks
    images = torch.randn(BATCH, 3, 64, 64)
    return model, lambda: model(pixel_values=images).logits.sum(), [images]


def whisper() -> Built:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    settings = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=32,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )
    model = WhisperForConditionalGeneration(settings).requires_grad_()  # MemTracker needs it
    sound, ids = torch.randn(BATCH, 80, 64), tokens()
    return model, lambda: model(input_features=sound, labels=ids).loss, [sound, ids]


class Cells(nn.Module):
    """An LSTM of cells: without the correction, the fused layer has no fake implementation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.cell = nn.LSTMCell(64, 64)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        state = None
        for step in self.embedding(ids).unbind(1):
            state = self.cell(step, state)
        assert state is not None
        return self.head(state[0])


def lstm() -> Built:
    model, ids = Cells(), tokens()
    return model, lambda: model(ids).sum(), [ids]


MODELS: dict[str, Callable[[], Built]] = {
    "GPT-2": gpt2,
    "Llama": llama,
    "Qwen2": qwen2,
    "BERT": bert,
    "ViT": vit,
    "ResNet-50": resnet50,
    "T5": t5,
    "Whisper": whisper,
    "Mixtral": mixtral,
    "LSTM": lstm,
}
