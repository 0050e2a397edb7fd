"""What is learned: handwritten digits by a small ViT, and by a small BERT which statement a line of Python is.

Both models are twelve blocks between an embedding and a head, as an `nn.Sequential`: each of its members is a layer
that the elastic pipeline may freeze, and between two of them a single tensor passes.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

BLOCKS = 12
IMAGE_PIXELS = 8
PATCH_PIXELS = 2
LINE_BYTES = 32
LINES_A_STATEMENT = 200


@dataclass(frozen=True)
class Task:
    """A model, and samples of (input, class) to train on and to be held out."""

    model: nn.Sequential
    train: TensorDataset
    held_out: TensorDataset


class Block(nn.Module):
    """Pre-norm transformer block: self-attention over all positions, then a feed-forward network."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        attended, _ = self.attention(normed, normed, normed, need_weights=False)
        x = x + self.dropout(attended)
        fed: Tensor = self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return x + fed


class Patches(nn.Module):
    """Images (batch, 8, 8) as (batch, 16, width): a vector for each patch of 2x2 pixels, with its position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(1, width, kernel_size=PATCH_PIXELS, stride=PATCH_PIXELS)
        self.positions = nn.Parameter(0.1 * torch.randn((IMAGE_PIXELS // PATCH_PIXELS) ** 2, width))

    def forward(self, images: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(images.unsqueeze(1))
        return embedded.flatten(2).transpose(1, 2) + self.positions


class Bytes(nn.Module):
    """Texts (batch, length) of bytes as (batch, length, width): a vector for each byte, with its position."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Parameter(0.1 * torch.randn(length, width))

    def forward(self, text: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(text)
        return embedded + self.positions


class Head(nn.Module):
    """The mean over all positions, classified: (batch, classes)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.classes = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classes(self.norm(x).mean(dim=1))
        return logits


def make_task(name: str, classes: list[int] | None = None, *, width: int = 64, dropout: float = 0.0) -> Task:
    """`digits` or `text`, with these of its classes (None: all), numbered anew from 0."""
    inputs, labels = {"digits": read_digits, "text": read_statements}[name]()
    known = sorted(set(labels.tolist())) if classes is None else classes
    wanted = torch.isin(labels, torch.tensor(known))
    inputs, labels = inputs[wanted], torch.searchsorted(torch.tensor(known), labels[wanted])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # one split for all seeds
    held_out, train = order[: len(order) // 5], order[len(order) // 5 :]
    embedding = Patches(width) if name == "digits" else Bytes(LINE_BYTES, width)
    model = nn.Sequential(embedding, *(Block(width, 4, dropout) for _ in range(BLOCKS)), Head(width, len(known)))
    return Task(model, TensorDataset(inputs[train], labels[train]), TensorDataset(inputs[held_out], labels[held_out]))


def read_digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's images, float32 (1797, 8, 8) about zero, and their classes, int64."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.from_numpy(digits.images).float() / 8 - 1, torch.from_numpy(digits.target).long()


# Statements of Python that begin with a word of their own.
STATEMENTS = ("assert", "class", "def", "del", "elif", "except", "for", "from", "if", "import", "raise", "return",
              "while", "with", "yield")  # fmt: skip


def read_statements() -> tuple[Tensor, Tensor]:
    """Lines of Python's own library without their first word, as bytes, int64 (n, 32), and which word that was."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, set[bytes]] = {word: set() for word in STATEMENTS}
    for path in sorted(library.glob("*.py")):
        for line in path.read_bytes().splitlines():
            word, _, rest = line.strip().partition(b" ")
            if rest and word.decode(errors="ignore") in found:
                found[word.decode()].add(rest[:LINE_BYTES])
    texts, labels = [], []
    for number, word in enumerate(STATEMENTS):
        lines = sorted(found[word])
        order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(number))
        for index in order[:LINES_A_STATEMENT].tolist():
            texts.append(list(lines[index].ljust(LINE_BYTES, b"\0")))
            labels.append(number)
    return torch.tensor(texts), torch.tensor(labels)
