"""The command `stepfast run`: options and manifest to a TrainingJob, a session, its exit status."""

from __future__ import annotations

import asyncio
import re
import sys
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer
import yaml
from rich.console import Console

from stepfast.environment import absolute_storage_uri
from stepfast.errors import SpecError, StepfastError
from stepfast_operator.backends.statefolder import Invocation
from stepfast_operator.jobcommands.command import register as register_job_commands
from stepfast_operator.local.output import lasting
from stepfast_operator.local.preflight import check_start, check_writable
from stepfast_operator.local.session import Outcome, Surroundings, run_session
from stepfast_operator.local.summary import print_summary, write_summary
from stepfast_operator.local.view import LiveView, PlainView
from stepfast_operator.names import job_name_of
from stepfast_operator.spec import API_VERSION, KIND, TrainingJob, parse_manifest

DEFAULT_NAMESPACE = "local"
_USAGE_ERROR = 2
_ONCE = frozenset({"resume_from_step"})
_STARTERS = re.compile(r"python[0-9.]*|torchrun")


def register(app: typer.Typer) -> None:
    """Adds `run` to the `stepfast` command, and what looks at jobs and steers them."""
    # What stands behind the script is the script's, options or not.
    context = {"allow_interspersed_args": False}
    app.command(name="run", context_settings=context, no_args_is_help=True)(run)
    register_job_commands(app)


def run(  # noqa: PLR0917 - typer calls it by keyword
    context: typer.Context,
    script: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARGS]...", help="The training script and its arguments."),
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A TrainingJob manifest instead.")] = None,
    name: Annotated[str | None, typer.Option(help="The job's name; by default the script's.")] = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URI", help="Where checkpoints go. Default: .stepfast/checkpoints here."),
    ] = None,
    nnodes: Annotated[int | None, typer.Option(min=1, help="Torchrun processes, each standing for a node.")] = None,
    nproc_per_node: Annotated[
        str | None, typer.Option(metavar="N|auto", help="Ranks a node; auto: one per GPU, one without.")
    ] = None,
    max_restarts: Annotated[int | None, typer.Option(min=0, help="Restarts before giving up.")] = None,
    env: Annotated[list[str] | None, typer.Option(metavar="K=V", help="For the script; may be repeated.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory tier, as in 8Gi.")] = None,
    interval: Annotated[str | None, typer.Option(metavar="auto|10s|50steps", help="How often to save.")] = None,
    resume_policy: Annotated[str | None, typer.Option(metavar="Latest|Never", help="Where to start from.")] = None,
    resume_from_step: Annotated[
        int | None, typer.Option(min=0, help="Roll back to this committed step, each time it is given.")
    ] = None,
    anatomy: Annotated[
        bool, typer.Option("--anatomy", help="Measure where memory and time go, in scripts that use a Checkpointer.")
    ] = False,
    summary: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write the job's status here.")] = None,
) -> None:
    """Run a training script so that it survives: failures restart it from the latest committed step."""
    options = {
        "trainer.numNodes": nnodes,
        "trainer.numProcPerNode": _processes(nproc_per_node),
        "failurePolicy.maxRestarts": max_restarts,
        "checkpoint.storageUri": absolute_storage_uri(storage) if storage is not None else None,
        "checkpoint.memory.sizeLimit": memory,
        "checkpoint.interval": interval,
        "checkpoint.resumePolicy": "Step" if resume_from_step is not None else resume_policy,
        "checkpoint.resumeFromStep": resume_from_step,
    }
    try:
        given = {key: value for key, value in options.items() if value is not None}
        job, ignored = _job_of(script or [], file, name, given, env)
        check_start(job)
        if summary is not None:
            check_writable(summary, "--summary")
        outcome = _run(job, ignored, _invocation(context), anatomy=anatomy)
    except SpecError as error:
        sys.stderr.write(f"stepfast run: {error}\n")
        raise typer.Exit(_USAGE_ERROR) from None
    except (StepfastError, OSError) as error:
        sys.stderr.write(f"stepfast run: {error}\n")
        raise typer.Exit(1) from None
    if summary is not None:
        try:
            write_summary(summary, job.job, outcome)
        except OSError as error:
            # How the job ended is what the exit status tells.
            with suppress(OSError):
                sys.stderr.write(f"stepfast run: {summary} cannot be written: {error.strerror}\n")
    raise typer.Exit(outcome.exit_code)


