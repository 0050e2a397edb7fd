from __future__ import annotations
from typing import Any
import torch
from gangs import run_gang
from trainings import BATCH, data, loss, model, optimizer
from stepfast.torch.elastic_pipeline import ElasticPipeline
from stepfast.torch.elastic_pipeline.order import SampleOrder


def single(frozen_by_step: dict[int, int], steps: int, clip=None) -> tuple[list[float], dict[str, torch.Tensor]]:
    network = model()
    opt = optimizer(network)
    ds = data()
    order = SampleOrder(samples=len(ds), batch_size=BATCH)
    losses = []
    for step in range(steps):
        if step in frozen_by_step:
            for i, block in enumerate(network):
                for p in block.parameters():
                    p.requires_grad_(i >= frozen_by_step[step])
        epoch, place = divmod(step, order.steps_per_epoch)
        picked = order.batch(order.epoch(epoch), place)
        x, y = ds[picked]
        opt.zero_grad()
        l = loss(network(x), y)
        l.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
        opt.step()
        losses.append(l.item())
    return losses, {k: v.detach() for k, v in network.state_dict().items()}


def elastic(changes, steps, options) -> Any:
    network = model(seed=torch.distributed.get_rank())
    if torch.distributed.get_rank() == 0:
        network = model()
    training = ElasticPipeline(network, optimizer(network), loss, data=data(), batch_size=BATCH, **options)
    losses, shapes = [], []
    while training.step < steps:
        for step in training.steps():
            losses.append(training.mean_loss())
            if step.number in changes:
                training.take(training.shape_for(changes[step.number]))
            shapes.append(training.shape.to_document())
            if training.step == steps:
                break
    held = {n: t.detach().clone() for layer in training._residence.held for n, t in training._residence.tensors(layer).items()}
    return losses, held, shapes


def test_all():
    changes = {3: 4, 5: 6, 8: 7, 11: 2}
    want, params = single(changes, 14)
    for r, (losses, held, shapes) in enumerate(run_gang(8, elastic, changes, 14, dict(length=8, device_bytes=10**4))):
        if r == 0:
            print([(s["frozen"], s["length"], s["replicas"]) for s in shapes])
        print(r, max(abs(a - b) for a, b in zip(losses, want)), max((held[n] - params[n]).abs().max() for n in held))
