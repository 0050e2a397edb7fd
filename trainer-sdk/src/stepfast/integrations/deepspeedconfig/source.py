"""Where a configuration comes from: the text of a JSON file, or of a Python file that holds it as literals.

Of a Python file nothing is run: calls and dictionaries are found in its syntax, and only literals are read. A key that
is there twice is kept in view until here, and then reported: DeepSpeed refuses such a file.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Final, NoReturn, TypeAlias

from stepfast.errors import SpecError
from stepfast.integrations.deepspeedconfig.draft import Block, Json, Path, Rewrite, dotted

# A call of this name is a configuration wherever it stands: it was made up, and means nothing else.
_CALL: Final = "Hparams"
# Names that a dictionary is taken for a configuration by.
_NAMES: Final = frozenset({
    "config", "config_dict", "config_params", "deepspeed_cfg", "deepspeed_config", "ds_cfg", "ds_config",
    "ds_config_dict", "ds_params", "hparams",
})  # fmt: skip
_ENGINES: Final = frozenset({"initialize", "DeepSpeedEngine"})
_CHANGES: Final = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete, ast.Call)
_CHANGING: Final = frozenset({"update", "setdefault", "pop", "popitem", "clear"})
# Up to the first character that is no comment of hjson; possessive, for a file may be long and hostile.
_AHEAD: Final = re.compile(r"(?:\s++|//[^\n]*+|#[^\n]*+|/\*(?s:.)*?\*/)*+")
_COMMENTS: Final = "the file has comments or the like, which DeepSpeed reads too; what is written here is plain JSON"
_TWICE: Final = "the key is there twice, which DeepSpeed refuses; the last one counted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A configuration as it was written, what was left out in reading (keys that are there twice), and what to know."""

    configuration: Block
    rewrites: tuple[Rewrite, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Pairs:
    """A block as it is written: keys may come twice."""

    pairs: list[tuple[str, _Raw]]


_Raw: TypeAlias = "_Pairs | list[_Raw] | bool | int | float | str | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    name: str
    line: int
    node: ast.Dict | ast.Call
    is_variable: bool = False


def is_json(text: str) -> bool:
    """Whether a text without a telling name is JSON, with comments perhaps, rather than Python."""
    begin = text.lstrip()
    ahead = _AHEAD.match(text)
    return begin.startswith(("//", "/*")) or text[ahead.end() if ahead else 0 :].startswith(("{", "["))


def read_json(text: str) -> Source:
    """Reads JSON; where the package hjson is installed, which comes with DeepSpeed, also what that reads. Raises
    SpecError.
    """
    if not text.strip():
        raise SpecError("FILE", "is empty")
    notes: tuple[str, ...] = ()
    try:
        raw = json.loads(text, object_pairs_hook=_Pairs, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise SpecError("FILE", "is nested too deep") from error
    except ValueError as error:
        raw, notes = _read_hjson(text, error), (_COMMENTS,)
    if not isinstance(raw, _Pairs):
        raise SpecError("FILE", f"holds {_described(raw)}, where a DeepSpeed configuration is an object: {{…}}")
    return _source(raw, notes)


def read_python(text: str, name: str | None = None) -> Source:
    """Reads the configuration that a Python file holds: the keywords of a call of `Hparams`, or a dictionary under one
    of the usual names, or under `name`. Raises SpecError where there is none, or several, or one that is no literal.
    """
    tree: ast.Module | None = None
    try:
        tree = _parsed(text)
        candidates = list(_in_tree(tree, name))
    except SyntaxError as error:
        # Copied from a page that lost the indentation, a file is no Python, but the call in it may still be whole.
        candidates = list(_in_text(text))
        if not candidates:
            raise SpecError("FILE", f"line {error.lineno}: {error.msg}, and holds no call of {_CALL}") from error
    except (RecursionError, ValueError) as error:
        raise SpecError("FILE", f"is no Python that can be read: {error}") from error
    chosen = _chosen(candidates, name)
    raw = _pairs(chosen.node, ())
    return _source(raw, tuple(_changed(tree, chosen)) if tree is not None and chosen.is_variable else ())


def _parsed(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's opinion of the file's escapes is of no use here
        return ast.parse(text)


def _chosen(candidates: Sequence[_Candidate], name: str | None) -> _Candidate:
    names = [candidate.name for candidate in candidates]
    labels = {
        f"{candidate.name}:{candidate.line}" if names.count(candidate.name) > 1 else candidate.name: candidate
        for candidate in candidates
    }
    if name is not None:
        if name in labels:
            return labels[name]
        same = [label for label in labels if label.startswith(f"{name}:")] or list(labels)
        raise SpecError("--name", f"{name} names none: there is {', '.join(same) or 'no configuration at all'}")
    if not labels:
        usual = ", ".join(sorted(_NAMES))
        raise SpecError("FILE", f"holds no call of {_CALL}, and no dictionary named {usual}: name one with --name")
    if len(labels) > 1:
        raise SpecError("--name", f"is needed, for there are several, by name and line: {', '.join(labels)}")
    return next(iter(labels.values()))


def _in_tree(tree: ast.AST, name: str | None) -> Iterator[_Candidate]:
    """In the order of the file. A call that is assigned is found under the name that it is assigned to."""
    seen: set[int] = set()
    wanted = {name.partition(":")[0]} if name else set()
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign | ast.Call)]
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        for target, value in _assigned(node):
            is_meant = target in _NAMES | wanted or _is_call(value, _CALL)
            if isinstance(value, ast.Dict | ast.Call) and id(value) not in seen and is_meant and _is_block(value):
                seen.add(id(value))
                is_variable = not isinstance(node, ast.Call)
                yield _Candidate(name=target, line=value.lineno, node=value, is_variable=is_variable)


def _assigned(node: ast.Assign | ast.AnnAssign | ast.Call) -> Iterator[tuple[str, ast.expr | None]]:
    """What a statement or a call gives a name to: a variable's, or a keyword's of the calls that make an engine."""
    if isinstance(node, ast.Call):
        if _is_call(node, *_ENGINES):
            yield from ((keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg)
        if _is_call(node, _CALL):
            yield _CALL, node
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Name | ast.Attribute):
            yield target.id if isinstance(target, ast.Name) else target.attr, node.value


def _is_block(value: ast.Dict | ast.Call) -> bool:
    return isinstance(value, ast.Dict) or _is_call(value, _CALL, "dict")


def _is_call(node: ast.expr | None, *names: str) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    return (isinstance(called, ast.Name) and called.id in names) or (
        isinstance(called, ast.Attribute) and called.attr in names
    )


def _in_text(text: str) -> Iterator[_Candidate]:
    """Calls in a text that is no Python as a whole, each cut out at its closing bracket."""
    for found in re.finditer(rf"(?:\b(\w+)\s*=\s*)?\b{_CALL}\s*\(", text):
        begin = text.index(_CALL, found.start())
        call = _up_to_bracket(text[begin:])
        try:
            statement = _parsed(call).body[0] if call else None
        except (SyntaxError, ValueError, RecursionError):
            continue
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            line = text.count("\n", 0, begin)
            yield _Candidate(name=found[1] or _CALL, line=line + 1, node=ast.increment_lineno(statement.value, line))


def _up_to_bracket(text: str) -> str:
    """Up to the bracket that closes the first one; empty when none does."""
    lines, depth = text.splitlines(keepends=True), 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.OP:
                depth += (token.string in "([{") - (token.string in ")]}")
                if depth == 0:
                    row, column = token.end
                    return "".join(lines[: row - 1]) + lines[row - 1][:column]
    except (tokenize.TokenError, SyntaxError):
        pass
    return ""


def _raw(node: ast.expr, path: Path) -> _Raw:
    """What a literal says."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if not isinstance(
            value, bool
        ):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_raw(item, (*path, str(index))) for index, item in enumerate(items)]
        case ast.Dict():
            return _pairs(node, path)
        case ast.Call(args=[]) if _is_call(node, "dict"):
            return _pairs(node, path)
    return _refuse(node, path)


def _pairs(node: ast.Dict | ast.Call, path: Path) -> _Pairs:
    if isinstance(node, ast.Call):
        return _keywords(node, path)
    pairs = ((_key(key, path, node), value) for key, value in zip(node.keys, node.values, strict=True))
    return _Pairs([(key, _raw(value, (*path, key))) for key, value in pairs])


def _keywords(node: ast.Call, path: Path) -> _Pairs:
    if len(node.args) == 1 and not node.keywords:
        return _pairs(node.args[0], path) if isinstance(node.args[0], ast.Dict) else _refuse(node.args[0], path)
    if node.args:
        return _refuse(node.args[0], path)
    pairs: list[tuple[str, _Raw]] = []
    for keyword in node.keywords:
        if keyword.arg is None:
            return _refuse(keyword.value, path)
        pairs.append((keyword.arg, _raw(keyword.value, (*path, keyword.arg))))
    return _Pairs(pairs)


def _key(key: ast.expr | None, path: Path, node: ast.Dict) -> str:
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        return key.value
    return _refuse(node if key is None else key, path)


def _changed(tree: ast.Module, chosen: _Candidate) -> Iterator[str]:
    """Statements behind the literal that change what it says: nothing is run here, so they do not count."""
    end = chosen.node.end_lineno or chosen.line
    found = [node for node in ast.walk(tree) if isinstance(node, _CHANGES) and node.lineno >= end]
    for node in sorted(found, key=lambda node: (node.lineno, node.col_offset)):
        if any(_is_of(part, chosen.name) for part in _parts_changed(node)):
            yield f"line {node.lineno}: {_short(node)} is not taken along (nothing is run): put it in the literal"


def _parts_changed(node: ast.AST) -> Sequence[ast.expr]:
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            return [target.value for target in targets if isinstance(target, ast.Subscript)]
        case ast.AugAssign(target=ast.Subscript(value=part)) | ast.AugAssign(target=part):
            return [part]
        case ast.AnnAssign(target=ast.Subscript(value=part)):
            return [part]
        case ast.Call(func=ast.Attribute(value=part, attr=method)) if method in _CHANGING:
            return [part]
    return []


def _is_of(node: ast.expr, name: str) -> bool:
    """Whether this is the name, or a block in what it holds."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)


def _refuse(node: ast.expr, path: Path) -> NoReturn:
    raise SpecError(
        _printable(dotted(path)),
        f"line {node.lineno}: {_short(node)} is no literal, and nothing is run here: write its value",
    )


def _short(node: ast.AST) -> str:
    code = _printable(ast.unparse(node))
    return code if len(code) <= 40 else f"{code[:39]}…"


def _printable(text: str) -> str:
    """Half a pair of surrogates has no bytes: as an escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _source(pairs: _Pairs, notes: tuple[str, ...] = ()) -> Source:
    rewrites: list[Rewrite] = []
    return Source(configuration=_block(pairs, (), rewrites), rewrites=tuple(rewrites), notes=notes)


def _block(pairs: _Pairs, path: Path, rewrites: list[Rewrite]) -> Block:
    block: Block = {}
    for key, raw in pairs.pairs:
        value = _value(raw, (*path, key), rewrites)
        if key in block:
            where = dotted((*path, key))
            rewrites.append(Rewrite(path=where, was=block[key], to=where, now=value, why=_TWICE))
        block[key] = value
    return block


def _value(raw: _Raw, path: Path, rewrites: list[Rewrite]) -> Json:
    if isinstance(raw, _Pairs):
        return _block(raw, path, rewrites)
    if isinstance(raw, list):
        return [_value(item, (*path, str(index)), rewrites) for index, item in enumerate(raw)]
    return raw


def _read_hjson(text: str, why: ValueError) -> object:
    """JSON with comments, as DeepSpeed reads it."""
    if find_spec("hjson") is None:
        raise SpecError(
            "FILE", f"is no JSON: {why}; comments and the like, as DeepSpeed reads them, need: pip install hjson"
        ) from why
    loads: Callable[..., object] = import_module("hjson").loads
    try:
        return loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise SpecError("FILE", f"is no JSON: {why}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no value of JSON")


def _described(raw: object) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(raw), "null")
