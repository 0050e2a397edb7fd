"""The functions that options of `stepfast anatomy` name: found, and watched while they run.

Owned here: what a user's own function raises is told as that, with the option that named it.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from stepfast.errors import AnatomyError, AnatomyOptionError, SpecError, StepfastError

if TYPE_CHECKING:
    from torch import nn

_P = ParamSpec("_P")
_T = TypeVar("_T")
_FRAMES = 3  # of a traceback: as many as say where it was
_OPTIONS = {
    r"loss_fn \(--loss\)": "--loss",
    r"\b(model|batch|loss|optimizer)_fn\b": r"--\1",
    r"\bbatch_size\b": "--batch-size",
    r"^(precision|attention|parallel):": r"--\1:",
}
_STEPFAST = Path(__file__).parents[1]


class Watch:
    """Knows which option's function raised what."""

    def __init__(self) -> None:
        self._raised: tuple[BaseException, str] | None = None

    def over(self, function: Callable[_P, _T], option: str) -> Callable[_P, _T]:
        """The function, to be called in its place. What it raises comes out as it is: torch's errors are translated
        further out, by their kinds.
        """

        @wraps(function, updated=())
        def watched(*arguments: _P.args, **named: _P.kwargs) -> _T:
            try:
                return function(*arguments, **named)
            except Exception as error:
                if self._raised is None or self._raised[0] is not error:  # else a function within this one raised it
                    self._raised = (error, option)
                raise

        return watched

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Raises AnatomyError in place of what a watched function raised, and names options in place of parameters."""
        try:
            with _said_once():
                yield
        except AnatomyError as error:
            raise type(error)(_in_options(str(error))) from error
        except StepfastError:
            raise
        except Exception as error:
            if self._raised is None or self._raised[0] is not error:
                raise
            message = "".join(traceback.format_exception_only(error)).strip()
            raise AnatomyError(f"{self._raised[1]} raised {message}\n{_where(error)}") from error


def _in_options(message: str) -> str:
    """The message, with what the command line calls the parameters of `predict` and `measure`."""
    for parameter, option in _OPTIONS.items():
        message = re.sub(parameter, option, message)
    return message


@contextmanager
def _said_once() -> Iterator[None]:
    """Without the traceback that torch logs of an operator's error before it raises the same."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _where(error: BaseException) -> str:
    """The last lines of the traceback that are the user's, if there are any."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_users(frame.filename)]
    return "".join(traceback.format_list((own or frames)[-_FRAMES:])).rstrip()


def _is_users(filename: str) -> bool:
    """Whether that is neither an installed package nor Stepfast, nor what imports modules."""
    file = Path(filename)
    return not (filename.startswith("<frozen ") or "site-packages" in file.parts or file.is_relative_to(_STEPFAST))


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """What the options name, as `predict` and `measure` take it, to be called within `watch.telling()`."""

    title: str
    model: Callable[[], nn.Module]
    optimizer: Callable[..., Any]
    batch: Callable[..., Any]
    loss: Callable[..., Any]
    watch: Watch


def functions_of(
    model: str,
    batch: str | None,
    loss: str | None,
    optimizer: str,
    *,
    task: str | None,
    sequence_length: int | None,
    precision: str,
    checkpointing: bool,
) -> Functions:
    """Imports them. Raises AnatomyError."""
    try:
        import torch

        from stepfast.torch.anatomy.modelsource import imported, model_source, optimizer_source
        from stepfast.torch.anatomy.training import model_loss
    except ImportError as error:
        raise AnatomyError(f"it needs torch ({error}): pip install stepfast[torch,run]") from error
    if batch is not None and sequence_length is not None:
        raise SpecError("--sequence-length", "is of a configuration's own batches: --batch makes others")
    watch = Watch()
    # Without --batch or --loss it is the model that says what they are.
    of_model, of_optimizer = f"--model {model}", f"--optimizer {optimizer}"
    of_batch = of_model if batch is None else f"--batch {batch}"
    of_loss = of_model if loss is None else f"--loss {loss}"
    with watch.telling():
        source = watch.over(model_source, of_model)(
            model,
            task=task,
            sequence_length=sequence_length,
            dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        )
        make_batch = source.batch if batch is None else watch.over(imported, of_batch)(batch, "--batch")
        if make_batch is None:
            raise AnatomyOptionError(f"--model {model} is a function: name one that makes a batch, too, with --batch")
        take_loss = model_loss if loss is None else watch.over(imported, of_loss)(loss, "--loss")
        make_optimizer = watch.over(optimizer_source, of_optimizer)(optimizer)
    make_model = watch.over(source.model, of_model)
    return Functions(
        title=source.name,
        model=_recomputed(make_model) if checkpointing else make_model,
        optimizer=watch.over(make_optimizer, of_optimizer),
        batch=watch.over(make_batch, of_batch),
        loss=watch.over(take_loss, of_loss),
        watch=watch,
    )


def _recomputed(model_fn: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Makes the model, and sees that it knows what is recomputed of it. Raises AnatomyOptionError."""

    @wraps(model_fn, updated=())
    def make() -> nn.Module:
        model = model_fn()
        if not hasattr(model, "gradient_checkpointing_enable"):
            reason = "only models of Transformers know what is recomputed of them"
        elif not getattr(model, "supports_gradient_checkpointing", True):
            reason = "Transformers cannot recompute its activations"
        else:
            return model
        raise AnatomyOptionError(f"--checkpointing: {type(model).__name__}: {reason}")

    return make
