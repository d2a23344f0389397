"""Networks for images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.certificate.programs.catalog import program, train
from tests.certificate.run import Run


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(16, 10),
    )


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])

    def forward(self, x):
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.middle = ResidualBlock(8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.out = nn.Conv2d(9, 1, 1)

    def forward(self, x):
        return self.out(torch.cat([self.up(self.middle(F.silu(self.down(x)))), x], 1))


@program("vision")
def convolutional_network(run: Run) -> None:
    model = convolutional()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(run, model, optimizer, lambda: F.cross_entropy(model(torch.randn(4, 3, 16, 16)), torch.arange(4)))


@program("vision")
def residual_network(run: Run) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), ResidualBlock(8), ResidualBlock(8), nn.Flatten(), nn.Linear(8 * 36, 5)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    train(run, model, optimizer, lambda: F.cross_entropy(model(torch.randn(3, 3, 8, 8)), torch.arange(3)))


@program("vision")
def u_net(run: Run) -> None:
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters())
    train(run, model, optimizer, lambda: (model(torch.randn(2, 1, 16, 16)) ** 2).mean())


@program("vision")
def vision_transformer(run: Run) -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Conv2d(3, 32, 4, 4)
            self.position = nn.Parameter(torch.zeros(1, 17, 32))
            self.token = nn.Parameter(torch.zeros(1, 1, 32))
            layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(32, 10)

        def forward(self, x):
            patches = self.embed(x).flatten(2).transpose(1, 2)
            patches = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.position
            return self.head(self.encoder(patches)[:, 0])

    model = Patches()
    optimizer = torch.optim.AdamW(model.parameters())
    train(run, model, optimizer, lambda: F.cross_entropy(model(torch.randn(4, 3, 16, 16)), torch.arange(4)))


@program("vision")
def channels_last_in_bfloat16(run: Run) -> None:
    model = convolutional()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def loss():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last)
            return F.cross_entropy(model(x), torch.arange(4))

    train(run, model, optimizer, loss)


@program("vision")
def evaluation_with_batch_norm(run: Run) -> None:
    model = nn.Sequential(convolutional()[:-2], nn.BatchNorm1d(16), nn.Linear(16, 10)).eval()
    with run.window(model) as step, torch.no_grad():
        for _ in range(3):
            run.value(model(torch.randn(4, 3, 16, 16)).argmax(1))
            step()


@program("vision")
def evaluation_within_training(run: Run) -> None:
    model = convolutional()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss():
        model.eval()
        with torch.inference_mode():
            run.value(model(torch.randn(8, 3, 16, 16)).mean())
        model.train()
        return F.cross_entropy(model(torch.randn(4, 3, 16, 16)), torch.arange(4))

    train(run, model, optimizer, loss)


@program("vision")
def adversarial_training(run: Run) -> None:
    """A generator and a discriminator, each with its optimizer."""
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    creates = torch.optim.Adam(generator.parameters(), betas=(0.5, 0.9))
    judges = torch.optim.Adam(discriminator.parameters(), betas=(0.5, 0.9))
    with run.window({"generator": generator, "discriminator": discriminator}, creates, judges) as step:
        for _ in range(2):
            fake = generator(torch.randn(4, 8))
            judges.zero_grad()
            real_loss = F.binary_cross_entropy_with_logits(
                discriminator(torch.randn(4, 16)), torch.ones(4, 1)
            )
            fake_loss = F.binary_cross_entropy_with_logits(discriminator(fake.detach()), torch.zeros(4, 1))
            (real_loss + fake_loss).backward()
            judges.step()
            creates.zero_grad()
            loss = F.binary_cross_entropy_with_logits(discriminator(fake), torch.ones(4, 1))
            loss.backward()
            creates.step()
            run.value([real_loss, fake_loss, loss])
            step()


@program("vision")
def diffusion(run: Run) -> None:
    """Denoising steps in training, then a sampling loop."""
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters())
    noise_levels = torch.linspace(0.1, 0.9, 10)
    with run.window(model, optimizer) as step:
        for _ in range(2):
            clean, noise = torch.rand(2, 1, 8, 8), torch.randn(2, 1, 8, 8)
            level = noise_levels[torch.randint(0, 10, (2,))].view(2, 1, 1, 1)
            loss = F.mse_loss(model(clean * (1 - level) + noise * level), noise)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            run.value(loss)
            step()
        with torch.no_grad():
            image = torch.randn(1, 1, 8, 8)
            for level in noise_levels.flip(0):
                image = image - 0.1 * level * model(image)
            run.value(image)
        step()
