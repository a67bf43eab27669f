"""Networks that read sequences: a small GPT, recurrent language models, dilated and strided
convolutions over time.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class _Block(nn.Module):
    """Pre-norm attention and MLP, each around a residual path (Radford et al. 2019)."""

    def __init__(self, width: int, n_heads: int, causal: bool) -> None:
        super().__init__()
        self.n_heads, self.causal = n_heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (
            self.qkv(self.norm1(x))
            .view(batch, length, 3, self.n_heads, width // self.n_heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=self.causal)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """(batch, length, width) -> the same, through `depth` blocks."""

    def __init__(self, width: int, n_heads: int, depth: int, causal: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(_Block(width, n_heads, causal) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the blocks and a last normalisation."""
        return self.norm(self.blocks(x))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """A causal transformer over tokens: (batch, length) -> (batch, length, vocabulary)."""

    def __init__(
        self,
        vocabulary: int = 800,
        length: int = 40,
        width: int = 80,
        n_heads: int = 5,
        depth: int = 2,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.body = Transformer(width, n_heads, depth, causal=True)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every next token."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.body(x))  # type: ignore[no-any-return]


class RecurrentLanguageModel(nn.Module):
    """Embedding, a recurrent network, a projection to the vocabulary: (batch, length) -> (batch,
    length, vocabulary).
    """

    def __init__(
        self, recurrent: str, vocabulary: int, width: int, hidden: int, depth: int
    ) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(vocabulary, width), nn.Dropout(0.1)
        self.recurrent = {"gru": nn.GRU, "lstm": nn.LSTM}[recurrent](
            width, hidden, depth, batch_first=True
        )
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every next token."""
        return self.head(self.drop(self.recurrent(self.drop(self.embed(tokens)))[0]))  # type: ignore[no-any-return]


class _Dilated(nn.Module):
    def __init__(self, c_in: int, c_out: int, dilation: int) -> None:
        super().__init__()
        self.cut = 2 * dilation
        self.conv1 = nn.Conv1d(c_in, c_out, 3, padding=self.cut, dilation=dilation)
        self.conv2 = nn.Conv1d(c_out, c_out, 3, padding=self.cut, dilation=dilation)
        self.skip = nn.Conv1d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv1(x)[..., : -self.cut])
        y = F.relu(self.conv2(y)[..., : -self.cut])
        return F.relu(y + self.skip(x))


class Tcn(nn.Module):
    """Causal dilated convolutions (Bai, Kolter, Koltun 2018): (batch, features, length) -> (batch,
    classes).
    """

    def __init__(
        self, features: int = 12, width: int = 40, depth: int = 4, classes: int = 10
    ) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(_Dilated(features if not level else width, width, 2**level) for level in range(depth))
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits from the last moment."""
        return self.head(self.blocks(x)[..., -1])  # type: ignore[no-any-return]


class AudioNet(nn.Module):
    """Strided 1d convolutions over a waveform (as M5, Dai et al. 2017): (batch, 1, samples) ->
    (batch, classes).
    """

    def __init__(self, width: int = 24, classes: int = 35) -> None:
        super().__init__()

        def part(c_in: int, c_out: int, kernel: int, stride: int) -> list[nn.Module]:
            return [
                nn.Conv1d(c_in, c_out, kernel, stride, bias=False),
                nn.BatchNorm1d(c_out),
                nn.ReLU(),
                nn.MaxPool1d(4),
            ]

        self.body = nn.Sequential(
            *part(1, width, 80, 4),
            *part(width, width, 3, 1),
            *part(width, 2 * width, 3, 1),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a whole clip."""
        return self.head(self.body(x))  # type: ignore[no-any-return]
