"""The programs whose layers are looked for: models of ten families, small, from configs and in PyTorch."""

# Modules return what calls of modules give, which has no type; some of these libraries have none at all.
# mypy: disable-error-code="no-any-return, misc, assignment, operator, call-overload, arg-type"
# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Loss = Callable[[nn.Module], torch.Tensor]
Built = tuple[nn.Module, Loss]
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
TOKENS = (2, 128)
DEVICE = os.environ.get("LAYERS_DEVICE", "cuda")
"""The device of the programs. Asking torch for one would keep forked processes from using it."""


def tokens(batch: int = TOKENS[0], length: int = TOKENS[1]) -> torch.Tensor:
    return torch.ones(batch, length, dtype=torch.long, device=DEVICE)


def language(config: str, model: str = "", **options: Any) -> Callable[[], Built]:
    """A model of transformers that computes a loss from tokens that are its labels, too."""

    def build() -> Built:
        import transformers

        made = getattr(transformers, config)(**{**SMALL, **options})
        kind = getattr(transformers, model) if model else transformers.AutoModelForCausalLM
        net = kind(made) if model else kind.from_config(made, attn_implementation="eager")
        return net.train(), lambda net: net(input_ids=(x := tokens()), labels=x).loss

    return build


def images(config: str, model: str, size: int = 64, **options: Any) -> Callable[[], Built]:
    """A classifier of images of transformers."""

    def build() -> Built:
        import transformers

        net = getattr(transformers, model)(getattr(transformers, config)(**options))

        def loss(net: nn.Module) -> torch.Tensor:
            x = torch.ones(2, 3, size, size, device=DEVICE)
            return net(pixel_values=x, labels=torch.ones(2, dtype=torch.long, device=DEVICE)).loss

        return net.train(), loss

    return build


def speech(config: str, model: str, **options: Any) -> Callable[[], Built]:
    """An encoder of waveforms of transformers."""

    def build() -> Built:
        import transformers

        net = getattr(transformers, model)(getattr(transformers, config)(**{**SMALL, **options}))
        return net.train(), lambda net: net(torch.ones(1, 16_000, device=DEVICE)).last_hidden_state.mean()

    return build


def whisper() -> Built:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in SIDES.items()}
    net = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=512,
            d_model=128,
            num_mel_bins=16,
            max_source_positions=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            **sizes,
        )
    )
    return (
        net.train(),
        lambda net: net(input_features=torch.ones(2, 16, 128, device=DEVICE), labels=tokens(2, 32)).loss,
    )


SIDES = {"layers": 3, "attention_heads": 4, "ffn_dim": 256}
BOTH_SIDES = {
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "d_model": 128,
}


