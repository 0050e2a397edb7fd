"""All peers by name. A peer's module is imported only where the peer is used."""

from __future__ import annotations

import sys
from importlib import import_module

from benchmarks.peers.base import Peer, Site
from benchmarks.peers.install import FOLDER

_CLASSES = {
    "stepfast": "stepfastpeer:Stepfast",
    "torch_save": "torchsave:TorchSave",
    "torch_save_fsync": "torchsave:TorchSaveSynced",
    "safetensors": "safetensorsfile:SafetensorsFile",
    "dcp_save": "dcp:DcpSave",
    "dcp_async_thread": "dcp:DcpAsyncThread",
    "dcp_async_process": "dcp:DcpAsyncProcess",
    "dcp_overlapped": "dcp:DcpOverlapped",
    "dlrover": "dlrover:DLRoverFlash",
    "nvrx": "nvrx:NvrxShared",
    "torchsnapshot": "torchsnapshot:TorchSnapshotAsync",
    "plain_copy": "plaincopy:PlainCopyPeer",
    "torch_save_blob": "blobpeers:TorchSaveToBlob",
    "stepfast_blob": "blobpeers:StepfastToBlob",
}
PEERS = tuple(_CLASSES)
ASYNCHRONOUS = ("dcp_async_thread", "dcp_async_process", "dcp_overlapped", "dlrover", "nvrx", "torchsnapshot")
ON_BLOB = ("torch_save_blob", "stepfast_blob")
"""Those that need a Blob Storage, which whoever runs the cell starts."""


def peer_class(name: str) -> type[Peer]:
    """The peer of that name. Raises KeyError."""
    module, _, attribute = _CLASSES[name].partition(":")
    found: type[Peer] = getattr(import_module(f"benchmarks.peers.{module}"), attribute)
    return found


def make_peer(name: str, site: Site) -> Peer:
    """The peer in a process that is to save or restore with it."""
    kind = peer_class(name)
    if kind.installed:
        sys.path.append(str(FOLDER.absolute()))  # behind everything: nothing of this project's own is replaced
    return kind(site)