def _processes(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isdigit() else text


def _job_of(
    script: list[str], file: Path | None, name: str | None, options: dict[str, Any], env: list[str] | None
) -> tuple[TrainingJob, list[str]]:
    """The manifest, given or made up from the script, with the options on top of it; and what stands beside it in its
    file. Raises SpecError.
    """
    if (file is None) == (not script):
        raise SpecError("SCRIPT", "give either a script with its arguments or -f MANIFEST")
    document, others = _read_manifest(file) if file is not None else (_manifest_for(script), [])
    if name is not None:
        document["metadata"]["name"] = name
    if "checkpoint.resumePolicy" in options:
        others = [*others, *_take_secret(document["spec"])]
    for path, value in options.items():
        _set(document["spec"], path.split("."), value)
    variables = [_variable(text) for text in env or ()]
    trainer = document["spec"].setdefault("trainer", {})
    if variables and isinstance(trainer, dict):
        trainer["env"] = [*trainer.get("env", ()), *variables]
    job = parse_manifest(document, default_namespace=DEFAULT_NAMESPACE)
    # Each command that asks for a step is a request of its own, also when it is the same one typed again.
    if "checkpoint.resumeFromStep" in options:
        job = replace(job, command=uuid.uuid4().hex)
    return job, others


def _invocation(context: typer.Context) -> Invocation:
    """The command line, without what it asks for only once."""
    options: list[str] = []
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.param_type_name != "option" or value is None or parameter.name in _ONCE:
            continue
        if isinstance(value, bool):
            options += [parameter.opts[0]] if value else []
            continue
        for item in value if isinstance(value, list | tuple) else [value]:
            options += [parameter.opts[0], str(item)]
    return Invocation(folder=str(Path.cwd()), options=tuple(options), script=tuple(context.params.get("script") or ()))


def _manifest_for(script: list[str]) -> dict[str, Any]:
    program = script[0].rpartition("/")[2]
    if _STARTERS.fullmatch(program) and not Path(script[0]).is_file():
        rest = next((word for word in script[1:] if word.endswith(".py")), "train.py")
        raise SpecError("SCRIPT", f"{program} is started for you: name the script alone, as in stepfast run {rest}")
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": job_name_of(script[0])},
        "spec": {"trainer": {"command": ["torchrun"], "args": ["--", *script]}},
    }


def _read_manifest(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The file's TrainingJob, and what else is in it (a Namespace, say), as notices name it. Raises SpecError."""
    try:
        documents = [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(str(path), f"is not YAML: {error}") from error
    jobs = [document for document in documents if len(documents) == 1 or _word(document, "kind") == KIND]
    if len(jobs) != 1:
        raise SpecError(str(path), f"holds {len(jobs)} of kind {KIND}: one at a time runs on one machine")
    document = jobs[0]
    is_whole = isinstance(document, dict) and all(isinstance(document.get(key), dict) for key in ("metadata", "spec"))
    if not is_whole:
        raise SpecError(str(path), f"is no {KIND}: metadata and spec are required")
    others = [other for other in documents if other is not document]
    return dict(document), [
        f"{_word(other, 'kind')} {_word(_word(other, 'metadata'), 'name')} in {path}" for other in others
    ]


def _word(document: Any, key: str) -> Any:
    return document.get(key) if isinstance(document, dict) else None


def _set(document: dict[str, Any], path: list[str], value: object) -> None:
    for key in path[:-1]:
        document = document.setdefault(key, {})
    document[path[-1]] = value


def _take_secret(spec: dict[str, Any]) -> list[str]:
    """In a cluster a job with a Secret can start only from the latest step. Here whoever calls reads the storage, and
    may say where to start. Returns what was taken out.
    """
    checkpoint = spec.get("checkpoint")
    if not isinstance(checkpoint, dict) or checkpoint.pop("secretRef", None) is None:
        return []
    return ["spec.checkpoint.secretRef"]


def _variable(text: str) -> dict[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SpecError("--env", f"{text!r} is not K=V")
    return {"name": name, "value": value}


def _run(job: TrainingJob, ignored: list[str], invocation: Invocation, *, anatomy: bool) -> Outcome:
    from stepfast.nodeclient import NodeClient
    from stepfast.storage import open_store

    root = Path.cwd() / ".stepfast"
    surroundings = Surroundings(
        state_root=root / "jobs",
        storage_uri=absolute_storage_uri(str(root / "checkpoints")),
        open_store=open_store,
        connect=NodeClient,
        invocation=invocation,
        is_measured=anatomy,
    )
    job = replace(job, spec=replace(job.spec, elastic_policy=None))  # one machine has place for what runs on it
    with lasting(sys.stdout) as output:
        out = cast("TextIO", output)  # as much of one as is used
        console = Console(file=out)
        if not console.is_terminal:
            console = Console(file=out, width=120)
        with LiveView(console, str(job.job)) if console.is_terminal else PlainView(out) as view:
            for what in [*ignored, *job.cluster_only]:
                view.say(f"{what} has no meaning on one machine and is ignored")
            outcome = asyncio.run(run_session(job, surroundings, view))
        print_summary(console, job, outcome)
    return outcome
