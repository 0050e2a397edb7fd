"""NVIDIA Resiliency Extension's asynchronous writer, its pure Python part alone: its wheel is another Python's."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from benchmarks.peers.base import Peer, Tier
from benchmarks.peers.processgroup import join_alone
from benchmarks.workload import State


class NvrxShared(Peer):
    """Stages into shared memory that a persistent worker writes; plan and structure are kept between saves."""

    title = "NVRx, persistent worker, shared memory"
    installed = True

    def set_up(self, state: State) -> None:
        warnings.filterwarnings("ignore")
        _stand_in_for_cuda()
        join_alone()
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue  # type: ignore[import-not-found]
        from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import init_checkpoint_metadata_cache  # type: ignore[import-not-found]

        init_checkpoint_metadata_cache()
        self._calls = AsyncCallsQueue(persistent=True, cpu_shm_mode=True)
        self._state = state
        self._written = 0

    def save(self, step: int) -> bool:
        from nvidia_resiliency_ext.checkpointing.async_ckpt import filesystem_async, state_dict_saver  # type: ignore[import-not-found]
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        self.path(step).mkdir(parents=True)
        writer = filesystem_async.FileSystemWriterAsync(
            str(self.path(step)), thread_count=1, use_cached_data_structure=True, use_cpu_shm_for_gpu_tensors=True
        )
        planned = state_dict_saver.save_state_dict_async_plan(
            self._state, writer, None, 0, planner=DefaultSavePlanner(), enable_cache=True
        )
        function, preload, arguments = writer.get_save_function_and_args()

        def finish() -> None:
            state_dict_saver.save_state_dict_async_finalize(*planned)
            self._written = step

        request: Any = AsyncRequest(function, arguments, [finish], async_fn_kwargs={}, preload_fn=preload)
        self._calls.schedule_async_request(request)
        return True

    def is_persisted(self, step: int) -> bool:
        if self._written < step:
            self._calls.maybe_finalize_async_calls(blocking=False, no_dist=False)
        return self._written >= step

    def close(self) -> None:
        self._calls.maybe_finalize_async_calls(blocking=True, no_dist=False)
        self._calls.close()

    def prepare_restore(self, tier: Tier) -> None:
        warnings.filterwarnings("ignore")

    def restore(self, tier: Tier, step: int, state: State) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        load(state, checkpoint_id=self.path(step), no_dist=True)


def _stand_in_for_cuda() -> None:
    """NVRx asks for the device and waits for it whether or not there is one."""
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]  # a name that .to() takes
        torch.cuda.synchronize = lambda *_, **__: None  # nothing runs there
