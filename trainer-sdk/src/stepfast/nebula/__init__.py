"""Azure ML Nebula's public API, served by Stepfast: what scripts import as `nebulaml`, and DeepSpeed as `torch_nebula`.

    import nebulaml as nm
    nm.init(persistent_storage_path="/tmp/test", persistent_time_interval=2)
    checkpoint = nm.Checkpoint("global_step500")
    checkpoint.save("model", model.state_dict())
    latest = nm.get_latest_checkpoint()
    state = latest.load("model")

The names `nebulaml` and `torch_nebula` are there under `stepfast run` and in the cluster, or after
`import stepfast.nebula.aliases`.
"""

from __future__ import annotations

from typing import Any

from stepfast.nebula.api import (
    Checkpoint,
    _shutdown,
    flush_persistence,
    get_checkpoint,
    get_latest_checkpoint,
    get_latest_checkpoint_path,
    init,
    list_checkpoints,
)

_OF_LIGHTNING = {"NebulaCallback", "NebulaCheckpointIO", "NebulaDeepspeedStrategy"}


def __getattr__(name: str) -> Any:
    if name in _OF_LIGHTNING:
        from stepfast.nebula import lightning

        return getattr(lightning, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Checkpoint", "_shutdown", "flush_persistence",
    "get_checkpoint", "get_latest_checkpoint", "get_latest_checkpoint_path", "init", "list_checkpoints",
]  # fmt: skip
