"""A committed tag as the folder that DeepSpeed itself would have written, for whatever reads its files.

No training process, agent or GPU takes part: it is read out of the storage, one file at a time.
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

from stepfast import catalog
from stepfast.errors import CheckpointNotFound, SpecError
from stepfast.integrations.deepspeedtags import tag_of
from stepfast.integrations.missing import missing
from stepfast.storage import Store, open_store
from stepfast.storage.faults import storage_error
from stepfast.storage.localfile import sync_folder, write_temp
from stepfast.storage.target import placed_folder
from stepfast.torch.export import save_file
from stepfast.torch.sources import DirectSource, committed_steps
from stepfast.torch.taggedsteps import TaggedSteps

_OF_STEPFAST = "stepfast."  # what the engine saves beside DeepSpeed's files
_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")


def export_checkpoint(
    storage_uri: str, save_dir: str | os.PathLike[str], tag: str | None = None, *, force: bool = False
) -> str:
    """Writes the newest checkpoint of that tag, or the newest of all, as `save_checkpoint(save_dir, tag)` of a plain
    DeepSpeed would have; returns the tag.

    `storage_uri`: the job's folder, <storage root>/<namespace>/<job>. `tag`: as DeepSpeed was given it, or, where
    several folders have one of that name, as "<folder>//<tag>". `force`: replaces the tag's folder. Its objects are
    unpickled: only for checkpoints of people whom you trust. Raises CheckpointNotFound, CheckpointDamaged, SpecError,
    StorageError.
    """
    with closing(open_store(storage_uri)) as store:
        steps = committed_steps(DirectSource(store, "", run=""))
        chosen = [found for found in steps if tag in {None, found.tag, tag_of(found)}]
        if not chosen:
            what = "step" if tag is None else f"checkpoint {tag!r}"
            raise CheckpointNotFound(f"{storage_uri} holds no committed {what}")
        names = sorted({found.tag for found in chosen})
        if tag is not None and len(names) > 1:
            raise SpecError("tag", f"{tag!r} may be any of {', '.join(names)}: name one of these")
        return export_step(store, chosen[-1].step, Path(save_dir), force=force)


def export_step(store: Store, step: int, save_dir: Path, *, force: bool, weights_only: bool = False) -> str:
    """`export_checkpoint` of that step; `store`: the job's folder. Raises CheckpointUnsafe, too, if `weights_only`."""
    tag = tag_of(catalog.open_step(store, "", step)[0])
    source = DirectSource(store, "", run="")
    with closing(TaggedSteps(source, rank=0, local_world_size=1, weights_only=weights_only)) as steps:
        owners = {name: rank for rank in reversed(steps.ranks(step)) for name in steps.names_of(step, rank)}
        names = sorted(name for name in owners if not name.startswith(_OF_STEPFAST))
        if not any(name.endswith("model_states.pt") for name in names):
            raise CheckpointNotFound(f"step {step} ({tag}) is no checkpoint of DeepSpeed's")
        with placed_folder(save_dir / tag, force=force, suffix=".pt") as folder:
            for name in names:
                save_file(steps.load_from(step, owners[name], [name], {})[name], folder / name)
    try:
        if any(name.endswith("optim_states.pt") for name in names):
            _leave_scripts(save_dir)
        # Last, as DeepSpeed does: what it names is whole.
        os.replace(write_temp(save_dir / "latest", tag.encode()), save_dir / "latest")
        sync_folder(save_dir)
    except OSError as error:
        raise storage_error(error, f"write {save_dir}") from error
    return tag


def _leave_scripts(save_dir: Path) -> None:
    """Where DeepSpeed leaves them: beside the tags."""
    package = find_spec("deepspeed")
    if package is None or package.origin is None:
        raise missing("deepspeed")
    for name in _SCRIPTS:
        script = save_dir / name
        shutil.copyfile(Path(package.origin).parent / "utils" / name, script)
        script.chmod(script.stat().st_mode | stat.S_IEXEC)


__all__ = ["export_checkpoint", "export_step"]
