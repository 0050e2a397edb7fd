"""One process saves a run's steps in one place: a second one's objects would be taken for the first's, or lost."""

from __future__ import annotations

import weakref
from typing import TypeAlias

from stepfast.environment import Environment
from stepfast.errors import CheckpointerOpen

RunKey: TypeAlias = tuple[str, str, str]
"""Storage, job and run."""

_HOLDERS: weakref.WeakValueDictionary[RunKey, object] = weakref.WeakValueDictionary()


def claim(environment: Environment, holder: object) -> RunKey:
    """Makes the run's steps the holder's to save in this process. Raises CheckpointerOpen while they are another's."""
    key = (environment.storage_uri, str(environment.job), environment.run)
    other = _HOLDERS.get(key)
    if other is not None:
        raise CheckpointerOpen(
            f"this process has a {type(other).__name__} of job {key[1]} already: give all objects to one, or close it "
            "first"
        )
    _HOLDERS[key] = holder
    return key


def give_up(key: RunKey, holder: object) -> None:
    """Lets another have the run's steps."""
    if _HOLDERS.get(key) is holder:
        del _HOLDERS[key]
