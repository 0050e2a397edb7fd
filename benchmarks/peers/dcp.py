"""torch.distributed.checkpoint: blocking, and its asynchronous ways."""

from __future__ import annotations

import warnings
from concurrent.futures import Future
from typing import Any, ClassVar

from benchmarks.peers.base import Peer, Tier
from benchmarks.peers.processgroup import join_alone
from benchmarks.workload import State
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save


class DcpSave(Peer):
    """Blocking; syncs its files."""

    title = "DCP save"

    def set_up(self, state: State) -> None:
        warnings.filterwarnings("ignore")
        self._state = state

    def save(self, step: int) -> bool:
        save(self._state, storage_writer=FileSystemWriter(self.path(step)), no_dist=True)
        return True

    def prepare_restore(self, tier: Tier) -> None:
        warnings.filterwarnings("ignore")

    def restore(self, tier: Tier, step: int, state: State) -> None:
        load(state, checkpoint_id=self.path(step), no_dist=True)


class DcpAsyncThread(DcpSave):
    """A thread of the training process persists; the stager is kept, so that its buffers are reused."""

    title = "DCP async, thread"
    writer_kind: ClassVar[AsyncCheckpointerType] = AsyncCheckpointerType.THREAD
    shares_memory: ClassVar[bool] = False

    def set_up(self, state: State) -> None:
        super().set_up(state)
        join_alone()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=self.shares_memory,
                use_async_staging=self.overlaps,
                use_non_blocking_copy=False,
            )
        )
        self._uploads: dict[int, Future[Any]] = {}
        self._staging: Future[Any] | None = None

    def save(self, step: int) -> bool:
        # The stager has one set of buffers: whoever saves again before they are written gets a torn checkpoint.
        for upload in self._uploads.values():
            upload.result()
        response = async_save(
            self._state,
            storage_writer=FileSystemWriter(self.path(step)),
            async_checkpointer_type=self.writer_kind,
            async_stager=self._stager,
        )
        if isinstance(response, Future):
            self._uploads[step] = response
        else:
            self._uploads[step], self._staging = response.upload_completion, response.staging_completion
        return True

    def sync_point(self) -> None:
        if self._staging is not None:
            self._staging.result()
            self._staging = None

    def is_persisted(self, step: int) -> bool:
        upload = self._uploads[step]
        if not upload.done():
            return False
        upload.result()
        return True

    def close(self) -> None:
        for upload in self._uploads.values():
            upload.result()
        self._stager.close()


class DcpAsyncProcess(DcpAsyncThread):
    """Stages into shared memory, which a process of its own persists."""

    title = "DCP async, process, shared memory"
    writer_kind = AsyncCheckpointerType.PROCESS
    shares_memory = True


class DcpOverlapped(DcpAsyncProcess):
    """Stages in a thread while the next step's forward and backward pass run ("zero overhead")."""

    title = "DCP async, process, overlapped staging"
    overlaps = True
