"""What stands behind Nebula's functions in this process: made when it is first needed, one a process.

Nebula leaves open who saves: every rank its own, or rank 0 alone. A step is whole with the ranks that open its tag.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from stepfast.environment import Environment, absolute_storage_uri
from stepfast.errors import GangError, StorageError
from stepfast.layout import job_folder, join, parse_step_folder
from stepfast.nebula.settings import Settings, make_settings, read_settings
from stepfast.storage import Store, open_store
from stepfast.torch.sources import DirectSource
from stepfast.torch.tagged import OpenTag, Sharing, TaggedCheckpoints
from stepfast.torch.taggedsteps import TaggedSteps


@dataclass(slots=True)
class _State:
    settings: Settings = field(default_factory=Settings)
    sharing: Sharing | None = None
    checkpoints: TaggedCheckpoints | None = None
    elsewhere: dict[str, TaggedSteps | None] = field(default_factory=dict)
    scratch: tempfile.TemporaryDirectory[str] | None = None
    pending: list[Callable[[], object]] = field(default_factory=list)


_state = _State()


def configure(settings: Settings, sharing: Sharing | None = None) -> None:
    """From the next checkpoint on; what is open is closed first. `sharing`: which ranks save, where that is known."""
    if _state.checkpoints is not None and (settings, sharing) != (_state.settings, _state.sharing):
        shut_down()
    _state.settings, _state.sharing = settings, sharing


def attend() -> None:
    """Makes this process's checkpoints, if its gang can be found by now: who shares in a step is then known sooner."""
    with suppress(GangError):
        checkpoints()


def checkpoints() -> TaggedCheckpoints:
    """This process's."""
    if _state.checkpoints is None:
        if _state.settings == Settings():
            _state.settings = make_settings(None, None, None, os.environ)
        environment = read_settings(_state.settings)
        sharing = _state.sharing or Sharing.WHOEVER_OPENS
        _state.checkpoints = TaggedCheckpoints(sharing=sharing, environment=environment)
        atexit.register(_at_exit)  # behind the checkpoints' own, so it is called before
    return _state.checkpoints


def open_tag(tag: str, commit: Callable[[], object] | None = None) -> OpenTag:
    """Opens it in this process's checkpoints, after what was left open. `commit`: what to call when it is left, too."""
    commit_pending()
    opened = checkpoints().open(tag)
    if commit is not None:
        _state.pending.append(commit)
    return opened


def commit_pending() -> None:
    """Commits what was saved, and of which nobody said whether it is all."""
    pending, _state.pending = _state.pending, []
    for commit in pending:
        commit()


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
    if uri not in _state.elsewhere:
        _state.elsewhere[uri] = _look(uri)
    return _state.elsewhere[uri]


def scratch_folder() -> str:
    """A folder for files that are there until the process ends."""
    if _state.scratch is None:
        _state.scratch = tempfile.TemporaryDirectory(prefix="stepfast-")
    return _state.scratch.name


def shut_down() -> None:
    """Waits until all is persisted, and lets go of everything; what is called next begins anew."""
    commit_pending()
    made, _state.checkpoints = _state.checkpoints, None
    atexit.unregister(_at_exit)
    for found in _state.elsewhere.values():
        if found is not None:
            found.close()
    _state.elsewhere.clear()
    if made is not None:
        made.close()


def _at_exit() -> None:
    """A script that ends has saved what it saved; of one that failed nobody knows whether it was all."""
    if not hasattr(sys, "last_value"):
        commit_pending()


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
