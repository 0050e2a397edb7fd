"""Small trainings in float64: by one process with plain torch, and by a gang with an ElasticPipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from stepfast.torch.elastic_pipeline import ElasticPipeline, Evidence, LateFreezing, split
from stepfast.torch.order import SampleOrder

WIDTH = 6
SAMPLES = 44
EPOCHS = 4
BATCH = 16  # the third and last batch of an epoch has 12

Tensors = dict[str, torch.Tensor]


class Block(nn.Module):
    """A residual one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.outer(torch.tanh(self.inner(self.norm(x))))
        return y


def blocks(count: int = 8) -> nn.Sequential:
    """Alike in size, so that a pipeline's stages are."""
    return nn.Sequential(*(Block() for _ in range(count)))


class Branching(nn.Module):
    """Traced by torch.fx: a stem, residual blocks whose skips no stage may cut, a head, a weight used twice in one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = torch.tanh(self.twice(torch.tanh(self.twice(x)))) + x
        y: torch.Tensor = self.head(x)
        return y


class Turning(nn.Module):
    """Gives what does not lie in memory as it reads; its gradients do not either."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)).t().contiguous().t()


class Masked(nn.Module):
    """Takes and gives a pair, as layers of encoders do: what is masked stays out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Any, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        x, mask = (pair, mask) if mask is not None else pair
        return x + torch.tanh(self.linear(x)) * mask, mask


class First(nn.Module):
    """Of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.linear(pair if mask is not None else pair[0])
        return y


class Pairs(Dataset[Any]):
    """Inputs of two tensors."""

    def __init__(self) -> None:
        self.inputs, self.targets = data().tensors
        self.masks = (self.inputs > 0).double()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return (self.inputs[index], self.masks[index]), self.targets[index]


def turning() -> nn.Sequential:
    """Of them."""
    return nn.Sequential(*(Turning() for _ in range(6)))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, torch.sin(inputs.sum(dim=1, keepdim=True)).expand(-1, WIDTH).contiguous())


loss = nn.functional.mse_loss


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and how."""

    model: Callable[[], nn.Module]
    steps: int = 14
    batch_size: int = BATCH
    data: Callable[[], Dataset[Any]] = data
    learning_rate: float = 0.01
    max_gradient_norm: float | None = None
    changes: Mapping[int, int] = field(default_factory=dict)  # after which step how many layers are frozen
    options: Mapping[str, Any] = field(default_factory=dict)  # the ElasticPipeline's

    def make(self, seed: int = 1) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        """The model, its optimizer with two groups, and a scheduler."""
        torch.manual_seed(seed)
        network = self.model().double()
        weights = [parameter for parameter in network.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in network.parameters() if parameter.dim() <= 1]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate)
        return network, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)

    def pipeline(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> ElasticPipeline:
        """Of them; every rank of the gang calls it."""
        return ElasticPipeline(
            list(network) if isinstance(network, nn.ModuleList) else network, optimizer, loss, data=self.data(),
            batch_size=self.batch_size, max_gradient_norm=self.max_gradient_norm, **self.options,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of it, on a rank."""

    losses: list[float]
    weights: Tensors  # by name, of the layers that are held
    moments: Tensors  # exp_avg by the parameter's name
    shapes: list[tuple[int, int, int]]  # frozen, length, replicas after each step


def train_alone(training: Training) -> Outcome:
    """With plain torch, in this process: what a gang's outcome has to be."""
    network, optimizer, scheduler = training.make()
    layers = split(list(network) if isinstance(network, nn.ModuleList) else network)
    samples = training.data()
    order_options = {name: training.options[name] for name in ("shuffle", "drop_last") if name in training.options}
    order = SampleOrder(samples=SAMPLES, batch_size=training.batch_size, **order_options)
    losses = []
    for step in range(training.steps):
        epoch, place = divmod(step, order.steps_per_epoch)
        picked = [samples[int(index)] for index in order.batch(order.epoch(epoch), place)]
        inputs, targets = torch.utils.data.default_collate(picked)
        optimizer.zero_grad()
        error = loss(_applied(network, inputs), targets)
        error.backward()  # type: ignore[no-untyped-call] # torch's
        if training.max_gradient_norm is not None:
            nn.utils.clip_grad_norm_(network.parameters(), training.max_gradient_norm)
        optimizer.step()
        scheduler.step()
        losses.append(error.item())
        if (frozen := training.changes.get(step + 1)) is not None:
            for number, layer in enumerate(layers):
                for parameter in layer.module.parameters():
                    parameter.requires_grad_(number >= frozen)
                    parameter.grad = None
    return outcome_of(network, optimizer, losses, [])


def _applied(network: nn.Module, inputs: Any) -> Any:
    if not isinstance(network, nn.ModuleList):
        return network(inputs)
    for layer in network:
        inputs = layer(inputs)
    return inputs


