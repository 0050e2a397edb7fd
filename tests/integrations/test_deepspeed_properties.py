"""`fix` on any input: it raises nothing but its own error, is done after one pass, leaves alone what is valid, and what
it returns the installed DeepSpeed takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from stepfast.integrations.deepspeedconfig import Undecided, fix
from stepfast.integrations.deepspeedconfig.keys import SECTIONS, Section
from stepfast.integrations.deepspeedconfig.kinds import (
    Flag,
    Kind,
    Many,
    Mapped,
    Rate,
    Real,
    Whole,
    Word,
    Words,
)
from stepfast.integrations.deepspeedconfig.renames import OFFLOAD_NAMES, old_paths

# The oracle is a fixture of the session, which hypothesis cannot make anew for each example, and need not.
SHARED = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))

numbers = st.one_of(st.integers(-3, 64), st.sampled_from([5e8, 1e3, 0.5, 1e19, -1.0]), st.sampled_from([10**30, 2**63]))
scalars = st.one_of(
    st.none(), st.booleans(), numbers, st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=4),
    st.sampled_from(["auto", "cpu", "true", "no", "5e8", "12", "1e400", "Adam", "WarmupLR", "fp16", "auto", "0.1"]),
)  # fmt: skip
known = sorted({name for path, section in SECTIONS.items() for name in (*section.keys, *path)})
old = sorted({path[-1] for path in old_paths()} | set(OFFLOAD_NAMES))
names = st.one_of(
    st.sampled_from(known), st.sampled_from(old), st.sampled_from(["max_grad_norm", "nebula", "a.b", "", "lr"]),
    st.text(max_size=5),
)  # fmt: skip
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=6), max_leaves=12
)
# Keys of whoever wrote the file: neither known anywhere, now or once, nor like a known one.
strange_names = st.one_of(st.sampled_from(["_comment", "seed", "my_run", "x.y"]), st.text(max_size=6)).filter(
    lambda name: name not in {*known, *old} and not get_close_matches(name.lower(), known, cutoff=0.8)
)
strangers = st.dictionaries(strange_names, anything, max_size=3)
objects = st.dictionaries(names, anything, max_size=8)
old_values = st.one_of(st.booleans(), st.integers(0, 64), st.just({"enabled": False}))


def chosen_from(fields: dict[str, st.SearchStrategy[Any]], most: int) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the fields: `fixed_dictionaries` would put most of them into every example."""
    if not fields:
        return st.just({})
    return st.lists(st.sampled_from(sorted(fields)), unique=True, max_size=most).flatmap(
        lambda chosen: st.fixed_dictionaries({name: fields[name] for name in chosen})
    )


def block_at(path: tuple[str, ...], *, is_valid: bool) -> st.SearchStrategy[dict[str, Any]]:
    """A block with the right keys and values; where it need not be valid with old keys, too, and some wrong values."""
    section = SECTIONS[path]
    inner = [found for found in SECTIONS if found and found[:-1] == path]
    fields = {name: valid_value(kind, section) for name, kind in section.keys.items()}
    fields |= {found[-1]: block_at(found, is_valid=is_valid) for found in inner}
    if not section.is_model and not section.is_open:
        fields |= {"_comment": anything, "owner": anything}
    if not is_valid:
        fields |= {found[-1]: old_values for found in old_paths() if found[:-1] == path}
        fields = {name: st.integers(0, 19).flatmap(rarely(anything, field)) for name, field in fields.items()}
    return chosen_from(fields, 5)


def rarely(other: st.SearchStrategy[Any], usual: st.SearchStrategy[Any]) -> Callable[[int], st.SearchStrategy[Any]]:
    return lambda die: other if die == 0 else usual


def valid_value(kind: Kind, section: Section) -> st.SearchStrategy[Any]:
    """What a person would write there, and in a model what it converts."""
    found: list[st.SearchStrategy[Any]] = [st.none()] if kind.is_nullable else []
    match kind:
        case Flag():
            found += [st.booleans(), st.sampled_from(["true", "No", 1, 0.0])] if section.is_model else [st.booleans()]
        case Whole(least=least, most=most):
            whole = st.integers(1 if least is None else least, 64 if most is None else most)
            found += [whole, whole.map(float)] if section.is_model else [whole]
            found += [whole.map(str)] if section.is_model and kind.is_quotable else []
        case Real() | Rate():
            found += [st.sampled_from([0.25, 0.5, 1e-3])]
        case Word(options=options):
            found += [st.sampled_from(options) if options else st.text(min_size=1, max_size=4)]
        case Words(options=options):
            found += [st.lists(st.sampled_from(options or ("torch.nn.Linear",)), max_size=2)]
        case Many():
            found += [st.lists(st.text(max_size=3), max_size=2)]
        case Mapped():
            found += [st.just({})]
        case _:
            found += [st.none()]
    return st.one_of(found + ([st.just("auto")] if section.is_model else []))


@given(configuration=objects | block_at((), is_valid=False))
@SHARED
def test_any_object_is_fixed_once_and_for_all_or_undecided(configuration: dict[str, Any]) -> None:
    before = json.dumps(configuration)
    try:
        fixed = fix(configuration)
    except Undecided:
        return
    assert json.dumps(configuration) == before

    again = fix(fixed.configuration)

    assert again.rewrites == ()
    assert json.dumps(again.configuration) == json.dumps(fixed.configuration)


@given(configuration=block_at((), is_valid=False))
@SHARED
def test_what_is_fixed_deepspeed_takes(configuration: dict[str, Any], deepspeed: Any) -> None:
    assume("auto" not in json.dumps(configuration))
    try:
        fixed = fix(configuration, world_size=2).configuration
    except Undecided:
        return
    for path, section in SECTIONS.items():
        if section.is_open:
            fixed.pop(path[-1], None)  # nothing here looks into them
    if isinstance(aio := fixed.get("aio"), dict):
        aio.pop("use_gds", None)  # refused where there is no GPU

    assert deepspeed.refusal(fixed, world_size=2) is None


@given(configuration=block_at((), is_valid=True), strange=strangers, groups=st.integers(1, 2))
@SHARED
def test_what_deepspeed_takes_stays_as_it_is(
    configuration: dict[str, Any], strange: dict[str, Any], groups: int, deepspeed: Any
) -> None:
    configuration |= strange
    configuration |= {"train_micro_batch_size_per_gpu": 2}
    configuration = {key: value for key, value in configuration.items() if key not in {"scheduler", "optimizer"}}
    assume('"legacy_stage1"' not in json.dumps(configuration))  # refused, but not before there is an engine
    # Whole groups of ranks: DeepSpeed would reckon with half a group, too, but nothing runs on one.
    share = configuration.get("sequence_parallel_size")
    ranks = groups * (share if isinstance(share, int) else 1)
    assume(deepspeed.refusal(configuration, world_size=ranks) is None)

    fixed = fix(configuration, world_size=ranks)

    assert fixed.rewrites == ()
    assert fixed.configuration == configuration


@pytest.mark.parametrize("depth", [60, 100_000])
def test_nesting_without_end_is_undecided(depth: int) -> None:
    block: dict[str, Any] = {}
    for _ in range(depth):
        block = {"zero_optimization": block}

    with pytest.raises(Undecided, match="deep"):
        fix(block)
