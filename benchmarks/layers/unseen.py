"""Programs of `benchmarks.layers` that nobody had looked at when the rules were written; most are by hand."""

# Modules return what calls of modules give, which has no type.
# mypy: disable-error-code="no-any-return, operator, union-attr, index, attr-defined, misc"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.layers.programs import DEVICE, ENCODER, Built, images, language


# A Sequential of convolutions and blocks
class Gate(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.down = nn.Linear(c, c // 2)
        self.up = nn.Linear(c // 2, c)

    def forward(self, x: torch.Tensor) -> Any:
        s = x.mean((2, 3))
        return x * torch.sigmoid(self.up(F.relu(self.down(s))))[:, :, None, None]


class Conv(nn.Module):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(a, b, 3, padding=1)
        self.norm = nn.BatchNorm2d(b)
        self.gate = Gate(b)

    def forward(self, x: torch.Tensor) -> Any:
        return self.gate(F.relu(self.norm(self.conv(x))))


def vgg() -> Built:
    net = nn.Sequential(
        Conv(3, 16),
        nn.MaxPool2d(2),
        *[Conv(16, 16) for _ in range(3)],
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(16 * 16 * 16, 10),
    )
    return net, lambda net: net(torch.ones(4, 3, 64, 64, device=DEVICE)).square().mean()


# Torch's attention, in a Sequential
class Layer(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(w, 4, batch_first=True)
        self.n1 = nn.LayerNorm(w)
        self.n2 = nn.LayerNorm(w)
        self.ff = nn.Sequential(nn.Linear(w, 4 * w), nn.GELU(), nn.Linear(4 * w, w))

    def forward(self, x: torch.Tensor) -> Any:
        h = self.n1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.ff(self.n2(x))


class Stack(nn.Module):
    def __init__(self, w: int = 64, n: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, w)
        self.layers = nn.Sequential(*(Layer(w) for _ in range(n)))
        self.head = nn.Linear(w, 100)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.layers(self.embed(ids)))


def stack() -> Built:
    def loss(net: nn.Module) -> torch.Tensor:
        ids = torch.ones(4, 32, dtype=torch.long, device=DEVICE)
        return F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())

    return Stack(), loss


# A graph network
class GraphConv(nn.Module):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.own = nn.Linear(a, b)
        self.neighbours = nn.Linear(a, b, bias=False)
        self.norm = nn.BatchNorm1d(b)

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> Any:
        message = self.neighbours(x)[source]
        gathered = torch.zeros_like(message[: x.shape[0]]).index_add(0, target, message)
        return self.norm(self.own(x) + gathered)


class GraphNet(nn.Module):
    def __init__(self, w: int = 64, n: int = 4) -> None:
        super().__init__()
        self.encode = nn.Linear(16, w)
        self.convs = nn.ModuleList([GraphConv(w, w) for _ in range(n)])
        self.readout = nn.Sequential(nn.Linear(w, w), nn.ReLU(), nn.Linear(w, 3))

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> Any:
        h = F.relu(self.encode(x))
        for _i, conv in enumerate(self.convs):
            h = h + F.dropout(F.relu(conv(h, source, target)), 0.1, self.training)
        return self.readout(h.mean(0, keepdim=True))


def gnn() -> Built:
    def loss(net: nn.Module) -> torch.Tensor:
        x = torch.ones(512, 16, device=DEVICE)
        s = torch.arange(512, device=DEVICE).repeat(4)
        return net(x, s, s.flip(0)).square().mean()

    return GraphNet(), loss


# MBConv, in stages, as timm makes them
class SqueezeExcite(nn.Module):
    def __init__(self, c: int, r: int) -> None:
        super().__init__()
        self.conv_reduce = nn.Conv2d(c, r, 1)
        self.act1 = nn.SiLU(inplace=True)
        self.conv_expand = nn.Conv2d(r, c, 1)
        self.gate = nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> Any:
        s = x.mean((2, 3), keepdim=True)
        s = self.conv_expand(self.act1(self.conv_reduce(s)))
        return x * self.gate(s)


class InvertedResidual(nn.Module):
    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        m = a * 4
        self.has_skip = stride == 1 and a == b
        self.conv_pw = nn.Conv2d(a, m, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(m)
        self.conv_dw = nn.Conv2d(m, m, 3, stride, 1, groups=m, bias=False)
        self.bn2 = nn.BatchNorm2d(m)
        self.se = SqueezeExcite(m, a)
        self.conv_pwl = nn.Conv2d(m, b, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(b)

    def forward(self, x: torch.Tensor) -> Any:
        shortcut = x
        x = F.silu(self.bn1(self.conv_pw(x)))
        x = F.silu(self.bn2(self.conv_dw(x)))
        x = self.se(x)
        x = self.bn3(self.conv_pwl(x))
        if self.has_skip:
            x = x + shortcut
        return x


class EfficientNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_stem = nn.Conv2d(3, 16, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        stages = []
        a = 16
        for b, n in ((16, 2), (24, 2), (40, 3)):
            stages.append(
                nn.Sequential(
                    *[InvertedResidual(a if i == 0 else b, b, 2 if i == 0 else 1) for i in range(n)]
                )
            )
            a = b
        self.blocks = nn.Sequential(*stages)
        self.classifier = nn.Linear(40, 10)

    def forward(self, x: torch.Tensor) -> Any:
        x = F.silu(self.bn1(self.conv_stem(x)))
        x = self.blocks(x)
        return self.classifier(x.mean((2, 3)))


def mbconv() -> Built:
    return EfficientNet(), lambda net: F.cross_entropy(
        net(torch.ones(4, 3, 64, 64, device=DEVICE)), torch.ones(4, dtype=torch.long, device=DEVICE)
    )


# A vision transformer as timm writes it
class Mlp(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(w, 4 * w)
        self.act = nn.GELU()
        self.drop1 = nn.Dropout(0.1)
        self.fc2 = nn.Linear(4 * w, w)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop1(x)
        x = self.fc2(x)
        return x


class LayerScale(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(1e-5 * torch.ones(w))

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.gamma


class Attention(nn.Module):
    def __init__(self, w: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(w, 3 * w)
        self.q_norm = nn.LayerNorm(w // heads)
        self.k_norm = nn.LayerNorm(w // heads)
        self.proj = nn.Linear(w, w)

    def forward(self, x: torch.Tensor) -> Any:
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        attn = (q * (width // self.heads) ** -0.5) @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(batch, length, width)
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(w)
        self.attn = Attention(w)
        self.ls1 = LayerScale(w)
        self.norm2 = nn.LayerNorm(w)
        self.mlp = Mlp(w)
        self.ls2 = LayerScale(w)

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.ls1(self.attn(self.norm1(x)))
        x = x + self.ls2(self.mlp(self.norm2(x)))
        return x


class VisionTransformer(nn.Module):
    def __init__(self, w: int = 64, n: int = 4) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, w, 8, 8)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, w))
        self.pos_embed = nn.Parameter(torch.zeros(1, 65, w))
        self.blocks = nn.Sequential(*[Block(w) for i in range(n)])
        self.norm = nn.LayerNorm(w)
        self.head = nn.Linear(w, 10)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        x = self.blocks(x)
        return self.head(self.norm(x)[:, 0])


def timm_vit() -> Built:
    return VisionTransformer(), lambda net: F.cross_entropy(
        net(torch.ones(4, 3, 64, 64, device=DEVICE)), torch.ones(4, dtype=torch.long, device=DEVICE)
    )


# A variational autoencoder of convolutions
class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten()
        )
        self.to_mean = nn.Linear(32 * 16 * 16, 32)
        self.to_scale = nn.Linear(32 * 16 * 16, 32)
        self.from_code = nn.Linear(32, 32 * 16 * 16)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Sigmoid()
        )

    def forward(self, x: torch.Tensor) -> Any:
        h = self.encoder(x)
        mean, scale = self.to_mean(h), self.to_scale(h)
        z = mean + torch.exp(0.5 * scale) * torch.randn_like(mean)
        return self.decoder(self.from_code(z).view(-1, 32, 16, 16)), mean, scale


def vae() -> Built:
    def loss(net: nn.Module) -> torch.Tensor:
        x = torch.ones(4, 3, 64, 64, device=DEVICE)
        y, mean, scale = net(x)
        return F.mse_loss(y, x) - 0.5 * (1 + scale - mean.square() - scale.exp()).mean()

    return VAE(), loss


# GPT as it is written by hand
class CausalSelfAttention(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(w, 3 * w, bias=False)
        self.c_proj = nn.Linear(w, w, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(width, dim=2)
        q, k, v = (t.view(batch, length, 4, width // 4).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class GPTBlock(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(w)
        self.attn = CausalSelfAttention(w)
        self.ln_2 = nn.LayerNorm(w)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(w, 4 * w, bias=False),
                "act": nn.GELU(),
                "c_proj": nn.Linear(4 * w, w, bias=False),
            }
        )

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.attn(self.ln_1(x))
        m = self.mlp
        return x + m.c_proj(m.act(m.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, w: int = 128, n: int = 3) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(256, w),
                "wpe": nn.Embedding(64, w),
                "h": nn.ModuleList([GPTBlock(w) for _ in range(n)]),
                "ln_f": nn.LayerNorm(w),
            }
        )
        self.lm_head = nn.Linear(w, 256, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: torch.Tensor) -> Any:
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        return F.cross_entropy(self.lm_head(x).view(-1, 256), idx.view(-1))


def mingpt() -> Built:
    return GPT(), lambda net: net(torch.ones(4, 64, dtype=torch.long, device=DEVICE))


def detr() -> Built:
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_queries=10,
    )

    def loss(net: nn.Module) -> torch.Tensor:
        return net(pixel_values=torch.ones(2, 3, 64, 64, device=DEVICE)).last_hidden_state.square().mean()

    return transformers.DetrModel(config).train(), loss


UNSEEN: dict[str, Callable[[], Built]] = {
    # Seen when what they named wrong was mended.
    "opt": language(
        "OPTConfig",
        ffn_dim=256,
        word_embed_proj_dim=128,
        max_position_embeddings=128,
    ),
    "bloom": language("BloomConfig", n_layer=4, n_head=4),
    "gpt_bigcode": language("GPTBigCodeConfig", n_embd=128, n_layer=4, n_head=4, n_positions=128),
    "nemotron": language("NemotronConfig", num_key_value_heads=4),
    "gpt_neo": language("GPTNeoConfig", num_layers=4, attention_types=[[["global"], 4]], num_heads=4),
    "camembert": language("CamembertConfig", "CamembertForMaskedLM", **ENCODER),
    "vit": images(
        "ViTConfig",
        "ViTForImageClassification",
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=64,
        patch_size=8,
        num_labels=2,
    ),
    "swin": images(
        "SwinConfig",
        "SwinForImageClassification",
        embed_dim=32,
        depths=[2, 2],
        num_heads=[2, 4],
        image_size=64,
        window_size=4,
        num_labels=2,
    ),
    "hand_vgg": vgg,
    "hand_stack": stack,
    # Looked at after that.
    "t5": language(
        "T5Config",
        "T5ForConditionalGeneration",
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "deberta": language(
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=16,
        **ENCODER,
    ),
    "mamba": language("MambaConfig", state_size=8),
    "xlnet": language("XLNetConfig", "XLNetLMHeadModel", d_model=128, n_layer=3, n_head=4, d_inner=256),
    "convnext": images(
        "ConvNextConfig",
        "ConvNextForImageClassification",
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 2, 1],
        num_labels=2,
    ),
    "detr": detr,
    "gnn": gnn,
    "mbconv": mbconv,
    "timm_vit": timm_vit,
    "vae": vae,
    "mingpt": mingpt,
}
