"""`stepfast checkpoints`: what a storage holds of a job, whether it is whole, and getting it out.

Exit status 1: something is damaged, or the storage or the target fails. 2: the command line asks for what is not there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from stepfast import catalog
from stepfast.cli.export import Export, export_deepspeed, export_file, export_folder
from stepfast.cli.job import uri_of
from stepfast.cli.table import print_table
from stepfast.cli.told import told
from stepfast.errors import CheckpointDamaged, CheckpointNotFound, SpecError
from stepfast.layout import HISTORIES, FileEntry, parse_step_folder, step_folder
from stepfast.sizes import size_text
from stepfast.storage import Store, open_store
from stepfast.storage.target import is_torch_file

app = typer.Typer(
    no_args_is_help=True, help="Committed steps in a storage: list, show, verify, export, remove, bring back."
)

Uri = Annotated[
    str,
    typer.Argument(
        metavar="URI|JOB",
        help="a job's folder, <storage root>/<namespace>/<job>, as a path or a URI; with -n the name of a job in the "
        "cluster",
    ),
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="take a job of this namespace in the cluster, in place of a URI")
]
Context = Annotated[str | None, typer.Option(help="the kubeconfig's context whose cluster has the job")]
Step = Annotated[int | None, typer.Option("--step", min=0, help="the step (default: the latest)")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]

_SUGGESTIONS = 5
_LOOKED_AT = 200  # folders, in search of a job near a wrong URI


@app.command("list")
def list_steps(
    uri: Uri,
    everything: Annotated[bool, typer.Option("--all", help="those that were rolled back, too")] = False,
    as_json: AsJson = False,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """The committed steps, with size, time and lag."""
    uri = _resolved(uri, namespace, context)
    with _opened(uri) as store:
        rows = [(step, "committed") for step in catalog.committed_steps(store, "")]
        superseded = catalog.superseded_steps(store, "") if everything or not rows else []
    if everything:
        rows = sorted([*rows, *((step, "superseded") for step in superseded)], key=lambda row: (row[0].step, row[1]))
    if as_json:
        _print_json([_document(step, state) for step, state in rows])
    elif rows:
        print_table(
            ("STEP", "SIZE", "RANKS", "SAVED", "LAG", "RUN", "STATE"),
            [_row(step, state) for step, state in rows],
        )
    if not rows:
        hint = f"; {len(superseded)} were rolled back: list them with --all" if superseded else ""
        typer.echo(f"no committed step in {uri}{hint}", err=True)


@app.command()
def show(
    uri: Uri, step: Step = None, as_json: AsJson = False, namespace: Namespace = None, context: Context = None
) -> None:
    """One step's files and tensors."""
    uri = _resolved(uri, namespace, context)
    with _opened(uri) as store:
        number = _chosen(store, step)
        manifest, parts = catalog.open_step(store, "", number)
        files = [file for part in parts for file in part.files]
        headers = {file.path: catalog.read_header(store, "", file, number) for file in files}
        elsewhere = {file.path: catalog.read_references(store, "", file, number) for file in files}
    if as_json:
        _print_json(
            {
                "step": number,
                "run": manifest.run,
                "worldSize": manifest.world_size,
                "sizeBytes": manifest.size_bytes,
                "refers": list(manifest.refers),
                "files": [{"path": file.path, "rank": file.rank, "sizeBytes": file.size_bytes} for file in files],
                "tensors": {
                    file.path: {
                        name: {"dtype": place.spec.dtype, "shape": list(place.spec.shape)}
                        for name, place in headers[file.path].places.items()
                    }
                    for file in files
                },
                "referred": {
                    path: {name: {"path": there.path, "name": there.name} for name, there in references.items()}
                    for path, references in elsewhere.items()
                },
            }
        )
        return
    rest = f"  refers to step {_numbers(manifest.refers)}" if manifest.refers else ""
    size = size_text(manifest.size_bytes)
    typer.echo(f"step {number}  run {manifest.run}  {manifest.world_size} ranks  {size}{rest}")
    for file in files:
        rows = [
            (
                name,
                place.spec.dtype,
                "x".join(map(str, place.spec.shape)) or "scalar",
                size_text(place.end - place.begin),
            )
            for name, place in headers[file.path].places.items()
        ]
        rows += [(name, "", "", f"in {there.path}") for name, there in elsewhere[file.path].items()]
        title = f"{file.path}  {size_text(file.size_bytes)}"
        print_table(("TENSOR", "DTYPE", "SHAPE", "SIZE"), rows, title=title)


