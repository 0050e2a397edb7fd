"""ElasticPipeline: what training code holds. A pipeline that becomes shorter and wider as its model's layers freeze.

Global batches stay what they are, whatever the shape: each step trains on the same samples with gradients of the same
mean, so a change of shape changes the speed and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from stepfast.environment import read_environment
from stepfast.torch.elastic_pipeline.autocache import AutoCache
from stepfast.torch.elastic_pipeline.cache import Memory
from stepfast.torch.elastic_pipeline.evidence import gather
from stepfast.torch.elastic_pipeline.formation import Formation
from stepfast.torch.elastic_pipeline.freezing import FreezingRule
from stepfast.torch.elastic_pipeline.groups import Messages
from stepfast.torch.elastic_pipeline.layers import split
from stepfast.torch.elastic_pipeline.microbatches import MicroBatches, Schedule
from stepfast.torch.elastic_pipeline.planning import ShapePlan
from stepfast.torch.elastic_pipeline.replica import Loss
from stepfast.torch.elastic_pipeline.residence import Residence
from stepfast.torch.elastic_pipeline.samples import Collate, Samples, Share
from stepfast.torch.elastic_pipeline.shape import Shape
from stepfast.torch.elastic_pipeline.transfer import (
    LayerState,
    collect_weights,
    gather_layers,
    reshape,
    spread,
)
from stepfast.torch.elastic_pipeline.values import mapped
from stepfast.torch.objects import OpenMemory
from stepfast.torch.order import SampleOrder
from stepfast.torch.sharedmemory import open_shared

Metric = Callable[[Any, Any], torch.Tensor]  # (output, target) → the mean over the samples

_CACHE_NAME = "activations"
_VERSION = 2  # of the state


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """A step that is done."""

    number: int  # since the beginning of training, from 1
    epoch: int  # from 0


class ElasticPipeline:
    """Trains a model on all ranks of the gang; every rank makes one and calls it alike.

    The model's layers are divided among the devices of a pipeline; when `rule` freezes layers, they leave the
    pipeline, it is packed into fewer devices, and replicas of it fill those that are left.

    Args:
        model: one that torch.fx can trace, an `nn.Sequential`, or a list of layers (`layers.split`). Equal weights
            need not be given: rank 0's count.
        optimizer: of the model's parameters, without a state yet. It stays the same object; so do its groups, for
            schedulers.
        loss: (output, target) → the mean over the samples.
        data: samples, each a pair (input, target), by their number.
        batch_size: samples of a step, over all ranks.
        length: devices of the pipeline when nothing is frozen; None: all ranks. It must divide their number; the
            rest holds replicas. 1: data parallelism alone.
        schedule: "gpipe", "1f1b" or "interleaved", with `stages_per_device` then.
        rule: when layers are frozen. None: never.
        packs: whether the pipeline becomes shorter (AutoPipe); where fewer layers train than it has devices it does
            anyway. replicates: whether replicas are added (AutoDP).
        device_bytes: parameters (frozen ones at a sixth) that a device may hold when the pipeline is packed; None: as
            many as the fullest held when nothing was frozen.
        micro_batches: into which a replica's batch is divided, for each device of the pipeline (as near as they can
            be alike); None: from one to six, the fastest for each length, found by trying them once.
        max_gradient_norm: gradients are scaled to it where their 2-norm is larger.
        cache: whether what frozen layers give is kept, and shared by the processes of a node (AutoCache); None: where
            that is faster than to compute it.
        seed, shuffle, drop_last: of the order of samples. collate, workers: as DataLoader's collate_fn, num_workers.
        device: None: the process' CUDA device where there is one, else the host.

    Raises:
        CannotSplit, ValueError, RuntimeError (torch.distributed is not initialised).
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        *,
        data: Dataset[Any],
        batch_size: int,
        length: int | None = None,
        schedule: Schedule | str = Schedule.ONE_F_ONE_B,
        stages_per_device: int = 2,
        rule: FreezingRule | None = None,
        packs: bool = True,
        replicates: bool = True,
        device_bytes: int | None = None,
        micro_batches: int | None = None,
        max_gradient_norm: float | None = None,
        cache: bool | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        collate: Collate | None = None,
        workers: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._messages = Messages()
        self._optimizer, self._loss = optimizer, loss
        self._schedule = Schedule(schedule)
        self._rule = rule
        self._max_gradient_norm = max_gradient_norm
        self._residence = Residence(split(model), optimizer, _device(device))
        self._sizes = [layer.parameter_bytes for layer in self._residence.layers]
        self._samples = Samples(
            data, seed=seed, collate=collate, workers=workers, pin=self._residence.device.type == "cuda"
        )
        self._order = SampleOrder(
            samples=self._samples.size, batch_size=batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last
        )
        self._plan = ShapePlan(
            self._sizes, world_size=self._world_size, length=length if length is not None else self._world_size,
            packs=packs, replicates=replicates, device_bytes=device_bytes,
            stages_per_device=stages_per_device if self._schedule is Schedule.INTERLEAVED else 1,
        )  # fmt: skip
        self._shape = self.shape_for(rule.first_frozen(len(self._sizes)) if rule is not None else 0)
        self._micro_batches = MicroBatches(batch_size, self._schedule, micro_batches)
        self._open_memory: OpenMemory = partial(
            open_shared, environment=read_environment(), link=None, gang=self._messages
        )
        self._cache = AutoCache(
            self._residence.layers, self._samples, self._messages, policy=cache, memory=self._node_memory,
            device=self._residence.device,
        )  # fmt: skip
        self._taken = 0  # shapes so far
        self._frozen_since: list[int] = []  # of each frozen layer the first shape of those that have it so
        # An agent lends what slots leave, and learns how large these are with a first step, or with a restore.
        self._is_warm = False
        self._done = 0  # steps, since the beginning
        self._epoch = self._place = 0  # epochs that are over; steps that are done of this one
        self._asked_after: int | None = None  # that step
        self._loss_sum, self._loss_steps = torch.zeros((), dtype=torch.float64, device=self._residence.device), 0
        spread(self._residence, self._shape, rank=self._rank)
        self._take_shape()

    # ------------------------------------------------------------ where training is

    @property
    def shape(self) -> Shape:
        """What is frozen, the stages, the replicas."""
        return self._shape

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self._done

    @property
    def epoch(self) -> int:
        """Epochs that are over."""
        return self._epoch

    @property
    def steps_per_epoch(self) -> int:
        """How many there are."""
        return self._order.steps_per_epoch

    @property
    def micro_batches(self) -> int | None:
        """Into how many a replica's batch is divided; None: that will be tried at the next step."""
        return self._micro_batches.known(self._shape)

    # ------------------------------------------------------------ the loop

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs until there are so many, from where training stands.

        An epoch is over when the loop comes back for the next one: a restore to its last step yields it once more,
        without steps, so that what is done at its end (`adapt`) is done.
        """
        while self._epoch < count:
            yield self._epoch
            self._epoch, self._place = self._epoch + 1, 0

    def steps(self) -> Iterator[TrainedStep]:
        """Trains what is left of the epoch, a step at a time: yields each when it is done.

        The shape may change in between (`adapt`).
        """
        while self._place < self._order.steps_per_epoch:
            shape, done = self._shape, self._done
            for share in self._loaded():
                self._train(share)
                self._done = done = done + 1
                self._place += 1
                yield TrainedStep(number=done, epoch=self._epoch)
                if self._shape is not shape or self._done != done:
                    break  # the rest is loaded anew, in other shares

    def adapt(self, metric: float | None = None) -> bool:
        """Asks the rule, and takes the shape that follows from its answer; whether that is another one.

        To be called at the end of an epoch. metric: of validation; higher is better. A rule is asked once after a step:
        where what was saved after the question is restored, it has been asked.
        """
        if self._rule is None or self._asked_after == self._done:
            return False
        evidence = gather(
            self._residence, self._shape, self._formation.gradients, self._optimizer, self._messages,
            rank=self._rank, epoch=self._epoch, metric=metric,
        )  # fmt: skip
        self._asked_after = self._done
        frozen = self._messages.from_first(self._rule.frozen_layers(evidence))
        if not 0 <= frozen < self._shape.layers:
            raise ValueError(f"the rule froze {frozen} of {self._shape.layers} layers: the last one must train")
        shape = self.shape_for(frozen)
        if shape == self._shape:
            return False
        self.take(shape)
        return True

    def take(self, shape: Shape) -> None:
        """Takes that shape; weights, optimizer state and the frozen boundary move, and nothing is lost."""
        self._formation.close()
        before, self._shape = self._shape, shape
        reshape(self._residence, before, shape, rank=self._rank, messages=self._messages)
        self._take_shape()

    def mean_loss(self) -> float:
        """Of the steps since it was last asked, nan without one; every rank calls it alike."""
        total, steps = float(self._loss_sum), self._loss_steps
        self._loss_sum.zero_()
        self._loss_steps = 0
        summed = self._messages.sum([total])[0]
        return summed / steps if steps else float("nan")

    def evaluate(self, data: Dataset[Any], metric: Metric, *, batch_size: int | None = None) -> float:
        """The metric's mean over all samples; every rank calls it alike, and gets it."""
        samples = self._samples.like(data)
        order = SampleOrder(samples=samples.size, batch_size=batch_size or self._order.batch_size, shuffle=False)
        everything = order.epoch(0)
        batches = [order.batch(everything, step).tolist() for step in range(order.steps_per_epoch)]
        modes = [layer.module.training for layer in self._residence.layers]
        for layer in self._residence.layers:
            layer.module.eval()
        total = 0.0
        try:
            for share in self._shares(samples, 0, batches):
                count = len(share.numbers)
                if self._formation.replica is None or not count:
                    continue
                output = self._formation.replica.output(self._placed(share.inputs), count)
                if output is not None:
                    total += float(metric(output, self._placed(share.targets))) * count
        finally:
            for layer, mode in zip(self._residence.layers, modes, strict=True):
                layer.module.train(mode)
        return self._messages.sum([total])[0] / samples.size

    def model_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's weights and buffers by name, in host memory, on rank 0; every rank calls it alike.

        Elsewhere it is empty: no other rank needs the room.
        """
        return collect_weights(self._residence, self._shape, rank=self._rank)

    # ------------------------------------------------------------ checkpoints

    def use_node_memory(self, open_memory: OpenMemory) -> None:
        """Where memory that the processes of a node share comes from: a Checkpointer says so, with its agent's."""
        self._open_memory = open_memory

    def state_dict(self) -> dict[str, Any]:
        """This rank's share of all there is to go on from, in its own memory: each layer is in one rank's."""
        owners = self._shape.owners(self._sizes)
        noted, squares = self._formation.gradients.noted()
        return {
            "version": _VERSION,
            "step": self._done,
            "epoch": self._epoch,
            "place": self._place,
            "order": asdict(self._order),
            "shape": self._shape.to_document(),
            "microBatches": dict(self._micro_batches.found),
            "cacheCovers": dict(self._cache.covers),
            "rule": None if self._rule is None else {"kind": _kind(self._rule), "state": self._rule.state_dict()},
            "askedAfter": self._asked_after,
            "loss": {"sum": self._loss_sum, "steps": self._loss_steps},
            "groups": [_without_parameters(group) for group in self._optimizer.param_groups],
            "notedSteps": noted,
            "layers": {
                layer: {
                    "tensors": self._residence.tensors(layer),
                    "optimizer": self._residence.state(layer),
                    "square": squares.get(layer),
                }
                for layer, owner in enumerate(owners)
                if owner == self._rank
            },
        }

    def settled(self) -> Iterator[tuple[torch.Tensor, int]]:
        """What is frozen of this rank's state, and since which shape: it is saved once, and referred to after that."""
        owners = self._shape.owners(self._sizes)
        for layer, since in enumerate(self._frozen_since):
            if owners[layer] == self._rank:
                for tensor in (*self._residence.tensors(layer).values(), *self._residence.state_tensors(layer)):
                    yield tensor, since

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there, at the shape that it was saved at; every rank calls it, with the state that it saved.

        Raises ValueError where it is not this training's: other layers, other data, another order.
        """
        self._load([state])

    def load_rank_states(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Goes on from what another number of ranks has saved, with as many layers frozen; every rank calls it, each
        with some of their states, by rank.

        Raises ValueError as `load_state_dict`.
        """
        self._load(list(states.values()))

    def _load(self, states: Sequence[Mapping[str, Any]]) -> None:
        if problem := next(filter(None, self._messages.all(next(filter(None, map(self._misfit, states)), ""))), ""):
            raise ValueError(problem)
        common = self._messages.from_first(
            {key: value for key, value in states[0].items() if key != "layers"} if states else None
        )
        saved = Shape.from_document(common["shape"])
        items = {layer: item for state in states for layer, item in state["layers"].items()}
        given = {layer: LayerState(tensors=item["tensors"], states=item["optimizer"]) for layer, item in items.items()}
        self._formation.close()
        self._frozen_since = []  # other bytes
        self._shape = saved if saved.world_size == self._world_size else self.shape_for(saved.frozen)
        gather_layers(self._residence, given, self._shape, rank=self._rank, messages=self._messages)
        self._done, self._epoch, self._place = common["step"], common["epoch"], common["place"]
        self._asked_after = common["askedAfter"]
        self._loss_sum.fill_(sum((float(state["loss"]["sum"]) for state in states), 0.0))
        self._loss_steps = common["loss"]["steps"]
        self._is_warm = True
        self._micro_batches.found = dict(common["microBatches"])
        self._cache.restore(dict(common["cacheCovers"]))
        for group, values in zip(self._optimizer.param_groups, common["groups"], strict=True):
            group.update(values)
        if self._rule is not None and common["rule"] is not None:
            self._rule.load_state_dict(common["rule"]["state"])
        self._take_shape()
        squares = {layer: item["square"] for layer, item in items.items() if item["square"] is not None}
        self._formation.gradients.take_up(common["notedSteps"], self._all_squares(squares))

    def _misfit(self, state: Mapping[str, Any]) -> str:
        """Why it is not this training's state; nothing if it is."""
        if state.get("version") != _VERSION:
            return f"an elastic pipeline's state of version {state.get('version')}, not {_VERSION}"
        if state["order"] != asdict(self._order):
            return f"the samples' order was {state['order']}, and is {asdict(self._order)} now"
        if (groups := len(state["groups"])) != len(self._optimizer.param_groups):
            return f"the optimizer had {groups} groups, and has {len(self._optimizer.param_groups)} now"
        if (layers := state["shape"]["stages"][-1][1]) != len(self._sizes):
            return f"it was saved with {layers} layers, and there are {len(self._sizes)}"
        rule = state["rule"]
        if rule is not None and self._rule is not None and rule["kind"] != _kind(self._rule):
            return f"it was saved with the rule {rule['kind']}, which is {_kind(self._rule)} now"
        return ""

    def _all_squares(self, own: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """What owners say of each layer, for the layers that this rank trains."""
        found = self._messages.sum([float(own.get(layer, 0.0)) for layer in range(len(self._sizes))])
        device = self._residence.device
        return {
            layer: torch.tensor(found[layer], dtype=torch.float64, device=device)
            for layer in sorted(self._shape.active_of(self._rank))
        }

    # ------------------------------------------------------------ a step

    def _loaded(self) -> Iterator[Share]:
        order = self._order.epoch(self._epoch)
        left = range(self._place, self._order.steps_per_epoch)
        return self._shares(self._samples, self._epoch, [self._order.batch(order, step).tolist() for step in left])

    def _shares(self, samples: Samples, epoch: int, batches: Sequence[Sequence[int]]) -> Iterator[Share]:
        place = self._shape.place(self._rank)
        return samples.shares(
            epoch, batches, replica=None if place is None else place.replica, replicas=self._shape.replicas,
            inputs=self._formation.is_first, targets=self._formation.is_last,
        )  # fmt: skip

    def _placed(self, value: Any) -> Any:
        return mapped(value, lambda tensor: tensor.to(self._residence.device, non_blocking=True))

    def _train(self, share: Share) -> None:
        formation = self._formation
        samples, inputs, targets = len(share.numbers), share.inputs, self._placed(share.targets)
        is_cached = self._is_warm and self._cache.is_used(share.numbers, inputs, is_first=formation.is_first)
        if is_cached and inputs is not None:
            inputs = self._cache.activations(share.numbers, inputs)
        inputs = self._placed(inputs)
        batch = min(self._order.batch_size, self._samples.size - self._place * self._order.batch_size)

        def passes(count: int, weight: float) -> torch.Tensor | None:
            if formation.replica is None:
                return None
            return formation.replica.forward_backward(
                inputs, targets, samples, count, weight=weight, is_cached=is_cached
            )

        def attempt(count: int) -> None:
            formation.attempt(partial(passes, count, 1.0), count)

        count = self._micro_batches.choose(
            self._shape, samples, attempt, self._messages, trains=formation.replica is not None
        )
        if formation.replica is not None:
            formation.gradients.begin(count)
            if samples:
                loss = passes(count, samples / batch)
                if loss is not None:
                    self._loss_sum += loss
            formation.gradients.finish()
        if self._max_gradient_norm is not None:
            formation.clip_gradients(self._max_gradient_norm)
        if self._rule is not None:
            formation.gradients.note_norms()
        self._optimizer.step()
        formation.share_buffers()
        self._loss_steps += 1
        self._is_warm = True

    # ------------------------------------------------------------ shapes

    def shape_for(self, frozen: int) -> Shape:
        """The shape that is taken when that many layers are frozen."""
        return self._plan.shape_for(frozen)

    def _take_shape(self) -> None:
        self._formation = Formation(self._residence, self._shape, self._loss, self._schedule, rank=self._rank)
        self._cache.freeze(self._shape.frozen)
        self._taken += 1
        known = self._frozen_since[: self._shape.frozen]
        self._frozen_since = known + [self._taken] * (self._shape.frozen - len(known))

    def _node_memory(self, size_bytes: int) -> Memory | None:
        return self._open_memory(_CACHE_NAME, size_bytes)


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _kind(rule: FreezingRule) -> str:
    return type(rule).__name__


def _device(given: torch.device | str | None) -> torch.device:
    if given is not None:
        return torch.device(given)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    return torch.device("cpu")
