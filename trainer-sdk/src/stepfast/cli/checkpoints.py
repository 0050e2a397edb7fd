"""`stepfast checkpoints`: what a storage holds of a job, whether it is whole, and getting it out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from stepfast import catalog
from stepfast.errors import CheckpointDamaged, CheckpointNotFound, SpecError, StepfastError
from stepfast.layout import parse_step_folder
from stepfast.storage import Store, open_store

app = typer.Typer(no_args_is_help=True, help="Committed steps in a storage: list, show, verify, export, remove.")

Uri = Annotated[str, typer.Argument(help="a job's folder, <storage root>/<namespace>/<job>, as a path or a URI")]
Step = Annotated[int | None, typer.Option("--step", help="the step (default: the latest)")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.command("list")
def list_steps(uri: Uri, as_json: AsJson = False) -> None:
    """The committed steps, with size, time and lag."""
    with _opened(uri) as store:
        found = catalog.committed_steps(store, "")
    if as_json:
        _print_json([_row(step) for step in found])
        return
    table = Table("STEP", "SIZE", "RANKS", "SAVED", "LAG", "RUN", "STATE")
    for step in found:
        lag = f"{step.committed_time - step.saved_time:.2f} s"
        state = "committed" if step.damage is None else f"damaged: {step.damage}"
        table.add_row(
            str(step.step),
            _size(step.size_bytes),
            str(step.world_size),
            _time(step.saved_time),
            lag,
            step.run,
            state,
        )
    Console().print(table)


@app.command()
def show(uri: Uri, step: Step = None, as_json: AsJson = False) -> None:
    """One step's files and tensors."""
    with _opened(uri) as store:
        number = _chosen(store, step)
        manifest, parts = catalog.open_step(store, "", number)
        files = [file for part in parts for file in part.files]
        headers = {file.path: catalog.read_header(store, "", file, number) for file in files}
    if as_json:
        _print_json(
            {
                "step": number,
                "run": manifest.run,
                "worldSize": manifest.world_size,
                "sizeBytes": manifest.size_bytes,
                "files": [{"path": file.path, "rank": file.rank, "sizeBytes": file.size_bytes} for file in files],
                "tensors": {
                    file.path: {
                        name: {"dtype": place.spec.dtype, "shape": list(place.spec.shape)}
                        for name, place in headers[file.path].places.items()
                    }
                    for file in files
                },
            }
        )
        return
    console = Console()
    console.print(f"step {number}  run {manifest.run}  {manifest.world_size} ranks  {_size(manifest.size_bytes)}")
    for file in files:
        table = Table("TENSOR", "DTYPE", "SHAPE", "SIZE", title=f"{file.path}  {_size(file.size_bytes)}")
        for name, place in headers[file.path].places.items():
            shape = "x".join(map(str, place.spec.shape)) or "scalar"
            table.add_row(name, place.spec.dtype, shape, _size(place.end - place.begin))
        console.print(table)


@app.command()
def verify(uri: Uri, step: Step = None) -> None:
    """Reads every byte against its checksum: all steps, or one. Exit status 1 when something is damaged."""
    damaged = 0
    with _opened(uri) as store:
        steps = [found.step for found in catalog.committed_steps(store, "")] if step is None else [step]
        if not steps:
            raise CheckpointNotFound(f"{uri} holds no committed step")
        for number in steps:
            try:
                size = sum(file.size_bytes for file in catalog.verify_step(store, "", number))
                typer.echo(f"step {number}: whole, {_size(size)}")
            except CheckpointDamaged as error:
                damaged += 1
                typer.echo(str(error), err=True)
    if damaged:
        raise typer.Exit(1)


@app.command()
def export(
    uri: Uri,
    to: Annotated[Path, typer.Argument(help="a file that torch.load opens (.pt), or a folder for safetensors files")],
    step: Step = None,
    rank: Annotated[int, typer.Option("--rank", help="whose state (a torch file)")] = 0,
    weights_only: Annotated[
        bool, typer.Option("--weights-only/--no-weights-only", help="refuse pickled objects, which run code")
    ] = True,
) -> None:
    """Takes a verified step out: one rank's whole state as a torch file, or all ranks' files as they are."""
    with _opened(uri) as store:
        number = _chosen(store, step)
        if to.suffix in (".pt", ".pth", ".bin"):
            from stepfast.torch.export import export_torch

            export_torch(store, number, rank, to, weights_only=weights_only)
        else:
            to.mkdir(parents=True, exist_ok=True)
            for file in catalog.verify_step(store, "", number):
                _copy(store, file.path, file.size_bytes, to / Path(file.path).name)
    typer.echo(f"step {number} is in {to}")


@app.command("rm")
def remove(
    uri: Uri,
    steps: Annotated[list[int], typer.Argument(help="the steps to remove")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
) -> None:
    """Removes steps for good: the manifest first, then the files."""
    with _opened(uri) as store:
        known = {found.step for found in catalog.committed_steps(store, "")}
        unknown = sorted(set(steps) - known)
        if unknown:
            raise CheckpointNotFound(f"not committed in {uri}: {', '.join(map(str, unknown))}")
        if not yes:
            typer.confirm(f"Remove step {', '.join(map(str, sorted(steps)))} for good?", abort=True)
        for number in sorted(set(steps)):
            catalog.remove_step(store, "", number)
            typer.echo(f"removed step {number}")


@contextmanager
def _opened(uri: str) -> Iterator[Store]:
    """The job's folder as a store; errors become one line and exit status 2."""
    try:
        if parse_step_folder(uri.rstrip("/").rpartition("/")[2]) is not None:
            raise SpecError("URI", f"{uri} is a step's folder: name the job's folder, and the step by --step")
        store = open_store(uri)
        try:
            yield store
        finally:
            store.close()
    except StepfastError as error:
        typer.echo(f"stepfast: {error}", err=True)
        raise typer.Exit(2) from error


def _chosen(store: Store, step: int | None) -> int:
    if step is not None:
        return step
    latest = catalog.latest_step(store, "")
    if latest is None:
        raise CheckpointNotFound(f"{store.uri} holds no committed step")
    return latest


def _copy(store: Store, path: str, size_bytes: int, target: Path) -> None:
    block = 8 * 1024 * 1024
    with open(target, "wb") as out:
        for begin in range(0, size_bytes, block):
            buffer = memoryview(bytearray(min(block, size_bytes - begin)))
            store.read_range(path, begin, buffer)
            out.write(buffer)


def _row(step: catalog.CommittedStep) -> dict[str, object]:
    return {
        "step": step.step, "run": step.run, "worldSize": step.world_size, "sizeBytes": step.size_bytes,
        "savedTime": step.saved_time, "committedTime": step.committed_time, "damage": step.damage,
    }  # fmt: skip


def _print_json(document: object) -> None:
    typer.echo(json.dumps(document, indent=2))


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def register(root: typer.Typer) -> None:
    """Adds the commands under `checkpoints`."""
    root.add_typer(app, name="checkpoints")
