"""Networks that read images and video: other kinds of convolution than those of the papers, and a
vision transformer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from networks.sequences import Transformer


class VisionTransformer(nn.Module):
    """Patches as tokens (Dosovitskiy et al. 2021): (batch, 3, size, size) -> (batch, classes)."""

    def __init__(
        self,
        size: int = 32,
        patch: int = 4,
        width: int = 72,
        n_heads: int = 3,
        depth: int = 2,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, 1 + (size // patch) ** 2, width))
        self.body = Transformer(width, n_heads, depth, causal=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits from the class token."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat((self.first.expand(len(x), -1, -1), tokens), 1) + self.places
        return self.head(self.body(tokens)[:, 0])  # type: ignore[no-any-return]


def _double(c_in: int, c_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(c_out),
        nn.ReLU(inplace=True),
        nn.Conv2d(c_out, c_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(c_out),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Down, up with transposed convolutions, joined across (Ronneberger et al. 2015): (batch, 1, s,
    s) -> (batch, classes, s, s).
    """

    def __init__(self, width: int = 10, classes: int = 3) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = (
            _double(1, width),
            _double(width, 2 * width),
            _double(2 * width, 4 * width),
        )
        self.up2, self.join2 = (
            nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
            _double(4 * width, 2 * width),
        )
        self.up1, self.join1 = nn.ConvTranspose2d(2 * width, width, 2, 2), _double(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of every pixel."""
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        up = self.join2(torch.cat((two, self.up2(self.bottom(F.max_pool2d(two, 2)))), 1))
        return self.head(self.join1(torch.cat((one, self.up1(up)), 1)))  # type: ignore[no-any-return]


class _Inverted(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int, expand: int = 4) -> None:
        super().__init__()
        wide = c_in * expand
        self.adds = stride == 1 and c_in == c_out
        self.body = nn.Sequential(
            nn.Conv2d(c_in, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, c_out, 1, bias=False),
            nn.BatchNorm2d(c_out),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.adds else self.body(x)  # type: ignore[no-any-return]


class MobileNet(nn.Module):
    """Inverted residuals around depthwise convolutions (Sandler et al. 2018): (batch, 3, s, s) ->
    (batch, classes).
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU6()
        )
        self.blocks = nn.Sequential(
            _Inverted(12, 16, 1), _Inverted(16, 16, 1), _Inverted(16, 24, 2), _Inverted(24, 24, 1)
        )
        self.head = nn.Linear(24, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


class _Grouped(nn.Module):
    def __init__(self, c: int, groups: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c, c // 2, 1, bias=False), nn.BatchNorm2d(c // 2)
        self.conv2, self.bn2 = (
            nn.Conv2d(c // 2, c // 2, 3, padding=1, groups=groups, bias=False),
            nn.BatchNorm2d(c // 2),
        )
        self.conv3, self.bn3 = nn.Conv2d(c // 2, c, 1, bias=False), nn.BatchNorm2d(c)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(x + self.bn3(self.conv3(y)))


class ResNext(nn.Module):
    """Bottlenecks with grouped convolutions (Xie et al. 2017): (batch, 3, s, s) -> (batch,
    classes).
    """

    def __init__(self, width: int = 64, groups: int = 8, depth: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.ReLU())
        self.blocks = nn.Sequential(*(_Grouped(width, groups) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


class _Growing(nn.Module):
    def __init__(self, c_in: int, growth: int) -> None:
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(c_in), nn.Conv2d(c_in, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.conv(F.relu(self.bn(x)))), 1)


class DenseNet(nn.Module):
    """Every layer sees all before it (Huang et al. 2017): (batch, 3, s, s) -> (batch, classes)."""

    def __init__(
        self, first: int = 20, growth: int = 10, depth: int = 5, classes: int = 10
    ) -> None:
        super().__init__()
        c = first
        parts: list[nn.Module] = [nn.Conv2d(3, first, 3, 2, 1, bias=False)]
        for _ in range(2):
            for _ in range(depth):
                parts.append(_Growing(c, growth))
                c += growth
            parts += [
                nn.BatchNorm2d(c),
                nn.ReLU(),
                nn.Conv2d(c, c // 2, 1, bias=False),
                nn.AvgPool2d(2),
            ]
            c //= 2
        self.body, self.head = nn.Sequential(*parts), nn.Linear(c, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.body(x).mean((2, 3)))  # type: ignore[no-any-return]


class _ConvNextBlock(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.spread, self.norm = nn.Conv2d(c, c, 7, padding=3, groups=c), nn.LayerNorm(c)
        self.mlp = nn.Sequential(nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, c))
        self.scale = nn.Parameter(torch.full((c,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.spread(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.mlp(y)).permute(0, 3, 1, 2)  # type: ignore[no-any-return]


class ConvNext(nn.Module):
    """Depthwise 7x7, LayerNorm and GELU (Liu et al. 2022): (batch, 3, s, s) -> (batch, classes)."""

    def __init__(self, width: int = 32, depth: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.stage1 = nn.Sequential(*(_ConvNextBlock(width) for _ in range(depth)))
        self.between = nn.Sequential(nn.GroupNorm(1, width), nn.Conv2d(width, 2 * width, 2, 2))
        self.stage2 = nn.Sequential(*(_ConvNextBlock(2 * width) for _ in range(depth)))
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.stage2(self.between(self.stage1(self.stem(x)))).mean((2, 3)))  # type: ignore[no-any-return]


class Discriminator(nn.Module):
    """The judge of a GAN, strided convolutions and LeakyReLU (Radford et al. 2016): (batch, 3, 32,
    32) -> (batch, 1).
    """

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        parts: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
        for level in (1, 2):
            parts += [
                nn.Conv2d(level * width, 2 * level * width, 4, 2, 1, bias=False),
                nn.InstanceNorm2d(2 * level * width, affine=True),
                nn.LeakyReLU(0.2),
            ]
        self.body = nn.Sequential(*parts, nn.Conv2d(4 * width, 1, 4), nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        """How true each image looks, a logit."""
        return self.body(x)  # type: ignore[no-any-return]


class VideoNet(nn.Module):
    """3d convolutions over short clips: (batch, 3, frames, s, s) -> (batch, classes)."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm3d(width),
            nn.ReLU(),
            nn.MaxPool3d(2),
            nn.Conv3d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool3d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.body(x))  # type: ignore[no-any-return]
