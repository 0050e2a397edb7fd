"""Reading configurations: JSON, what DeepSpeed takes for JSON, and Python files, of which nothing is run."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from stepfast.errors import SpecError
from stepfast.integrations.deepspeedconfig import source
from stepfast.integrations.deepspeedconfig.source import is_json, read_json, read_python


def test_json_is_read() -> None:
    read = read_json('{"train_batch_size": 8, "zero_optimization": {"stage": 3, "leaf_module": {"names": ["a", {}]}}}')

    assert read.configuration == {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 3, "leaf_module": {"names": ["a", {}]}},
    }
    assert read.rewrites == ()


def test_keys_that_are_there_twice_are_reported_with_both_values() -> None:
    read = read_json('{"fp16": {"enabled": true, "enabled": false}, "x": 1, "x": {"y": 2}, "x": 3}')

    assert read.configuration == {"fp16": {"enabled": False}, "x": 3}
    assert [(rewrite.path, rewrite.was, rewrite.now) for rewrite in read.rewrites] == [
        ("fp16.enabled", True, False),
        ("x", 1, {"y": 2}),
        ("x", {"y": 2}, 3),
    ]


def test_what_deepspeed_takes_for_json_is_read_where_its_reader_is_installed() -> None:
    read = read_json("{\n  # samples\n  train_batch_size: 8,\n  fp16: {enabled: true, enabled: false},\n}")

    assert read.configuration == {"train_batch_size": 8, "fp16": {"enabled": False}}
    assert [rewrite.path for rewrite in read.rewrites] == ["fp16.enabled"]
    assert ["plain JSON" in note for note in read.notes] == [True]


def test_without_that_reader_comments_are_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> ModuleSpec | None:
        return None

    monkeypatch.setattr(source, "find_spec", found)

    with pytest.raises(SpecError, match=r"line 1 column 2.* pip install hjson"):
        read_json("{# samples\n}")


NO_JSON = {
    "nothing": (" ", "is empty"),
    "a list": ("[1]", "holds a list"),
    "a number": ("3", "holds a number"),
    "a text": ('"train_batch_size"', "holds a text"),
    "half of it": ('{"train_batch_size": ', "is no JSON"),
    "a number that is none": ('{"gradient_clipping": NaN}', "NaN is no value of JSON"),
    "nested without end": ('{"a":' * 100_000 + "1" + "}" * 100_000, "too deep"),
    "a number without end": ('{"a": ' + "1" * 5000 + "}", "is no JSON"),
}


@pytest.mark.parametrize(("text", "reason"), NO_JSON.values(), ids=NO_JSON)
def test_what_is_no_configuration_is_refused(text: str, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        read_json(text)


PYTHON = {
    "a call": ("hparams = Hparams(train_batch_size=8, fp16={'enabled': True})", None),
    "a call of a module": ("engine(config=deepspeed.Hparams(train_batch_size=8, fp16=dict(enabled=True)))", None),
    "a dictionary": ("import os\nds_config = {'train_batch_size': 8, 'fp16': {'enabled': True}}", None),
    "dict()": ("ds_config = dict(train_batch_size=8, fp16=dict(enabled=True))", None),
    "with its type": ("config: dict[str, object] = {'train_batch_size': 8, 'fp16': {'enabled': True}}", None),
    "an attribute": ("self.ds_config = {'train_batch_size': 8, 'fp16': {'enabled': True}}", None),
    "a keyword": ("deepspeed.initialize(model=m, config={'train_batch_size': 8, 'fp16': {'enabled': True}})", None),
    "in a function": ("def f():\n    if x:\n        config = {'train_batch_size': 8, 'fp16': {'enabled': True}}", None),
    "under another name": ("a = {}\nsettings = {'train_batch_size': 8, 'fp16': {'enabled': True}}", "settings"),
    "one of two": ("config = {'x': y()}\nds_config = {'train_batch_size': 8, 'fp16': {'enabled': True}}", "ds_config"),
    "by its line": ("config = {}\nconfig = {'train_batch_size': 8, 'fp16': {'enabled': True}}", "config:2"),
    "without indentation": ("class M:\ndef f(self):\nx = Hparams(train_batch_size=8, fp16={'enabled': True})", None),
    "a dictionary in the call": ("Hparams({'train_batch_size': 8, 'fp16': {'enabled': True}})", None),
    "a doubtful escape": ("x = '\\d'\nconfig = {'train_batch_size': 8, 'fp16': {'enabled': True}}", None),
}


@pytest.mark.parametrize(("text", "name"), PYTHON.values(), ids=PYTHON)
def test_configuration_of_a_python_file_is_read(text: str, name: str | None) -> None:
    assert read_python(text, name).configuration == {"train_batch_size": 8, "fp16": {"enabled": True}}


def test_literals_are_read_and_keys_that_are_there_twice_reported() -> None:
    read = read_python("config = {'a': -5e8, 'b': (1, [None, 'x']), 'c': {'d': 1, 'd': 2}}")

    assert read.configuration == {"a": -5e8, "b": [1, [None, "x"]], "c": {"d": 2}}
    assert [(rewrite.path, rewrite.was, rewrite.now) for rewrite in read.rewrites] == [("c.d", 1, 2)]


REFUSED: dict[str, tuple[str, str | None, str]] = {
    "no configuration": ("x = 1", None, "holds no call of Hparams"),
    "several": ("config = {}\n\nds_config = {}", None, "several, by name and line: config, ds_config"),
    "several of one name": ("config = {}\n\nconfig = {}", None, "config:1, config:3"),
    "a name of none": ("config = {}", "cfg", "cfg names none: there is config"),
    "an ambiguous name": ("config = {}\nconfig = {}", "config", "config:1, config:2"),
    "a variable": ("config = {\n'train_batch_size': args.batch}", None, "train_batch_size: line 2: args.batch is no"),
    "a call in it": ("config = {'fp16': {'enabled': f()}}", None, r"fp16.enabled: line 1: f\(\) is no literal"),
    "more keywords": ("Hparams(**rest)", None, "the configuration: line 1: rest is no literal"),
    "a key that is no text": ("config = {1: 2}", None, "1 is no literal"),
    "an unpacked dictionary": ("config = {**a}", None, "is no literal"),
    "a positional argument": ("Hparams(a, b=1)", None, "a is no literal"),
    "a flag behind a minus": ("config = {'a': -True}", None, "a: line 1: -True is no literal"),
    "half a pair of surrogates": ("config = {'\\ud800': f()}", None, r"\\ud800: line 1: f\(\) is no literal"),
    "arithmetic": ("config = {'a': 10**10**10}", None, "a: line 1: 10 \\*\\* 10 \\*\\* 10 is no literal"),
    "bytes": ("config = {'a': b'x'}", None, "is no literal"),
    "no Python": ("class M:\ndef f():", None, "line 2: expected an indented block.* holds no call of Hparams"),
    "a call that does not end": ("def f(:\nHparams(a=1", None, "holds no call"),
    "a null byte": ("config = {}\0", None, "FILE: "),
    "nested without end": ("config = " + "[" * 10_000 + "]" * 10_000, None, "FILE: "),
}


@pytest.mark.parametrize(("text", "name", "reason"), REFUSED.values(), ids=REFUSED)
def test_python_file_without_one_literal_configuration_is_refused(text: str, name: str | None, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        read_python(text, name)


CHANGED = {
    "a key": "ds_config['train_batch_size'] = 32",
    "a key of a block": "ds_config['fp16']['enabled'] = True",
    "in place": "ds_config['train_batch_size'] *= 2",
    "a union": "ds_config |= {'fp16': {}}",
    "update": "ds_config.update(zero_optimization={'stage': 3})",
    "setdefault": "ds_config.setdefault('fp16', {})",
    "a block's update": "ds_config['fp16'].update(enabled=True)",
    "an attribute": "self.ds_config['train_batch_size'] = 32",
    "del": "del ds_config['train_batch_size']",
}


@pytest.mark.parametrize("statement", CHANGED.values(), ids=CHANGED)
def test_what_is_changed_behind_the_literal_is_said_not_to_be_taken_along(statement: str) -> None:
    read = read_python(f"ds_config = {{'train_batch_size': 8}}\nif x:\n    {statement}")

    assert read.configuration == {"train_batch_size": 8}
    assert [note.partition(" is not taken along")[0] for note in read.notes] == [f"line 3: {short(statement)}"]


def short(code: str) -> str:
    return code if len(code) <= 40 else f"{code[:39]}…"


UNCHANGED = {
    "read": "x = ds_config['train_batch_size']; print(ds_config.get('fp16'))",
    "another name": "other['train_batch_size'] = 32; other.update(a=ds_config)",
}


@pytest.mark.parametrize("statement", UNCHANGED.values(), ids=UNCHANGED)
def test_what_does_not_change_the_literal_needs_no_note(statement: str) -> None:
    assert read_python(f"ds_config['a'] = 1\nds_config = {{'train_batch_size': 8}}\n{statement}").notes == ()


SNIFFED = {
    "an object": (' {"a": 1}', True),
    "a list": ("[1]", True),
    "a slashed comment": ('// {\n{"a": 1}', True),
    "a comment of several lines": ('/* x\n * y */\n{"a": 1}', True),
    "a comment as in Python": ('# a\n\n# b\n{"a": 1}', True),
    "a comment without end": ("/* a", True),
    "a comment over Python": ("# {\nconfig = {'a': 1}", False),
    "Python": ("config = {'a': 1}", False),
    "many comments": ("#" * 50_000 + "\n# a" * 50_000, False),
}


@pytest.mark.parametrize(("text", "expected"), SNIFFED.values(), ids=SNIFFED)
def test_a_text_is_json_by_what_follows_its_comments(text: str, expected: bool) -> None:
    assert is_json(text) is expected


def test_nothing_of_the_file_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    read_python(f"open({str(mark)!r}, 'w')\nconfig = {{'a': 1}}")

    assert not mark.exists()
