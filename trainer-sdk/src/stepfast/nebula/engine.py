"""What stands behind Nebula's functions in this process: made when it is first needed, one a process.

Nebula leaves open who saves: every rank its own, or rank 0 alone. A step is whole with the ranks that open its tag.
"""

from __future__ import annotations

import atexit
import logging
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from stepfast.environment import Environment, absolute_storage_uri
from stepfast.errors import GangError, StorageError
from stepfast.layout import job_folder, join, parse_step_folder
from stepfast.nebula.ending import ScriptWatch
from stepfast.nebula.pending import Ending, Moment, Pending
from stepfast.nebula.settings import Settings, make_settings, read_settings
from stepfast.storage import Store, open_store
from stepfast.torch.gang import grouped_world_size, has_others
from stepfast.torch.sources import DirectSource
from stepfast.torch.tagged import OpenTag, Sharing, TaggedCheckpoints
from stepfast.torch.taggedsteps import TaggedSteps

log = logging.getLogger("stepfast")

_Place: TypeAlias = tuple[str, str, str]
"""Storage, job, and what the gang's ranks have in common: there, one run goes on however often it is shut down."""


@dataclass(slots=True)
class _State:
    settings: Settings = field(default_factory=Settings)
    sharing: Sharing | None = None
    checkpoints: TaggedCheckpoints | None = None
    ended: dict[_Place, TaggedCheckpoints] = field(default_factory=dict)  # the last of each place that were closed
    elsewhere: dict[str, TaggedSteps] = field(default_factory=dict)
    scratch: tempfile.TemporaryDirectory[str] | None = None
    pending: Pending = field(default_factory=Pending)
    watch: ScriptWatch = field(default_factory=ScriptWatch)


_state = _State()


def configure(settings: Settings, sharing: Sharing | None = None) -> None:
    """From the next checkpoint on. `sharing`: which ranks save, where that is known.

    What was configured before, and is not said now, stays. The run goes on: its checkpoints are closed and made anew
    for another storage, and where an agent would not know what has changed.
    """
    made = _state.checkpoints
    if made is None:
        _state.settings, _state.sharing = settings, sharing
        return
    settings = replace(settings, storage_path=settings.storage_path or _state.settings.storage_path)
    sharing = sharing or _state.sharing
    environment = _environment(settings)
    is_elsewhere = environment.storage_uri != made.environment.storage_uri
    told, known = environment.max_to_keep, made.environment.max_to_keep
    if (_place(environment), told, sharing) == (_place(made.environment), known, _state.sharing):
        made.persist_every(environment.persist_interval_seconds)
    else:
        pending = _state.pending
        shut_down(goes_on=not is_elsewhere)
        _state.pending = pending
        if is_elsewhere and made.has_saved:
            log.warning(
                "stepfast: checkpoints go to %s from now on; those in %s are found by that path alone",
                environment.storage_uri, made.environment.storage_uri,
            )  # fmt: skip
    _state.settings, _state.sharing = settings, sharing


def attend() -> None:
    """Makes this process's checkpoints, if its gang can be found by now: who shares in a step is then known sooner."""
    if not has_others():
        return  # a gang of one asks nobody, and the script may start its ranks' group only now
    with suppress(GangError):
        checkpoints()


def checkpoints() -> TaggedCheckpoints:
    """This process's. Raises GangError when it has saved as a gang of one, and turns out to be one rank of several."""
    made = _state.checkpoints
    if made is not None and made.environment.world_size == 1 and grouped_world_size() > 1:
        _state.checkpoints = made = _joined_late(made)
    if made is None:
        if _state.settings == Settings():
            _state.settings = make_settings(None, None, None, os.environ)
        environment = _environment(_state.settings)
        before = _state.ended.pop(_place(environment), None)
        if before is not None and before.environment.world_size == 1 and grouped_world_size() > 1:
            _check_unsaved(before)
            before = None
        _state.checkpoints = made = _make(environment, before)
    _state.watch.begin()
    return made


def open_tag(tag: str) -> OpenTag:
    """Opens it in this process's checkpoints, behind what was left open and can get nothing more."""
    _state.pending.settle(Moment.NEXT)
    return checkpoints().open(tag)


def pending() -> Pending:
    """What is open, and whole only if nothing more comes."""
    return _state.pending


def commit_pending() -> None:
    """Commits what was saved, and of which nobody said whether it is all, before somebody looks at what there is."""
    _state.pending.settle(Moment.LOOK)


