"""A model as the list of layers that stages are made of, cut only where one tensor alone passes.

Three ways lead to it: an `nn.Sequential`, those within it opened too; any other model that torch.fx can trace; a list
of modules. A place in a traced graph is a cut if exactly one value lives across it, so no cut lies within a skip
connection, nor between two uses of one parameter: what is tied stays together. Parameters keep their names.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn


class CannotSplit(ValueError):
    """The model cannot be cut into layers; the message says what to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """A piece of a model, which takes what the piece before it gives."""

    module: nn.Module
    names: Mapping[str, str]  # of its parameters and buffers: in `module` → in the model

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.module.parameters())


def split(model: nn.Module | Sequence[nn.Module]) -> list[Layer]:
    """The layers of a model, each with parameters of its own, in the order in which they run.

    The names are the model's; those of a list are `0.weight` and so on, as an `nn.ModuleList` would call them.

    Raises:
        CannotSplit: torch.fx cannot trace it; it takes several inputs; it does other things in training than in
            evaluation beyond what its modules do; modules of a list share parameters; there is no parameter at all.
    """
    if isinstance(model, nn.Sequential):
        pieces = list(_opened(model))
    elif isinstance(model, nn.Module):
        pieces = list(_segments(model))
    else:
        pieces = [_Piece(module, f"{index}.") for index, module in enumerate(model)]
    layers = _joined(pieces)
    _check_shared(layers)
    return layers


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    module: nn.Module
    prefix: str  # of its parameters' names in the model

    @property
    def has_parameters(self) -> bool:
        return next(self.module.parameters(), None) is not None


def _opened(model: nn.Sequential, prefix: str = "") -> Iterator[_Piece]:
    for name, module in model.named_children():
        if isinstance(module, nn.Sequential):
            yield from _opened(module, f"{prefix}{name}.")
        else:
            yield _Piece(module, f"{prefix}{name}.")


def _joined(pieces: Iterable[_Piece]) -> list[Layer]:
    """Pieces without parameters join what is before them; where nothing is, what comes next."""
    groups: list[list[_Piece]] = []
    for piece in pieces:
        if groups and not (piece.has_parameters and any(former.has_parameters for former in groups[-1])):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    if not any(piece.has_parameters for group in groups for piece in group):
        raise CannotSplit("the model has no parameters to train")
    return list(map(_layer, groups))


def _layer(pieces: Sequence[_Piece]) -> Layer:
    if len(pieces) == 1:
        return Layer(module=pieces[0].module, names=_names(pieces[0]))
    names = {f"{index}.{own}": name for index, piece in enumerate(pieces) for own, name in _names(piece).items()}
    return Layer(module=nn.Sequential(*(piece.module for piece in pieces)), names=names)


def _names(piece: _Piece) -> dict[str, str]:
    own = [name for name, _ in (*piece.module.named_parameters(), *piece.module.named_buffers())]
    return {name: f"{piece.prefix}{name}" for name in own}


def _check_shared(layers: Sequence[Layer]) -> None:
    owner: dict[int, str] = {}
    for layer in layers:
        for own, parameter in layer.module.named_parameters():
            first = owner.setdefault(id(parameter), layer.names[own])
            if first != layer.names[own]:
                raise CannotSplit(f"{first} and {layer.names[own]} are one parameter: put their modules into one layer")


# ---- a model that torch.fx traces


def _segments(model: nn.Module) -> Iterator[_Piece]:
    graph = _traced(model)
    body = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    first = next(node for node in graph.nodes if node.op == "placeholder")
    cuts = _cuts(model, graph, body)
    begin, given = 0, first
    for end in [*cuts, len(body)]:
        nodes = body[begin:end]
        last = nodes[-1] if end < len(body) else None
        yield _Piece(_module(model, graph, nodes, given, last), "")
        begin, given = end, nodes[-1]


def _traced(model: nn.Module) -> fx.Graph:
    modes = {name: module.training for name, module in model.named_modules()}
    try:
        graphs = [fx.Tracer().trace(model.train(is_training)) for is_training in (True, False)]
    except Exception as error:  # torch.fx raises whatever the model's own code raises when it meets a Proxy
        raise CannotSplit(
            f"torch.fx cannot trace {type(model).__name__} ({type(error).__name__}: {error}): give the list of its "
            "layers instead, each a module that takes what the one before it gives"
        ) from error
    finally:
        for name, module in model.named_modules():
            module.training = modes[name]
    if str(graphs[0]) != str(graphs[1]):
        raise CannotSplit(
            f"{type(model).__name__} does other things in training than in evaluation than its modules do (such as "
            "F.dropout(x, training=self.training), for which there is nn.Dropout)"
        )
    inputs = [node.name for node in graphs[0].nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise CannotSplit(f"{type(model).__name__} takes {len(inputs)} inputs ({', '.join(inputs)}): it must take one")
    return graphs[0]


def _cuts(model: nn.Module, graph: fx.Graph, body: Sequence[fx.Node]) -> list[int]:
    """Before which nodes of the body a layer may begin: one value lives there, and it is what the node before gives."""
    place = {node: index for index, node in enumerate(body)}
    output = next(node for node in graph.nodes if node.op == "output")
    spans: list[tuple[int, int]] = []  # from the node that makes a value to the last that takes it
    uses: dict[int, list[int]] = {}  # of the model's parameters and buffers, by identity
    single = set()
    for node in graph.nodes:
        takers = [place.get(user, len(body)) for user in node.users]
        if node.op == "get_attr":
            uses.setdefault(id(operator.attrgetter(node.target)(model)), []).extend(takers)
        elif node is not output and takers:
            spans.append((place.get(node, -1), max(takers)))
            if not any(user.target in (operator.getitem, getattr) for user in node.users):
                single.add(place.get(node, -1))
        if node.op == "call_module":
            module = model.get_submodule(node.target)
            for tensor in (*module.parameters(), *module.buffers()):
                uses.setdefault(id(tensor), []).append(place[node])
    tied = [(min(places), max(places)) for places in uses.values() if places]
    cuts = []
    for index in range(1, len(body)):
        living = [begin for begin, end in spans if begin < index <= end]
        is_apart = all(not begin < index <= end for begin, end in tied)
        if living == [index - 1] and index - 1 in single and is_apart:
            cuts.append(index)
    return cuts


def _module(
    model: nn.Module, graph: fx.Graph, nodes: Sequence[fx.Node], given: fx.Node, last: fx.Node | None
) -> fx.GraphModule:
    """These nodes as a module of their own, from the value `given` to the value of `last`; None: to the model's."""
    own = fx.Graph()
    copies = {given: own.placeholder(given.name)}

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:  # what the model holds is fetched where it is used
            copies[node] = own.node_copy(node, copy_of)
        return copies[node]

    for node in nodes:
        copy_of(node)
    output = next(node for node in graph.nodes if node.op == "output")
    own.output(copies[last] if last is not None else fx.map_arg(output.args[0], copy_of))
    return fx.GraphModule(model, own, class_name=type(model).__name__)
