"""`deepspeed.initialize` that is Stepfast's; all tests of one run are attempts of one job.

Some tests open the files of a checkpoint themselves: each is exported as soon as it is saved. What engines load still
comes out of the job's steps.
"""

import functools
import os
import tempfile
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch.distributed as dist

from stepfast.integrations import deepspeed as ours
from stepfast.integrations.deepspeedtags import tag_in

if "STEPFAST_STORAGE_URI" not in os.environ:  # processes that pytest starts have it from pytest's
    scratch = tempfile.TemporaryDirectory(prefix="stepfast-upstream-")
    os.environ["STEPFAST_STORAGE_URI"] = scratch.name


def initialize(*args: Any, **kwargs: Any) -> Any:
    result = ours.initialize(*args, **kwargs)
    engine = result[0]
    save_checkpoint = engine.save_checkpoint

    @functools.wraps(save_checkpoint)
    def save(save_dir: Any, tag: Any = None, *rest: Any, **options: Any) -> Any:
        saved = save_checkpoint(save_dir, tag, *rest, **options)
        tags: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(tags, str(tag or f"global_step{engine.global_steps}"))
        if len(set(tags)) == 1:  # a tag that some ranks have alone becomes no step
            checkpoints = engine.checkpoint_engine.checkpoints
            checkpoints.flush()
            if dist.get_rank() == 0:
                uri = f"{checkpoints.environment.storage_uri}/{checkpoints.environment.job}"
                ours.export_checkpoint(uri, save_dir, tag_in(save_dir, tags[0]), force=True)
            dist.barrier()
        return saved

    engine.save_checkpoint = save
    return result


ours.deepspeed = SimpleNamespace(initialize=deepspeed.initialize)
deepspeed.initialize = initialize