def clip() -> Built:
    from transformers import CLIPConfig, CLIPModel

    text = {**SMALL, "max_position_embeddings": 64}
    vision = {**SMALL, "image_size": 64, "patch_size": 16}
    net = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=64))

    def loss(net: nn.Module) -> torch.Tensor:
        pixels = torch.ones(2, 3, 64, 64, device=DEVICE)
        return net(input_ids=tokens(2, 32), pixel_values=pixels, return_loss=True).loss

    return net.train(), loss


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = 4
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        q, k, v = (
            y.view(n, length, self.heads, -1).transpose(1, 2)
            for y in (self.query(x), self.key(x), self.value(x))
        )
        weights = self.drop((q @ k.transpose(-2, -1)).softmax(-1))
        return self.out((weights @ v).transpose(1, 2).reshape(n, length, width))


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = mlp or nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Mixture(nn.Module):
    """Every expert sees all tokens, weighted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(Expert(width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out = out + expert(x) * weights[..., number : number + 1]
        return out


class Decoder(nn.Module):
    """A language model; `how` says how its blocks are kept and called."""

    def __init__(self, how: str = "list", width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Embedding(512, width)
        if how == "shared":
            self.block = Block(width)
        elif how == "dict":
            self.blocks = nn.ModuleDict({f"block{n}": Block(width) for n in range(depth)})
        elif how == "mixture":
            self.blocks = nn.ModuleList(Block(width, Mixture(width)) for _ in range(depth))
        else:
            self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        if self.how == "shared":
            for _ in range(4):
                x = self.block(x)
        elif self.how == "dict":
            for block in self.blocks.values():
                x = block(x)
        elif self.how == "checkpoint":
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))


def token_loss(net: nn.Module) -> torch.Tensor:
    x = tokens()
    return F.cross_entropy(net(x).flatten(0, 1), x.flatten())


def decoder(how: str) -> Callable[[], Built]:
    return lambda: (Decoder(how), token_loss)


class DoubleConv(nn.Module):
    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(inside, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, out), nn.GroupNorm(4, out)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm1(self.conv1(x)))
        return self.act(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        pairs = list(pairwise(widths))
        self.downs = nn.ModuleList(DoubleConv(a, b) for a, b in pairs)
        self.middle = DoubleConv(widths[-1], widths[-1])
        self.rises = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(pairs))
        self.ups = nn.ModuleList(DoubleConv(a + b, a) for a, b in reversed(pairs))
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, kept = self.stem(x), []
        for down in self.downs:
            x = down(x)
            kept.append(x)
            x = self.pool(x)
        x = self.middle(x)
        for rise, up in zip(self.rises, self.ups, strict=True):
            x = rise(x)
            x = up(torch.cat((x, F.interpolate(kept.pop(), x.shape[-2:])), 1))
        return self.head(x)


def unet() -> Built:
    return UNet(), lambda net: net(torch.ones(2, 3, 64, 64, device=DEVICE)).square().mean()


class Residual(nn.Module):
    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.short = nn.Sequential() if stride == 1 else nn.Conv2d(inside, out, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.short(x))


def residual() -> Built:
    widths = (16, 16, 32, 32, 64)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        *(Residual(a, b, 1 + (a != b)) for a, b in pairwise(widths)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    labels = torch.ones(4, dtype=torch.long)
    return net, lambda net: F.cross_entropy(net(torch.ones(4, 3, 32, 32, device=DEVICE)), labels.to(DEVICE))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 64)
        self.core = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)
        self.head = nn.Linear(64, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        return self.head(self.core(x, x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 64)
        self.cells = nn.ModuleList([nn.GRUCell(64, 64), nn.GRUCell(64, 64)])
        self.head = nn.Linear(64, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, out = self.embed(x), []
        states = [torch.zeros(x.shape[0], 64, device=x.device) for _ in self.cells]
        for time in range(8):
            y = x[:, time]
            for number, cell in enumerate(self.cells):
                y = states[number] = cell(y, states[number])
            out.append(y)
        return self.head(torch.stack(out, 1))


def recurrent() -> Built:
    def loss(net: nn.Module) -> torch.Tensor:
        x = tokens(4, 8)
        return F.cross_entropy(net(x).flatten(0, 1), x.flatten())

    return Recurrent(), loss


class Mixer(nn.Module):
    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.token_norm, self.channel_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(places, 2 * places), nn.GELU(), nn.Linear(2 * places, places))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.token_norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.channel_norm(x))


def mixer() -> Built:
    net = nn.Sequential(
        nn.Conv2d(3, 64, 8, 8), nn.Flatten(2), *(Mixer(64, 64) for _ in range(4)), nn.Linear(64, 4)
    )
    return net, lambda net: net(torch.ones(2, 3, 64, 64, device=DEVICE)).square().mean()


def with_checkpoints(config: str, **options: Any) -> Built:
    net, loss = language(config, **options)()
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return net, loss


def with_lora(modules: list[str] | str) -> Built:
    from peft import LoraConfig, get_peft_model

    net, loss = language("LlamaConfig", num_key_value_heads=2)()
    return get_peft_model(net, LoraConfig(r=8, target_modules=modules)), loss


def accelerated() -> Built:
    net, loss = language("Qwen2Config", num_key_value_heads=2)()

    def train(loss_of: Loss, truth: Any) -> None:
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="bf16")
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
        for _ in range(2):
            loss = loss_of(model)
            truth.before_backward(loss)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    net.train_as_user = train
    return net, loss


def trainer() -> Built:
    net, loss = language("GPTNeoXConfig")()

    def train(_: Loss, truth: Any) -> None:
        from transformers import Trainer, TrainingArguments

        class Told(Trainer):
            def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
                answer = super().compute_loss(*args, **kwargs)
                truth.before_backward(answer[0] if isinstance(answer, tuple) else answer)
                return answer

        row = torch.ones(128, dtype=torch.long)
        data = [{"input_ids": row, "labels": row}] * 4
        arguments = TrainingArguments(
            "/tmp/layers_trainer",
            max_steps=2,
            per_device_train_batch_size=2,
            report_to=[],
            save_strategy="no",
            bf16=True,
            logging_strategy="no",
        )
        Told(net, arguments, train_dataset=data).train()

    net.train_as_user = train
    return net, loss


def sharded() -> Built:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    net = Decoder()

    def train(loss_of: Loss, truth: Any) -> None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617", "RANK": "0", "WORLD_SIZE": "1"}
        dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
        net.cuda()
        for block in net.blocks:
            fully_shard(block)
        fully_shard(net)
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(2):
            loss = loss_of(net)
            truth.before_backward(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    net.train_as_user = train
    return net, token_loss


def compiled() -> Built:
    net = Decoder(depth=2)

    def train(loss_of: Loss, _: Any) -> None:
        net.cuda()
        fast = torch.compile(net)
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(2):
            loss_of(fast).backward()
            optimizer.step()
            optimizer.zero_grad()

    net.train_as_user = train
    return net, token_loss


VIT = {k: v for k, v in SMALL.items() if k != "vocab_size"} | {"image_size": 64, "patch_size": 16}
ENCODER = {"max_position_embeddings": 160, "pad_token_id": 0}
PROGRAMS: dict[str, Callable[[], Built]] = {
    # decoders
    "qwen2": language("Qwen2Config", num_key_value_heads=2),
    "falcon": language("FalconConfig"),
    "gpt_neox": language("GPTNeoXConfig"),
    "olmo2": language("Olmo2Config", num_key_value_heads=4),
    "stablelm": language("StableLmConfig", num_key_value_heads=4),
    "gptj": language("GPTJConfig", n_embd=128, n_layer=4, n_head=4, rotary_dim=16),
    # encoders
    "roberta": language("RobertaConfig", "RobertaForMaskedLM", **ENCODER),
    "distilbert": language(
        "DistilBertConfig", "DistilBertForMaskedLM", dim=128, n_layers=3, n_heads=4, hidden_dim=256
    ),
    "electra": language("ElectraConfig", "ElectraForMaskedLM", **ENCODER, embedding_size=64),
    # encoders with decoders
    "pegasus": language("PegasusConfig", "PegasusForConditionalGeneration", **BOTH_SIDES),
    "blenderbot": language("BlenderbotConfig", "BlenderbotForConditionalGeneration", **BOTH_SIDES),
    "translator": lambda: (Translator(), token_loss),
    # images
    "dinov2": images("Dinov2Config", "Dinov2ForImageClassification", **VIT),
    "beit": images("BeitConfig", "BeitForImageClassification", **VIT),
    "segformer": images(
        "SegformerConfig",
        "SegformerForImageClassification",
        hidden_sizes=[16, 32, 64, 64],
        num_attention_heads=[1, 2, 2, 4],
    ),
    "regnet": images(
        "RegNetConfig",
        "RegNetForImageClassification",
        embedding_size=16,
        hidden_sizes=[32, 64, 64, 128],
        depths=[1, 2, 3, 1],
        groups_width=16,
    ),
    "mixer": mixer,
    "residual": residual,
    # U-Nets
    "unet": unet,
    # mixtures of experts
    "qwen2_moe": language(
        "Qwen2MoeConfig",
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
    ),
    "mixture": decoder("mixture"),
    # sound
    "wav2vec2": speech(
        "Wav2Vec2Config",
        "Wav2Vec2Model",
        conv_dim=[32] * 7,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        mask_time_prob=0.0,
    ),
    "whisper": whisper,
    # images and text
    "clip": clip,
    # state spaces and recurrences
    "mamba2": language("Mamba2Config", num_heads=8, head_dim=32, state_size=16, n_groups=2, chunk_size=32),
    "recurrent": recurrent,
    # plain
    "decoder": decoder("list"),
    # wrappers
    "lora": lambda: with_lora(["q_proj", "v_proj"]),
    "accelerate": accelerated,
    "trainer": trainer,
    "fsdp2": sharded,
    "compiled": compiled,
    # checkpointing
    "checkpoint": decoder("checkpoint"),
    "checkpoint_hf": lambda: with_checkpoints("MistralConfig", num_key_value_heads=2),
    # modules that run more than once
    "shared": decoder("shared"),
    "albert": language("AlbertConfig", "AlbertForMaskedLM", **ENCODER, embedding_size=64),
    "dict": decoder("dict"),
}

NEW: dict[str, Callable[[], Built]] = {
    # decoders
    "phi": language("PhiConfig"),
    "gemma": language("GemmaConfig", num_key_value_heads=2, head_dim=32),
    "granite": language("GraniteConfig", num_key_value_heads=2),
    "cohere": language("CohereConfig", num_key_value_heads=2),
    "mpt": language("MptConfig", d_model=128, n_heads=4, n_layers=4, max_seq_len=128),
    "codegen": language("CodeGenConfig", n_embd=128, n_layer=4, n_head=4, rotary_dim=16, n_positions=128),
    "starcoder2": language("Starcoder2Config", num_key_value_heads=2),
    "xglm": language("XGLMConfig", d_model=128, ffn_dim=256, num_layers=4, attention_heads=4),
    # encoders
    "bert_generation": language("BertGenerationConfig", "BertGenerationDecoder", **ENCODER),
    "mobilebert": language(
        "MobileBertConfig",
        "MobileBertForMaskedLM",
        **ENCODER,
        embedding_size=64,
        intra_bottleneck_size=64,
        true_hidden_size=64,
    ),
    "squeezebert": language("SqueezeBertConfig", "SqueezeBertForMaskedLM", **ENCODER, embedding_size=128),
    "ernie": language("ErnieConfig", "ErnieForMaskedLM", **ENCODER),
    "mpnet": language("MPNetConfig", "MPNetForMaskedLM", max_position_embeddings=160),
    "esm": language("EsmConfig", "EsmForMaskedLM", **ENCODER, mask_token_id=3),
    # encoders with decoders
    "mbart": language("MBartConfig", "MBartForConditionalGeneration", **BOTH_SIDES),
    "marian": language(
        "MarianConfig", "MarianMTModel", **BOTH_SIDES, pad_token_id=0, decoder_start_token_id=0
    ),
    "m2m": language("M2M100Config", "M2M100ForConditionalGeneration", **BOTH_SIDES),
    # images
    "deit": images("DeiTConfig", "DeiTForImageClassification", **VIT),
    "poolformer": images(
        "PoolFormerConfig",
        "PoolFormerForImageClassification",
        hidden_sizes=[16, 32, 64, 64],
        depths=[1, 1, 2, 1],
    ),
    "convnextv2": images(
        "ConvNextV2Config",
        "ConvNextV2ForImageClassification",
        hidden_sizes=[16, 32, 64, 64],
        depths=[1, 1, 2, 1],
    ),
    "mobilevit": images(
        "MobileViTConfig",
        "MobileViTForImageClassification",
        hidden_sizes=[32, 48, 64],
        neck_hidden_sizes=[8, 16, 24, 32, 40, 48, 96],
        image_size=64,
    ),
    # mixtures of experts
    "olmoe": language("OlmoeConfig", num_key_value_heads=2, num_experts=4, num_experts_per_tok=2),
    "granitemoe": language(
        "GraniteMoeConfig", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    ),
    # sound
    "hubert": speech(
        "HubertConfig",
        "HubertModel",
        conv_dim=[32] * 7,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        mask_time_prob=0.0,
    ),
    "sew": speech(
        "SEWConfig",
        "SEWModel",
        conv_dim=[32] * 13,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        mask_time_prob=0.0,
    ),
    # state spaces
    "falcon_mamba": language("FalconMambaConfig", state_size=8),
    # checkpointing, wrappers
    "lora_all": lambda: with_lora("all-linear"),
    "checkpoint_new": lambda: with_checkpoints("PhiConfig"),
}
"""Programs that nobody looked at before the rules were written."""
