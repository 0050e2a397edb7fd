"""What can be known to be wrong before anything of a job is started: its script, folders, memory, summary file."""

from __future__ import annotations

from pathlib import Path

from stepfast.errors import SpecError
from stepfast_operator.backends.gangprocess import local_processes, variables_of
from stepfast_operator.quantities import check_memory
from stepfast_operator.spec import TrainingJob
from stepfast_operator.torchrunoptions import script_of

MEMORY_VARIABLES = ("STEPFAST_MEMORY_BUFFER_SIZE", "NEBULA_MEMORY_BUFFER_SIZE")


def check_start(job: TrainingJob) -> None:
    """Raises SpecError naming what this machine lacks of the job."""
    trainer = job.spec.trainer
    variables_of(trainer)
    folder = Path(trainer.working_dir or ".")
    if not folder.is_dir():
        raise SpecError("spec.trainer.workingDir", f"{str(folder)!r} is no folder")
    script = script_of(trainer.command, trainer.args)
    if script is not None and not (folder / script).exists():
        where = f" in {folder}" if trainer.working_dir is not None else ""
        raise SpecError(script, f"there is no such script{where}")
    requested_memory(job)


def requested_memory(job: TrainingJob) -> int | None:
    """What the spec, else the script's environment, wants for the memory tier (bytes); None when neither says.

    Raises SpecError when it is too little for the ranks, all of which share this machine's agent.
    """
    trainer = job.spec.trainer
    path, size_bytes = "spec.checkpoint.memory.sizeLimit", job.spec.checkpoint.memory.size_limit
    if size_bytes is None:
        env = variables_of(trainer)
        name = next((name for name in MEMORY_VARIABLES if name in env), None)
        if name is None:
            return None
        path = f"spec.trainer.env[{name}]"
        if not env[name].isdigit():
            raise SpecError(path, f"{env[name]!r} is no number of bytes")
        size_bytes = int(env[name])
    check_memory(size_bytes, trainer.num_nodes * local_processes(trainer.num_proc_per_node), path)
    return size_bytes


def check_writable(path: Path, option: str) -> None:
    """Raises SpecError when no file can be written there; makes its folder, and changes no file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise SpecError(option, f"{path} cannot be written: {error.strerror}") from error
