"""`stepfast anatomy predict`: what a training step will take, before there is a device for it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepfast.cli.anatomyfunctions import functions_of
from stepfast.cli.manifestfile import annotate as write_annotation
from stepfast.cli.manifestfile import check as check_manifest
from stepfast.cli.told import told
from stepfast.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepfast.torch.anatomy import Device, Report

Model = Annotated[
    str,
    typer.Option(
        "--model",
        help="package.module:function that makes it, or a configuration of Transformers: config.json, its folder, or "
        "a kind of model as gpt2",
    ),
]
Batch = Annotated[
    str | None,
    typer.Option("--batch", help="package.module:function that makes a batch, given its size (default: by the model)"),
]
Loss = Annotated[
    str | None, typer.Option("--loss", help="package.module:function of model and batch (default: the model's own)")
]
Optimizer = Annotated[
    str,
    typer.Option(
        "--optimizer",
        help="adamw, adam, sgd, sgd-momentum, adafactor, adamw8bit, or package.module:function of the parameters",
    ),
]
BatchSize = Annotated[int | None, typer.Option("--batch-size", min=1, help="samples of one rank (default: 1)")]
Task = Annotated[str | None, typer.Option("--task", help="the head of a configuration, as causal-lm")]
SequenceLength = Annotated[
    int | None, typer.Option("--sequence-length", min=1, help="tokens of a configuration's batch (default: 512)")
]
PrecisionName = Annotated[str, typer.Option("--precision", help="fp32, bf16-mixed, fp16-mixed, bf16")]
Checkpointing = Annotated[bool, typer.Option("--checkpointing", help="recompute activations (models of Transformers)")]
AccumulationSteps = Annotated[int, typer.Option("--accumulation-steps", min=1, help="batches of one step")]
ClipNorm = Annotated[float | None, typer.Option("--clip-norm", help="clip gradients to this norm")]
Out = Annotated[Path | None, typer.Option("--out", help="write the report here, for `stepfast anatomy report`")]
Html = Annotated[Path | None, typer.Option("--html", help="write it as a page that needs nothing else")]
AsJson = Annotated[bool, typer.Option("--json", help="print it as JSON, in place of tables")]
Force = Annotated[bool, typer.Option("--force", help="replace the files of --out and --html")]


def predict(  # noqa: PLR0917 - typer calls it by keyword
    model: Model,
    batch: Batch = None,
    loss: Loss = None,
    optimizer: Optimizer = "adamw",
    batch_size: BatchSize = None,
    largest: Annotated[
        bool, typer.Option("--largest-batch", help="search for the largest batch that fits, and report on it")
    ] = False,
    task: Task = None,
    sequence_length: SequenceLength = None,
    device: Annotated[str, typer.Option("--device", help="as a100-80gb, h100-80gb, v100-16gb, cpu")] = "a100-80gb",
    memory: Annotated[
        str | None, typer.Option("--memory", help="what the device has, as 24GiB (default: what such a device has)")
    ] = None,
    precision: PrecisionName = "fp32",
    parallel: Annotated[
        str, typer.Option("--parallel", help="none, or KIND:RANKS: ddp, fsdp2, zero1, zero2, zero3, as fsdp2:8")
    ] = "none",
    attention: Annotated[
        str,
        typer.Option("--attention", help="the kernel of scaled_dot_product_attention: auto, flash, efficient, math"),
    ] = "auto",
    checkpointing: Checkpointing = False,
    accumulation_steps: AccumulationSteps = 1,
    clip_norm: ClipNorm = None,
    out: Out = None,
    html: Html = None,
    as_json: AsJson = False,
    force: Force = False,
    annotate: Annotated[
        Path | None,
        typer.Option(
            "--annotate",
            metavar="job.yaml",
            help="write the prediction into this manifest: the operator compares it with what its nodes have",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="which TrainingJob of the manifest's several")] = None,
) -> None:
    """Predicts memory and time of a training step without a GPU, weights or data."""
    from stepfast.cli.anatomy import check_targets, show

    with told():
        check_norm(clip_norm)
        if largest and batch_size is not None:
            raise SpecError("--largest-batch", "searches for what --batch-size says: name one of them")
        if name is not None and annotate is None:
            raise SpecError("--name", "is of the manifest that --annotate names")
        check_targets(out=out, html=html, force=force)
        if annotate is not None:
            check_manifest(annotate, name)
        target = _device(device, memory)
        if largest and target.memory_bytes is None:
            raise SpecError("--largest-batch", f"{device} has no known memory: say with --memory how much it has")
        functions = functions_of(
            model, batch, loss, optimizer,
            task=task, sequence_length=sequence_length, precision=precision, checkpointing=checkpointing,
        )  # fmt: skip
        from stepfast.torch.anatomy import predict as predicted

        def report_of(batch_size: int) -> Report:
            return predicted(
                functions.model,
                functions.optimizer,
                functions.batch,
                loss_fn=functions.loss,
                batch_size=batch_size,
                device=target,
                precision=precision,
                parallel=parallel,
                attention=attention,
                checkpointing=checkpointing,
                accumulation_steps=accumulation_steps,
                clip_norm=clip_norm,
                title=functions.title,
            )

        with functions.watch.telling():
            report = _largest(report_of) if largest else report_of(batch_size or 1)
        show(report, out=out, html=html, as_json=as_json, force=force)
        if annotate is not None:
            from stepfast.torch.anatomy.report import footprint_of

            job = write_annotation(annotate, footprint_of(report), name)
            typer.echo(f"{annotate}: {job} carries the prediction", err=True)


def check_norm(clip_norm: float | None) -> None:
    """Raises SpecError where gradients cannot be clipped to it."""
    if clip_norm is not None and not 0 < clip_norm < math.inf:
        raise SpecError("--clip-norm", f"{clip_norm} is no norm: a number greater than 0")


def _largest(report_of: Callable[[int], Report]) -> Report:
    from stepfast.torch.anatomy.fit import largest_batch

    def tell(batch_size: int, fits: bool) -> None:
        typer.echo(f"{_samples(batch_size)} a rank: {'fits' if fits else 'does not fit'}", err=True)

    found = largest_batch(report_of, tell)
    if found.batch_size == 0:
        typer.echo("not even one sample fits; the report is of one sample", err=True)
    else:
        typer.echo(f"largest batch that fits: {_samples(found.batch_size)} a rank", err=True)
    return found.report


def _samples(count: int) -> str:
    return "1 sample" if count == 1 else f"{count} samples"


def _device(name: str, memory: str | None) -> Device:
    from stepfast.torch.anatomy.devices import device_named

    device = device_named(name)
    return device if memory is None else replace(device, memory_bytes=_bytes(memory))


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", text.strip(), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise SpecError("--memory", f"{text} is no size, as 24GiB")
    unit = (match[2] or "").lower()
    base = 1024 if unit.endswith("i") else 1000
    return int(float(match[1]) * base ** " kmgt".index(unit[:1] or " "))
