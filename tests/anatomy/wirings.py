"""Models whose wiring is hard to follow: tensors with several uses, recurrent layers, copied ones, shared weights."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from families import Family

WIDTH = 64


class WithLoss(nn.Module):
    """A layer that is trained towards zero."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, given: Tensor) -> Any:
        found = self.layer(given)
        return SimpleNamespace(loss=(found[0] if isinstance(found, tuple) else found).square().mean())


class Branches(nn.Module):
    """Each tensor goes three ways, so that three gradients meet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Tensor) -> Tensor:
        for _ in range(3):
            given = given + self.first(given).relu() + self.second(given).tanh()
        return given


class Dense(nn.Module):
    """Each layer sees all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH * (at + 1), WIDTH) for at in range(4))

    def forward(self, given: Tensor) -> Tensor:
        seen = [given]
        for layer in self.layers:
            seen.append(layer(torch.cat(seen, -1)).relu())
        return torch.cat(seen, -1)


class Unrolled(nn.Module):
    """One layer, once for each word: its weights have as many uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Tensor) -> Tensor:
        state, states = torch.zeros(given.shape[0], WIDTH), []
        for word in given.unbind(1):
            state = torch.tanh(self.layer(state) + word)
            states.append(state)
        return torch.stack(states, 1)


class Tied(nn.Module):
    """The last layer's weights are the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(300, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Tensor) -> Tensor:
        hidden: Tensor = self.layer(self.words(given.argmax(-1)))
        return hidden @ self.words.weight.T


class Gated(nn.Module):
    """Views of one tensor meet again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, given: Tensor) -> Tensor:
        value, gate = self.layer(given).chunk(2, -1)
        return value * gate.sigmoid() + value.clone() + given


class Keeping(torch.autograd.Function):
    """Somebody else holds the gradient that it hands on: nothing may be added to it in place."""

    held: Tensor | None = None

    @staticmethod
    def forward(_ctx: Any, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        Keeping.held = gradients[0] * 2
        return Keeping.held


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Tensor) -> Tensor:
        hidden = self.layer(given)
        other = hidden.cos()
        kept: Tensor = Keeping.apply(hidden)
        return kept + other


class Attending(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, 4, dropout=dropout, batch_first=True)

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = self.layer(given, given, given)[0]
        return found


class Translating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Transformer(WIDTH, 4, 2, 2, 128, batch_first=True)

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = self.layer(given, given)
        return found


class Recomputed(nn.Module):
    """Gradients meet in what is computed again, within a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.layer = nn.Linear(WIDTH, WIDTH), Branches()

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.layer, self.before(given), use_reentrant=True, preserve_rng_state=False)
        return found


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True), 2)


def _wired(make: Callable[[], nn.Module]) -> Family:
    return Family(lambda: WithLoss(make()), lambda count: {"given": torch.randn(count, 16, WIDTH)})


WIRINGS = {
    "branches": _wired(Branches),
    "dense": _wired(Dense),
    "unrolled": _wired(Unrolled),
    "tied": _wired(Tied),
    "gated": _wired(Gated),
    "held gradient": _wired(Held),
    "recomputed": _wired(Recomputed),
    "attention": _wired(lambda: Attending(0.0)),
    "attention with dropout": _wired(lambda: Attending(0.1)),
    "copied layers": _wired(_encoder),
    "nn.Transformer": _wired(Translating),
    "RNN": _wired(lambda: nn.RNN(WIDTH, 48, 2, batch_first=True)),
    "GRU": _wired(lambda: nn.GRU(WIDTH, 48, 2, batch_first=True)),
    "LSTM": _wired(lambda: nn.LSTM(WIDTH, 48, 2, batch_first=True)),
    "LSTM, both ways": _wired(lambda: nn.LSTM(WIDTH, 48, 2, batch_first=True, bidirectional=True, dropout=0.1)),
}
