"""The table of keys is that of the installed DeepSpeed: no key is missing, and none is there that it does not read."""

from __future__ import annotations

from typing import Any

import pytest

from stepfast.integrations.deepspeedconfig import RELEASE, Undecided, fix
from stepfast.integrations.deepspeedconfig.keys import (
    OPTIMIZERS,
    SCHEDULERS,
    SECTIONS,
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULERS,
    names_in,
)

# A dtype of torch, for which JSON has no word.
UNSAYABLE = {("tensor_parallel",): {"dtype"}}
# Read outside of the configuration's own classes.
ELSEWHERE = {"data_parallel_size"}


@pytest.fixture(scope="module")
def described(deepspeed: Any) -> Any:
    return deepspeed.description()


def touched(configuration: dict[str, Any]) -> list[str]:
    """The paths that `fix` asks about, or the first one that it rewrites."""
    try:
        return [fix(configuration).rewrites[0].path]
    except Undecided as error:
        return [problem.path for problem in error.problems]


def path_of(text: str) -> tuple[str, ...]:
    return tuple(text.split(".")) if text else ()


def test_table_is_of_the_installed_release(described: Any) -> None:
    assert described["release"] == RELEASE


def test_every_model_has_exactly_the_keys_of_the_table(described: Any) -> None:
    models = {path_of(text): set(row["names"]) for text, row in described["models"].items() if text}

    assert {path: names - UNSAYABLE.get(path, set()) for path, names in models.items()} == {
        path: names_in(path) for path, section in SECTIONS.items() if section.is_model
    }
    assert set(described["models"][""]["names"]) <= names_in(())


def test_every_other_block_is_asked_for_exactly_the_keys_of_the_table(described: Any) -> None:
    asked = {path_of(text): set(names) for text, names in described["plain"].items()}
    plain = {path for path, section in SECTIONS.items() if path and not section.is_model and not section.is_open}

    assert {path: asked[path] for path in plain} == {path: names_in(path) for path in plain}


def test_top_level_is_asked_for_exactly_the_keys_of_the_table(described: Any) -> None:
    removed = {name for name in described["removed"] if "." not in name}

    assert set(described["plain"][""]) - removed - {"bfloat16"} == names_in(()) - ELSEWHERE
    assert all(f'"{name}"' in described["initialize"] for name in ELSEWHERE)


def test_no_deprecated_or_removed_key_is_left_in(described: Any) -> None:
    old = [
        (*path_of(text), name)
        for text, row in described["models"].items()
        for name in row["old"]
        if text.startswith("zero_optimization")
    ]
    assert len(old) >= 4

    for path in [*old, *map(path_of, described["removed"]), ("bfloat16",)]:
        block: Any = {"enabled": True} if path == ("bfloat16",) else True
        for name in reversed(path):
            block = {name: block}
        assert touched({"train_batch_size": 8, **block}) == [".".join(path)]


def test_optimizers_are_those_of_the_release_and_of_torch(described: Any) -> None:
    assert {name.lower() for name in OPTIMIZERS} == set(described["optimizers"])
    own = set(TORCH_OPTIMIZERS) | set(OPTIMIZERS)
    assert set(TORCH_OPTIMIZERS) <= set(described["torch_optimizers"]) <= own


def test_schedules_and_their_parameters_are_those_of_the_release_and_of_torch(described: Any) -> None:
    parameters = {name: set(names) - {"optimizer"} for name, names in described["schedulers"].items()}

    assert {name: set(section.keys) for name, section in SCHEDULERS.items()} == parameters
    assert set(TORCH_SCHEDULERS) == set(described["torch_schedulers"])
