"""torchrun's options that belong to Stepfast: refused in a manifest's command, with the field that says it instead.

Sizes and rendezvous reach torchrun in its environment (`PET_*`), over which its own command line wins: a gang would be
of another size than its agent was told, and its ranks refused. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stepfast.errors import SpecError

_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch", "stepfast.launcher"})
_PYTHON_OPTIONS_WITH_VALUE = frozenset({"-W", "-X"})
_RENDEZVOUS = "leave it out: Stepfast sets the rendezvous of each attempt"
_OURS = {
    "nnodes": "set spec.trainer.numNodes",
    "nproc-per-node": "set spec.trainer.numProcPerNode",
    "max-restarts": "set spec.failurePolicy.maxRestarts",
    "standalone": _RENDEZVOUS,
    "node-rank": _RENDEZVOUS,
    "master-addr": _RENDEZVOUS,
    "master-port": _RENDEZVOUS,
    "local-addr": _RENDEZVOUS,
    "rdzv-backend": _RENDEZVOUS,
    "rdzv-conf": _RENDEZVOUS,
    "rdzv-endpoint": _RENDEZVOUS,
    "rdzv-id": _RENDEZVOUS,
}
# Of the options that are the user's own those without a value: the word behind one of them is no value of it.
_FLAGS = frozenset({"module", "no-python", "run-path", "virtual-local-rank", "help"})
_SHORT_FLAGS = frozenset({"-m", "-h"})
_ABBREVIATION_CHARACTERS = 2  # a shorter one is ambiguous to torchrun, too


def check_command(command: Sequence[str], args: Sequence[str]) -> None:
    """Raises SpecError naming the option and the field to set in its place."""
    words = [*command, *args]
    for index in _options(words, _first_option(words)):
        name = words[index].partition("=")[0]
        refused = _refused(name)
        if refused is not None:
            field = "spec.trainer.command" if index < len(command) else "spec.trainer.args"
            raise SpecError(field, f"{name} is not torchrun's to say here; {_OURS[refused]}")


def check_environment(names: Sequence[str]) -> None:
    """The same in the variables that torchrun reads. Raises SpecError."""
    variables: Mapping[str, str] = {f"PET_{name.upper().replace('-', '_')}": name for name in _OURS}
    for name in names:
        if name in variables:
            raise SpecError("spec.trainer.env", f"{name} is Stepfast's own; {_OURS[variables[name]]}")


def script_of(command: Sequence[str], args: Sequence[str]) -> str | None:
    """The Python script that the gang runs; None when it runs none, or nobody can tell. Pure."""
    words = [*command, *args]
    program = words[0].rpartition("/")[2] if words else ""
    begin = _first_option(words)
    if program != "torchrun" and begin == len(words):
        return _python_script(words) if program.startswith("python") else None
    options = list(_options(words, begin))
    if any(_runs_no_script(words[index]) for index in options):
        return None
    index = begin
    if options:
        last = options[-1]
        index = last + (1 if _is_alone(words[last]) else 2)
    if index < len(words) and words[index] == "--":
        index += 1
    return words[index] if index < len(words) else None


def _python_script(words: Sequence[str]) -> str | None:
    index = 1
    while index < len(words) and words[index].startswith("-"):
        if words[index] in ("-m", "-c", "-"):
            return None
        index += 2 if words[index] in _PYTHON_OPTIONS_WITH_VALUE else 1
    return words[index] if index < len(words) else None


def _runs_no_script(option: str) -> bool:
    """Whether torchrun then takes the word behind its options for something else than a script."""
    return option in _SHORT_FLAGS or _is_flag(option.lstrip("-").replace("_", "-"))


def _first_option(words: Sequence[str]) -> int:
    """Where torchrun's words begin; behind all words when the program is another."""
    program = words[0].rpartition("/")[2] if words else ""
    if program == "torchrun":
        return 1
    if program.startswith("python"):
        for index, word in enumerate(words[1:], 1):
            if word == "-m":
                return index + 2 if index + 1 < len(words) and words[index + 1] in _MODULES else len(words)
            if not word.startswith("-") and words[index - 1] not in _PYTHON_OPTIONS_WITH_VALUE:
                break
    return len(words)


def _options(words: Sequence[str], begin: int) -> Iterator[int]:
    """The indices of torchrun's own options: all up to the script, whose words are its own."""
    index = begin
    while index < len(words) and words[index].startswith("-") and words[index] != "--":
        yield index
        index += 1 if _is_alone(words[index]) else 2


def _is_alone(word: str) -> bool:
    """Whether the word behind this option is no value of it."""
    name = word.lstrip("-").replace("_", "-")
    is_joined = not word.startswith("--") and len(word) > 2  # as in -r3
    return "=" in word or word in _SHORT_FLAGS or is_joined or (word.startswith("--") and _is_flag(name))


def _is_flag(name: str) -> bool:
    return len(name) >= _ABBREVIATION_CHARACTERS and any(flag.startswith(name) for flag in _FLAGS)


def _refused(option: str) -> str | None:
    """The option of ours that is meant: torchrun takes either spelling, and abbreviations."""
    if not option.startswith("--"):
        return None
    name = option[2:].replace("_", "-")
    if name in _OURS or len(name) < _ABBREVIATION_CHARACTERS:
        return name if name in _OURS else None
    return next((ours for ours in _OURS if ours.startswith(name)), None)
