"""`stepfast anatomy measure`: what a training step takes on this machine."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from stepfast.cli.anatomyfunctions import functions_of
from stepfast.cli.anatomypredict import (
    AccumulationSteps,
    AsJson,
    Batch,
    BatchSize,
    Checkpointing,
    ClipNorm,
    Force,
    Html,
    Loss,
    Model,
    Optimizer,
    Out,
    PrecisionName,
    SequenceLength,
    Task,
    check_norm,
)
from stepfast.cli.told import told
from stepfast.errors import SpecError


def measure(  # noqa: PLR0917 - typer calls it by keyword
    model: Model,
    batch: Batch = None,
    loss: Loss = None,
    optimizer: Optimizer = "adamw",
    batch_size: BatchSize = None,
    task: Task = None,
    sequence_length: SequenceLength = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda or cuda:1 (default: a CUDA device where there is one)")
    ] = None,
    precision: PrecisionName = "fp32",
    checkpointing: Checkpointing = False,
    accumulation_steps: AccumulationSteps = 1,
    clip_norm: ClipNorm = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="steps that are recorded")] = 2,
    out: Out = None,
    html: Html = None,
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """Measures memory and time of a training step here: runs a few."""
    from stepfast.cli.anatomy import check_targets, show

    with told():
        check_norm(clip_norm)
        check_targets(out=out, html=html, force=force)
        _check_device(device)
        functions = functions_of(
            model, batch, loss, optimizer,
            task=task, sequence_length=sequence_length, precision=precision, checkpointing=checkpointing,
        )  # fmt: skip
        from stepfast.torch.anatomy import measure as measured

        with functions.watch.telling():
            report = measured(
                functions.model,
                functions.optimizer,
                functions.batch,
                loss_fn=functions.loss,
                batch_size=batch_size or 1,
                device=device,
                precision=precision,
                checkpointing=checkpointing,
                accumulation_steps=accumulation_steps,
                clip_norm=clip_norm,
                steps=steps,
                title=functions.title,
            )
        show(report, out=out, html=html, as_json=as_json, force=force)


def _check_device(name: str | None) -> None:
    """Before a model is made for it. Raises SpecError where it is none that can be measured here."""
    with suppress(ImportError):  # who needs torch says so
        import torch

        if name is None:
            return
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise SpecError("--device", f"{name!r} is none of torch's: cpu, cuda, cuda:1") from error
        if device.type not in {"cpu", "cuda"}:
            raise SpecError("--device", f"{device.type} cannot be measured: cpu or cuda")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise SpecError("--device", f"there is no {name} here: measure on the cpu, or predict")
