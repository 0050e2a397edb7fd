"""Whether each value is one that its key takes, and what it says where it is not."""

from __future__ import annotations

from stepfast.integrations.deepspeedconfig.draft import ABSENT, Draft, Path
from stepfast.integrations.deepspeedconfig.keys import SECTIONS
from stepfast.integrations.deepspeedconfig.kinds import Kind

# Transformers, Accelerate and Lightning fill it in; the release's models take it for not said.
AUTO = "auto"


def settle_blocks(draft: Draft) -> None:
    """Sections that are no blocks: a switch becomes one, null goes, and anything else is a question."""
    for path, section in SECTIONS.items():
        value = draft.get(path)
        if not path or value is ABSENT or isinstance(value, dict):
            continue
        is_in_model = path[:-1] in SECTIONS and SECTIONS[path[:-1]].is_model
        if (value is None and section.is_nullable) or (value == AUTO and is_in_model):
            continue
        if isinstance(value, bool) and "enabled" in section.keys:
            draft.put(path, {"enabled": value}, "a block has the switch")
        elif value is None:
            draft.drop(path, "null is no block; where it is not there the defaults count")
        else:
            draft.refuse(path, "wants a block")


def settle_values(draft: Draft) -> None:
    for path, section in SECTIONS.items():
        block = draft.block(path)
        for name in [name for name in block or () if name in section.keys]:
            settle_value(draft, (*path, name), section.keys[name], is_model=section.is_model)


def settle_value(draft: Draft, path: Path, kind: Kind, *, is_model: bool) -> None:
    value = draft.get(path)
    assert value is not ABSENT, path
    if value == AUTO or (value is None and kind.is_nullable):
        return
    if value is None:
        draft.drop(path, f"null is no value of it, which wants {kind.wanted}; without the key the default counts")
        return
    said = kind.read(value)
    if said is ABSENT:
        draft.refuse(path, f"wants {kind.wanted}")
    elif not kind.is_taken(value, converts=is_model):
        draft.put(path, said, f"wants {kind.wanted}")
    elif isinstance(value, float) and isinstance(said, int) and not isinstance(said, bool):
        draft.tidy(path, said)
