"""What `stepfast checkpoints export` writes of a step: one torch file, DeepSpeed's folder, or the files as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from stepfast import catalog
from stepfast.cli.wholefile import write_whole
from stepfast.errors import CheckpointUnsafe, SpecError
from stepfast.storage import Store
from stepfast.storage.target import placed_file, placed_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What the command line says of it."""

    rank: int
    weights_only: bool
    force: bool


def export_file(store: Store, step: int, to: Path, export: Export) -> None:
    """One rank's state, for `torch.load`."""
    _check_installed("a torch file", torch="stepfast[torch]")
    from stepfast.torch.export import export_torch

    with placed_file(to, force=export.force) as file, _unsafe_explained():
        export_torch(store, step, export.rank, file, weights_only=export.weights_only)


def export_deepspeed(store: Store, step: int, to: Path, export: Export) -> None:
    """The tag's folder in the folder `to`, as DeepSpeed's `save_checkpoint(to)` leaves it."""
    _check_installed("a checkpoint of DeepSpeed's", torch="stepfast[torch]", deepspeed="deepspeed")
    from stepfast.integrations.deepspeedexport import export_step

    with _unsafe_explained():
        export_step(store, step, to, force=export.force, weights_only=export.weights_only)


def export_folder(store: Store, step: int, to: Path, export: Export) -> None:
    """Every file of the step, each chunk checked before it is written; whole, where the step refers to older ones."""
    with placed_folder(to, force=export.force) as folder:
        manifest, parts = catalog.open_step(store, "", step)
        for file in (file for part in parts for file in part.files):
            with (folder / Path(file.path).name).open("wb") as out:
                if manifest.refers:
                    write_whole(store, manifest, file, out)
                    continue
                for chunk in catalog.read_file(store, "", file, step):
                    out.write(chunk)


def _check_installed(what: str, **packages: str) -> None:
    for package, distribution in packages.items():
        if find_spec(package) is None:
            raise SpecError("TO", f"{what} needs {package}: pip install {distribution}, or name a folder")


@contextmanager
def _unsafe_explained() -> Iterator[None]:
    try:
        yield
    except CheckpointUnsafe as error:
        raise CheckpointUnsafe(f"{error}; here: --no-weights-only, or export to a folder") from error
