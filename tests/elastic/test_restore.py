"""What an elastic pipeline saves is all there is to go on from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gangs import be_rank, run_gang
from stepfast.torch import Checkpointer, every
from stepfast.torch.elastic_pipeline import ElasticPipeline, Evidence, MomentRule
from stepfast.torch.rng import get_rng_state, set_rng_state
from trainings import (
    BATCH,
    EPOCHS,
    WIDTH,
    Outcome,
    Training,
    blocks,
    data,
    distance,
    go_on,
    loss,
    make_convolving,
    make_late,
    make_random,
    outcome_of,
    random_blocks,
    tensors_of,
    train_alone,
    train_to,
    worsening,
)


def train_and_go_back(make: Callable[[], Any]) -> list[tuple[int, int, int]]:
    """Trains, then goes back to each step, and to the end of each epoch, and trains from there anew: the ends are
    equal, bit for bit."""
    torch.manual_seed(dist.get_rank())
    pipeline, scheduler, network, optimizer = make()
    states = []
    shapes = []

    def note() -> None:
        own = {"pipeline": pipeline.state_dict(), "scheduler": scheduler.state_dict(), "rng": get_rng_state()}
        states.append(copy.deepcopy(own))

    for _ in pipeline.epochs(EPOCHS):
        for _ in pipeline.steps():
            scheduler.step()
            note()
            shapes.append((pipeline.shape.frozen, pipeline.shape.length, pipeline.shape.replicas))
        pipeline.adapt(worsening(pipeline))
        note()
    expected, expected_loss = tensors_of(network, optimizer), pipeline.mean_loss()
    for state in states:
        pipeline, scheduler, network, optimizer = make()
        pipeline.load_state_dict(copy.deepcopy(state["pipeline"]))
        scheduler.load_state_dict(state["scheduler"])
        set_rng_state(state["rng"])
        for _ in go_on(pipeline, scheduler):
            pass
        found = tensors_of(network, optimizer)
        assert found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []
        assert pipeline.mean_loss() == pytest.approx(expected_loss, rel=1e-12)
    return shapes


STEADILY = [(0, 4, 1), (3, 2, 2), (6, 1, 4), (1, 4, 1)]
LATE = [(5, 2, 2), (5, 2, 2), (7, 1, 4), (0, 4, 1)]


@pytest.mark.parametrize(
    ("make", "epochs"),
    [
        pytest.param(make_random, STEADILY, id="random samples"),
        pytest.param(partial(make_random, data, cache=True), STEADILY, id="activations from the cache"),
        pytest.param(partial(make_late, cache=False), LATE, id="frozen at first, and fewer samples than replicas"),
        pytest.param(partial(make_late, cache=True), LATE, id="the same, activations from the cache"),
        pytest.param(make_convolving, [(0, 1, 4)] * 4, id="channels last"),
    ],
)
def test_every_step_can_be_gone_back_to(make: Callable[[], Any], epochs: list[tuple[int, int, int]]) -> None:
    assert run_gang(4, train_and_go_back, make)[0][::3] == epochs


PLAIN = Training(model=blocks, steps=10, changes={2: 4, 8: 5}, options={"length": 2, "micro_batches": 1})


def train_a_part(folder: Path, attempt: int, last: int) -> Outcome:
    """From what is committed to that step, which is saved."""
    be_rank(folder, "parts", attempt)
    network, optimizer, scheduler = PLAIN.make(seed=attempt)
    pipeline = PLAIN.pipeline(network, optimizer)
    checkpointer = Checkpointer(pipeline=pipeline, scheduler=scheduler, replicated=["scheduler"])
    start = checkpointer.restore()
    losses, shapes = train_to(pipeline, scheduler, PLAIN, last)
    checkpointer.save(last)
    checkpointer.close()
    assert len(losses) == last - start
    return outcome_of(network, optimizer, losses, shapes)


def test_another_number_of_ranks_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    expected = train_alone(PLAIN)
    losses = []
    for attempt, (world_size, last) in enumerate([(4, 3), (2, 5), (8, 7), (4, 10)], start=1):
        outcomes = run_gang(world_size, train_a_part, tmp_path, attempt, last)
        losses += outcomes[0].losses
    assert losses == pytest.approx(expected.losses, rel=0, abs=1e-12)
    for outcome in outcomes:
        assert distance(outcome.weights, expected.weights) < 1e-12
        assert distance(outcome.moments, expected.moments) < 1e-12


def wide() -> nn.Sequential:
    """Of layers that are large enough to be left out."""
    return nn.Sequential(
        nn.Linear(WIDTH, 96), *(nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(6)), nn.Linear(96, WIDTH)
    )


WIDE = Training(model=wide, options={"length": 2, "micro_batches": 1, "cache": False})


def train_half_frozen(folder: Path, attempt: int) -> tuple[int, dict[str, torch.Tensor]]:
    """Freezes the first four layers after the second step, thaws them after the sixth, saves every step."""
    be_rank(folder, "half", attempt)
    network, optimizer, scheduler = WIDE.make()
    pipeline = WIDE.pipeline(network, optimizer)
    checkpointer = Checkpointer(pipeline=pipeline, scheduler=scheduler, interval=every(steps=1))
    start = checkpointer.restore()
    for _ in pipeline.epochs(3):
        for step in pipeline.steps():
            scheduler.step()
            if step.number in (2, 6):
                pipeline.take(pipeline.shape_for(4 if step.number == 2 else 0))
            checkpointer.save(step.number).wait()
            if step.number in (5, 9) and attempt == step.number // 4:
                checkpointer.close()
                return start, tensors_of(network, optimizer)
    raise AssertionError("nine steps are three epochs")


def test_frozen_layers_are_saved_once_and_come_back_bit_for_bit(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    run_gang(2, train_half_frozen, folder, 1)
    sizes = {
        step: sum(file.stat().st_size for file in (folder / "tests" / "half" / f"global_step{step}").iterdir())
        for step in range(1, 6)
    }
    assert sizes[2] > 0.95 * sizes[1]  # the first one with frozen layers has all of them
    assert max(sizes[step] for step in (3, 4, 5)) <= 0.55 * sizes[1]
    second = run_gang(2, train_half_frozen, folder, 2)
    undisturbed = run_gang(2, train_half_frozen, tmp_path / "other", 2)
    assert [start for start, _ in second] == [5, 5]
    for (_, found), (_, expected) in zip(second, undisturbed, strict=True):
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def saved_once_each() -> tuple[list[str], int]:
    pipeline, scheduler, _, _ = make_random()
    for _ in go_on(pipeline, scheduler, 2):
        pass
    layers = pipeline.state_dict()["layers"].values()
    return [name for layer in layers for name in layer["tensors"]], sum(
        tensor.nbytes for layer in layers for tensor in layer["tensors"].values()
    )


def test_each_layer_is_in_one_ranks_state() -> None:
    said = run_gang(4, saved_once_each)
    names = [name for own, _ in said for name in own]
    assert sorted(names) == sorted(random_blocks().state_dict())


def whole() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    pipeline, scheduler, network, _ = make_random()
    for _ in go_on(pipeline, scheduler, 2):
        pass
    return pipeline.model_state_dict(), {name: t for name, t in network.state_dict().items() if t.numel()}


def test_rank_0_has_the_whole_model_at_the_end() -> None:
    said = run_gang(4, whole)
    assert list(said[0][0]) == list(random_blocks().state_dict())
    assert [found for found, _ in said[1:]] == [{}] * 3
    for _, held in said:
        assert [name for name, tensor in held.items() if not torch.equal(tensor, said[0][0][name])] == []


def mistaken(kind: str) -> str:
    pipeline, _, _, _ = make_random()
    state = pipeline.state_dict()
    if kind == "order":
        state["order"]["seed"] = 5
    elif kind == "version":
        state["version"] = 99
    elif kind == "rule":
        state["rule"]["kind"] = "Never"
    elif kind == "layer" and dist.get_rank() == 2:
        del state["layers"][next(iter(state["layers"]))]
    elif kind == "shape" and dist.get_rank() == 1:
        tensors = next(iter(state["layers"].values()))["tensors"]
        name = next(iter(tensors))
        tensors[name] = torch.zeros(3)
    with pytest.raises(ValueError, match=r".") as raised:
        pipeline.load_state_dict(state)
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("order", "samples' order"),
        ("version", "version 99"),
        ("rule", "saved with the rule Never, which is Steadily now"),
        ("layer", "nobody has layers"),
        ("shape", "was saved"),
    ],
)
def test_a_state_of_another_training_is_refused_on_every_rank(kind: str, reason: str) -> None:
    assert all(reason in text for text in run_gang(4, mistaken, kind))


def asked() -> tuple[float, list[float | None]]:
    network, optimizer, _ = Training(model=blocks).make()
    seen: list[Evidence] = []

    class Look(MomentRule):
        def frozen_layers(self, evidence: Evidence) -> int:
            seen.append(evidence)
            return evidence.frozen

    pipeline = ElasticPipeline(network, optimizer, loss, data=data(), batch_size=BATCH, rule=Look(), length=2)
    for _ in pipeline.steps():
        pass
    metric = pipeline.evaluate(data(), lambda output, target: (output - target).square().mean())
    pipeline.adapt(metric)
    return metric, [value for layer in seen[0].active for value in (layer.gradient_norm, layer.signal, layer.noise)]


def test_rules_are_shown_what_one_process_would_see() -> None:
    training = Training(model=blocks)
    network, optimizer, _ = training.make()
    squares = torch.zeros(8, dtype=torch.float64)
    from stepfast.torch.order import SampleOrder

    order = SampleOrder(samples=len(data()), batch_size=BATCH)
    for step in range(order.steps_per_epoch):
        inputs, targets = data()[order.batch(order.epoch(0), step)]
        optimizer.zero_grad()
        loss(network(inputs), targets).backward()
        for number, block in enumerate(network):
            squares[number] += sum(float(p.grad.square().sum()) for p in block.parameters())
        optimizer.step()
    expected = []
    for number, block in enumerate(network):
        states = [optimizer.state[parameter] for parameter in block.parameters()]
        first = sum(float((state["exp_avg"] / (1 - 0.9**3)).square().sum()) for state in states)
        second = sum(float((state["exp_avg_sq"] / (1 - 0.999**3)).sum()) for state in states)
        expected += [float(squares[number] / 3) ** 0.5, first / second, 0.1 / 1.9]
    with torch.no_grad():
        inputs, targets = data()[:]
        metric = float((network(inputs) - targets).square().mean())
    for found_metric, found in run_gang(4, asked):
        assert found_metric == pytest.approx(metric, abs=1e-12)
        assert found == pytest.approx(expected, rel=1e-9)