def commits_empty() -> bool:
    """Whether each rank commits each tag, be it with nothing."""
    return checkpoints().sharing is Sharing.EVERY_RANK


def steps_at(path: str | None) -> TaggedCheckpoints | TaggedSteps | None:
    """The checkpoints of that storage: this job's own for None and for the path that it was told; None: there are none.

    Elsewhere those of a job of the same name, or of the only one that is there. Raises StorageError.
    """
    if path is None or _is_own(path):
        return checkpoints()
    uri = absolute_storage_uri(path)
    found = _state.elsewhere.get(uri) or _look(uri)
    if found is not None:
        _state.elsewhere[uri] = found
    return found


def scratch_folder() -> str:
    """A folder for files that are there until the process ends."""
    if _state.scratch is None:
        _state.scratch = tempfile.TemporaryDirectory(prefix="stepfast-")
    return _state.scratch.name


def shut_down(*, goes_on: bool = False) -> None:
    """Waits until all is persisted, and lets go of everything; what is called next goes on with the same run.

    `goes_on`: it is known that something is called next.
    """
    _end(Ending.ORDERLY)
    _state.pending = Pending()
    made, _state.checkpoints = _state.checkpoints, None
    atexit.unregister(_at_exit)
    _state.watch.end()
    for found in _state.elsewhere.values():
        found.close()
    _state.elsewhere.clear()
    if made is not None:
        _state.ended[_place(made.environment)] = made
        made.close(goes_on=goes_on)


def _end(ending: Ending) -> None:
    _state.pending.settle(Moment.END, ending)


def _at_exit() -> None:
    """A script that ends has saved what it saved; of one that failed nobody knows whether it was all."""
    _end(_state.watch.ending())


def _environment(settings: Settings) -> Environment:
    """This rank's. Where it is the script that says which storage, each has a run, and tags, of its own."""
    environment = read_settings(settings)
    if not os.environ.get("STEPFAST_STORAGE_URI"):
        scope = environment.gang_scope or environment.run
        environment = replace(environment, gang_scope=f"{scope}/{environment.storage_uri}")
    return environment


def _place(environment: Environment) -> _Place:
    return (environment.storage_uri, str(environment.job), environment.gang_scope)


def _make(environment: Environment, before: TaggedCheckpoints | None = None) -> TaggedCheckpoints:
    sharing = _state.sharing or Sharing.WHOEVER_OPENS
    made = TaggedCheckpoints(sharing=sharing, environment=environment, before=before)
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)  # behind the checkpoints' own, so it is called before
    return made


def _joined_late(alone: TaggedCheckpoints) -> TaggedCheckpoints:
    """The process's checkpoints as those of a rank, when until now it seemed to be the only one."""
    _check_unsaved(alone)
    alone.close()
    made = _make(_environment(_state.settings))
    made.go_on_from(alone.begins_after)
    return made


def _check_unsaved(alone: TaggedCheckpoints) -> None:
    if alone.has_saved:
        raise GangError(
            f"this process has saved checkpoints as the only rank, and is one of {grouped_world_size()} now: call "
            "torch.distributed.init_process_group() before the first save"
        )


def _is_own(path: str) -> bool:
    told, uri = _state.settings.storage_path, absolute_storage_uri(path)
    return uri in (checkpoints().environment.storage_uri, told and absolute_storage_uri(told))


def _look(uri: str) -> TaggedSteps | None:
    store = open_store(uri)
    folder = _job_folder_in(store, checkpoints().environment)
    if folder is None:
        store.close()
        return None
    environment = checkpoints().environment
    return TaggedSteps(
        DirectSource(store, folder, run=""), rank=environment.rank, local_world_size=environment.local_world_size,
        weights_only=False,
    )  # fmt: skip


def _job_folder_in(store: Store, environment: Environment) -> str | None:
    """Where in the storage a job's steps are."""
    own = job_folder(environment.job)
    if _has_steps(store, ""):
        return ""
    if _has_steps(store, own):
        return own
    jobs = [join(space, job) for space in _folders(store, "") for job in _folders(store, space)]
    found = [job for job in jobs if _has_steps(store, job)]
    if len(found) > 1:
        raise StorageError(f"{store.uri} holds checkpoints of {', '.join(found)}, none of {own}: name one's own folder")
    return found[0] if found else None


def _folders(store: Store, folder: str) -> list[str]:
    return [entry.name for entry in store.list(folder) if entry.is_folder]


def _has_steps(store: Store, folder: str) -> bool:
    return any(parse_step_folder(name) is not None for name in _folders(store, folder))
