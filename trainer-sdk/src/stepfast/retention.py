"""Which committed steps are kept, and which uncommitted leftovers are swept. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from stepfast.layout import MANIFEST, classify
from stepfast.step import attempt_of

_NONE: Mapping[int, Collection[int]] = MappingProxyType({})


def steps_to_remove(
    committed: Sequence[int],
    *,
    max_to_keep: int,
    protected: Collection[int],
    refers: Mapping[int, Collection[int]] = _NONE,
) -> list[int]:
    """Steps beyond the newest `max_to_keep` (0: keep all), oldest first; never one that is protected, nor one that a
    kept step refers to.

    Protected are the step that the current attempt started from and what steps on their way refer to; `refers`: of
    each committed step, the steps that it refers to.
    """
    if max_to_keep <= 0:
        return []
    kept = set(sorted(committed)[-max_to_keep:]) | set(protected)
    left = list(kept)
    while left:
        newly = set(refers.get(left.pop(), ())) - kept
        kept |= newly
        left += newly
    return sorted(step for step in committed if step not in kept)


def leftovers(folders: Mapping[int, Collection[str]], *, newest_committed: int, run: str) -> list[tuple[int, str]]:
    """The earlier runs that have files in uncommitted steps below the newest committed one: (step, run) pairs.

    Of the present run nothing is swept: an older step of it may still be on its way. What other jobs' uids left in
    the same folder counts as older too.
    """
    swept = []
    for step, names in sorted(folders.items()):
        if step < newest_committed and MANIFEST not in names:
            swept += [(step, other) for other in _unfinished(names) if _is_older(other, run)]
    return swept


def unfinished(names: Collection[str], *, run: str, spared: Collection[str]) -> list[str]:
    """The earlier attempts of the run's own job that have files of these names in a step's folder, and no manifest.

    Not those that are spared, nor what was committed once and rolled back. A job of another uid may be alive.
    """
    if MANIFEST in names:
        return []
    found = [other for other in _unfinished(names) if other not in spared]
    return [other for other in found if _is_same_job(other, run) and _is_older(other, run)]


def abandoned(
    temporary: Mapping[int, Sequence[tuple[str, str]]], *, committed: Collection[int], run: str
) -> list[tuple[int, str]]:
    """Temporary files that killed writers left behind, of older steps than the newest committed one.

    `temporary` gives each file's name and the one that it was to have. In a committed step nobody writes any more;
    elsewhere only what belongs to an earlier run is given up. Returns (step, file name) pairs.
    """
    swept = []
    for step, names in sorted(temporary.items()):
        for name, target in names:
            of = classify(target).run
            if step in committed or (of is not None and _is_older(of, run)):
                swept.append((step, name))
    return swept


def _unfinished(names: Collection[str]) -> list[str]:
    """The runs that have files of these names in a step's folder: not what was committed once and rolled back."""
    kinds = [classify(name) for name in names]
    superseded = {kind.run for kind in kinds if kind.kind == "superseded"}
    wrote = {kind.run for kind in kinds if kind.kind in ("data", "part") and kind.run is not None}
    return sorted(wrote - superseded)


def _is_older(other: str, run: str) -> bool:
    if other == run:
        return False
    return not _is_same_job(other, run) or attempt_of(other) < attempt_of(run)


def _is_same_job(other: str, run: str) -> bool:
    return other.rpartition("-")[0] == run.rpartition("-")[0]