@app.command()
def verify(
    uri: Uri,
    step: Annotated[int | None, typer.Option("--step", min=0, help="the step (default: all)")] = None,
    as_json: AsJson = False,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Reads every byte against its checksum, also what older steps hold of one: all steps, or one. Exit status 1 when
    something is damaged.
    """
    uri = _resolved(uri, namespace, context)
    results: list[dict[str, object]] = []
    whole: set[str] = set()  # files, by path: what several steps refer to is read once
    with _opened(uri) as store:
        steps = [found.step for found in catalog.committed_steps(store, "")] if step is None else [step]
        if not steps:
            raise CheckpointNotFound(f"{uri} holds no committed step")
        for number in steps:
            files: list[FileEntry] = []
            damage = None
            try:
                files.extend(catalog.verify_step(store, "", number, but=whole))
            except CheckpointDamaged as error:
                damage = str(error)
            whole |= {file.path for file in files}
            # What older steps hold of it is theirs.
            size = sum(file.size_bytes for file in files if file.path.startswith(f"{step_folder(number)}/"))
            results.append({"step": number, "sizeBytes": 0 if damage else size, "damage": damage})
            if not as_json:
                typer.echo(damage or f"step {number}: whole, {size_text(size)}", err=damage is not None)
    if as_json:
        _print_json(results)
    if any(result["damage"] for result in results):
        raise typer.Exit(1)


@app.command()
def export(  # noqa: PLR0917 - typer calls it by keyword
    uri: Uri,
    to: Annotated[
        Path,
        typer.Argument(
            help="a file that torch.load opens (.pt, .pth), a new folder (no suffix) for safetensors files, or with "
            "--deepspeed a folder of tags"
        ),
    ],
    step: Step = None,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="whose state (a torch file; default: 0)")] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only/--no-weights-only", help="refuse pickled objects, which run code")
    ] = True,
    deepspeed: Annotated[bool, typer.Option("--deepspeed", help="the files that DeepSpeed itself writes")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace the file or an earlier export's folder")] = False,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Takes a verified step out: one rank's whole state as a torch file, or all ranks' files, as they are (and whole:
    with what older steps hold of them) or as DeepSpeed would have written them.
    """
    uri = _resolved(uri, namespace, context)
    with _opened(uri) as store:
        is_file = not deepspeed and is_torch_file(to)
        if rank is not None and not is_file:
            raise SpecError("--rank", f"goes with a torch file (.pt); {to} is a folder, which takes all ranks' files")
        number = _chosen(store, step)
        write = export_deepspeed if deepspeed else export_file if is_file else export_folder
        write(store, number, to, Export(rank=rank or 0, weights_only=weights_only, force=force))
    typer.echo(f"step {number} is in {to}")


@app.command("rm")
def remove(  # noqa: PLR0917 - typer calls it by keyword
    uri: Uri,
    steps: Annotated[list[int] | None, typer.Argument(help="the steps to remove")] = None,
    superseded: Annotated[
        bool, typer.Option("--superseded", help="remove what was rolled back, of these steps (default: of all)")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Removes steps for good: the manifest first, then the files.

    Committed steps, whose superseded states stay; with --superseded the other way round. A step that other committed
    ones refer to goes only with them.
    """
    uri = _resolved(uri, namespace, context)
    with _opened(uri) as store:
        if superseded:
            _remove_superseded(store, set(steps or ()), yes=yes)
        else:
            _remove_committed(store, set(steps or ()), yes=yes)


@app.command()
def reinstate(
    uri: Uri,
    step: Annotated[int, typer.Argument(min=0, help="the step, as `list --all` shows it")],
    run: Annotated[str | None, typer.Option("--run", help="whose, when several runs' states of it are there")] = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Brings a step back that was rolled back: committed again, if every byte of it is whole.

    Only while no training of the job runs: that would meet a step of another history.
    """
    job, uri = uri, _resolved(uri, namespace, context)
    with _opened(uri) as store:
        runs = [found.run for found in catalog.superseded_steps(store, "") if found.step == step]
        if run is None and len(runs) > 1:
            raise SpecError(
                "--run", f"step {step} was rolled back more than once, of the runs {', '.join(runs)}: name one"
            )
        chosen = run or (runs[0] if runs else None)
        if chosen not in runs:
            raise CheckpointNotFound(f"step {step}{_of(run)} is not superseded in {uri}: see `list --all`")
        try:
            catalog.reinstate(store, "", step, chosen)
        except catalog.StepCommitted as error:
            raise SpecError("STEP", f"{error}: remove that first (`rm {step}` leaves what is superseded)") from error
        latest = catalog.latest_step(store, "")
    follows = (
        "the next start resumes from it"
        if latest == step
        else f"the latest is {latest}; `{_back(job, namespace, context, step)}` goes back to this one"
    )
    typer.echo(f"step {step} is committed again: {follows}")


def _remove_committed(store: Store, wanted: set[int], *, yes: bool) -> None:
    if not wanted:
        raise SpecError("STEPS", "name the steps to remove")
    unknown = sorted(wanted - {found.step for found in catalog.committed_steps(store, "")})
    if unknown:
        others = {found.step for found in catalog.superseded_steps(store, "")} & set(unknown)
        hint = f"; superseded: {_numbers(others)} (remove those with --superseded)" if others else ""
        raise CheckpointNotFound(f"not committed in {store.uri}: {_numbers(unknown)}{hint}")
    referred = catalog.referring_to(store, "", wanted)
    if referred:
        reasons = "; ".join(f"{step} by {_numbers(referring)}" for step, referring in referred.items())
        also = _numbers({step for referring in referred.values() for step in referring})
        raise SpecError("STEPS", f"what others refer to is not removed without them: {reasons}. Name {also}, too")
    _confirm(f"Remove step {_numbers(wanted)} for good?", yes=yes)
    for number in sorted(wanted, reverse=True):  # what refers goes before what it refers to
        catalog.remove_committed(store, "", number)
        typer.echo(f"removed step {number}")


def _remove_superseded(store: Store, wanted: set[int], *, yes: bool) -> None:
    found = catalog.superseded_steps(store, "")
    unknown = sorted(wanted - {step.step for step in found})
    if unknown or not found:
        raise CheckpointNotFound(f"not superseded in {store.uri}: {_numbers(unknown) or 'no step is'}")
    chosen = [step for step in found if not wanted or step.step in wanted]
    _confirm(f"Remove what is superseded of step {_numbers({step.step for step in chosen})} for good?", yes=yes)
    for step in chosen:
        catalog.remove_superseded(store, "", step.step, step.run)
        typer.echo(f"removed step {step.step}{_of(step.run)}")


def _confirm(question: str, *, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise SpecError("--yes", f"is needed where nobody can be asked: {question}")
    typer.confirm(question, abort=True)


def _back(job: str, namespace: str | None, context: str | None, step: int) -> str:
    """What goes back to a step, where the job is."""
    if namespace is None and context is None:
        return f"stepfast run --resume-from-step {step}"
    given = (("-n", namespace), ("--context", context))
    options = " ".join(f"{option} {value}" for option, value in given if value is not None)
    return f"stepfast resume {options} {job} --step {step}"


def _resolved(target: str, namespace: str | None, context: str | None) -> str:
    """The URI that is meant; errors as in `_opened`."""
    with told():
        return uri_of(target, namespace, context)


@contextmanager
def _opened(uri: str) -> Iterator[Store]:
    """The job's folder as a store; errors become one line and an exit status."""
    with told():
        if parse_step_folder(uri.rstrip("/").rpartition("/")[2]) is not None:
            raise SpecError("URI", f"{uri} is a step's folder: name the job's folder, and the step by --step")
        store = open_store(uri)
        try:
            if not _is_job(store, ""):
                raise CheckpointNotFound(f"{uri} holds no job's steps{_near(store, uri)}")
            yield store
        finally:
            store.close()


def _is_job(store: Store, folder: str) -> bool:
    entries = store.list(folder)
    return any(
        parse_step_folder(entry.name) is not None if entry.is_folder else entry.name == HISTORIES for entry in entries
    )


def _near(store: Store, uri: str) -> str:
    """Jobs one and two levels below, as a question; empty when there are none."""
    level, found, left = [""], [], _LOOKED_AT
    for _ in range(2):
        below = [
            f"{folder}/{entry.name}".lstrip("/") for folder in level for entry in store.list(folder) if entry.is_folder
        ]
        level, left = below[:left], max(0, left - len(below))
        found += [folder for folder in level if _is_job(store, folder)]
    if not found:
        return ": name <storage root>/<namespace>/<job>, or with -n NAMESPACE a job of the cluster"
    base = uri if uri.endswith("/") else f"{uri}/"
    names = " or ".join(f"{base}{folder}" for folder in found[:_SUGGESTIONS])
    more = f" or one of {len(found) - _SUGGESTIONS} more" if len(found) > _SUGGESTIONS else ""
    return f": did you mean {names}{more}?"


def _chosen(store: Store, step: int | None) -> int:
    if step is not None:
        return step
    latest = catalog.latest_step(store, "")
    if latest is None:
        raise CheckpointNotFound(f"{store.uri} holds no committed step")
    return latest


def _document(step: catalog.CommittedStep, state: str) -> dict[str, object]:
    return {
        "step": step.step, "run": step.run, "worldSize": step.world_size, "sizeBytes": step.size_bytes,
        "savedTime": step.saved_time, "committedTime": step.committed_time, "refers": list(step.refers), "state": state,
        "damage": step.damage,
    }  # fmt: skip


def _row(step: catalog.CommittedStep, state: str) -> tuple[str, ...]:
    if step.damage is not None:
        damaged = "damaged" if state == "committed" else f"{state}, damaged"
        return (str(step.step), "", "", "", "", step.run, f"{damaged}: {step.damage}")
    lag = f"{step.committed_time - step.saved_time:.2f} s"
    size, saved = size_text(step.size_bytes), _time(step.saved_time)
    if step.refers:
        state = f"{state}, refers to {_numbers(step.refers)}"
    return (str(step.step), size, str(step.world_size), saved, lag, step.run, state)


def _of(run: str | None) -> str:
    return f" of run {run}" if run else ""


def _numbers(steps: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(steps)))


def _print_json(document: object) -> None:
    typer.echo(json.dumps(document, indent=2))


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def register(root: typer.Typer) -> None:
    """Adds the commands under `checkpoints`."""
    root.add_typer(app, name="checkpoints")