def train_as_rank(training: Training) -> Outcome:
    """By a gang: what this rank has of it. Rank 0's weights count: the others begin with other ones."""
    network, optimizer, scheduler = training.make(seed=1 + dist.get_rank())
    pipeline = training.pipeline(network, optimizer)
    losses, shapes = train_to(pipeline, scheduler, training, training.steps)
    return outcome_of(network, optimizer, losses, shapes)


def train_to(
    pipeline: ElasticPipeline, scheduler: Any, training: Training, last: int
) -> tuple[list[float], list[tuple[int, int, int]]]:
    """From where the pipeline stands, until so many steps are done: their losses, and the shapes after them."""
    losses, shapes = [], []
    for _ in pipeline.epochs(last):
        for step in pipeline.steps():
            scheduler.step()
            losses.append(pipeline.mean_loss())
            if (frozen := training.changes.get(step.number)) is not None:
                pipeline.take(pipeline.shape_for(frozen))
            shapes.append((pipeline.shape.frozen, pipeline.shape.length, pipeline.shape.replicas))
            if step.number == last:
                return losses, shapes
    raise AssertionError("an epoch has steps")


def outcome_of(
    network: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float], shapes: list[tuple[int, int, int]]
) -> Outcome:
    """What this process has now."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    return Outcome(
        losses=losses,
        weights={name: tensor.detach() for name, tensor in network.state_dict().items() if tensor.numel()},
        moments={names[id(parameter)]: state["exp_avg"] for parameter, state in optimizer.state.items()},
        shapes=shapes,
    )


def distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The largest difference between tensors of one name; all names of the one are in the other."""
    return max((float((tensor - other[name]).abs().max()) for name, tensor in one.items()), default=0.0)


# ---- one with random samples, dropout, running statistics, and a shape for each epoch


class Augmented(Dataset[Any]):
    """Samples that look another way each time they are fetched."""

    def __init__(self) -> None:
        self.inputs, self.targets = data().tensors

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index] + 0.1 * torch.randn(WIDTH, dtype=torch.float64), self.targets[index]


class Steadily:
    """A layer more after every epoch, and all again after the third; remembers that it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def first_frozen(self, layers: int) -> int:
        return 0

    def frozen_layers(self, evidence: Evidence) -> int:
        self.asked += 1
        assert all(layer.gradient_norm > 0 for layer in evidence.active)
        return (3, 6, 1, 1)[self.asked - 1]

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: Any) -> None:
        self.asked = state["asked"]


def random_blocks() -> nn.Sequential:
    """With dropout."""
    return nn.Sequential(*(nn.Sequential(Block(), nn.Dropout(0.2)) for _ in range(7)), nn.BatchNorm1d(WIDTH))


RANDOM = Training(
    model=random_blocks, data=Augmented, options={"length": 4, "device_bytes": (3 * 174 * 8), "micro_batches": 1}
)


Made = tuple[ElasticPipeline, Any, nn.Module, torch.optim.Optimizer]


def made(training: Training, **options: Any) -> Made:
    """Its pipeline, with these options too, its scheduler, model and optimizer; every rank of the gang calls it."""
    network, optimizer, scheduler = training.make()
    pipeline = replace(training, options={**training.options, **options}).pipeline(network, optimizer)
    return pipeline, scheduler, network, optimizer


def make_random(samples: Callable[[], Dataset[Any]] = Augmented, **options: Any) -> Made:
    """As every rank of the gang makes it."""
    return made(replace(RANDOM, data=samples), rule=Steadily(), **options)


# ---- one that begins with frozen layers, which thaw; its epochs' last batch has fewer samples than there are replicas


LATE = Training(model=blocks, batch_size=21, options={"length": 4, "device_bytes": 3 * 174 * 8, "micro_batches": 1})


def make_late(**options: Any) -> Made:
    """As `make_random`."""
    return made(LATE, rule=LateFreezing(EPOCHS, begin=0.0), **options)


# ---- one whose weights do not lie in memory as they are written


def convolving() -> nn.Sequential:
    """Of samples as images of 3x1x2."""
    stem = nn.Sequential(nn.Unflatten(1, (3, 1, 2)), nn.Conv2d(3, 4, 3, padding=1), nn.Flatten())
    return nn.Sequential(stem, nn.Linear(8, WIDTH)).to(memory_format=torch.channels_last)


def make_convolving() -> Made:
    """As `make_random`."""
    return made(Training(model=convolving, options={"length": 1, "micro_batches": 1}))


def go_on(pipeline: ElasticPipeline, scheduler: Any, epochs: int = EPOCHS) -> Iterator[int]:
    """Trains until so many epochs are over; yields after each step, ahead of what happens at its epoch's end."""
    for _ in pipeline.epochs(epochs):
        for step in pipeline.steps():
            scheduler.step()
            yield step.number
        pipeline.adapt(worsening(pipeline))


def worsening(pipeline: ElasticPipeline) -> float:
    """A validation metric that falls epoch by epoch."""
    return -float(pipeline.epoch)


def tensors_of(network: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """What this rank has: weights, buffers, and moments."""
    found = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    for parameter, state in optimizer.state.items():
        found[f"{names[id(parameter)]} exp_avg"] = state["exp_avg"].clone()
    return found
