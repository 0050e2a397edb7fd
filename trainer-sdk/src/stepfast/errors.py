"""Every error that Stepfast raises to its users, split by what the reader should do about it.

StepfastError
├── CheckpointError              something about a checkpoint
│   ├── CheckpointNotFound       there is none (yet), or not this one
│   │   └── ReferenceMissing     a step that it refers to is not committed any more
│   ├── CheckpointDamaged        stored bytes are not what was saved; names file and step
│   ├── CheckpointUnsafe         holds pickled objects; needs weights_only=False
│   ├── CheckpointMismatch       does not fit the objects or the world size it is restored into
│   ├── StepOutOfOrder           an older step than this run has saved already
│   └── StateUnsupported         the state holds something that cannot be saved
├── StorageError                 something about the storage
│   ├── ObjectNotFound           the object is not there
│   ├── StorageForbidden         no permission, read-only, bad credentials: fix and retry
│   ├── StorageFull              no space left
│   ├── StorageUnavailable       the store does not answer, throttles or fails: retried, then raised
│   └── UploadLost               bytes that were written are gone: the object has to be uploaded anew
├── AgentError                   something between SDK and agent
│   ├── ProtocolError            a frame that breaks the protocol
│   │   └── ProtocolMismatch     SDK and agent speak different versions
│   ├── AgentUnavailable         no agent behind the socket
│   └── MemoryBudgetTooSmall     the memory budget cannot hold even one chunk
├── CheckpointerOpen             a second Checkpointer of one run in one process
├── GangError                    the ranks of a gang do not agree
├── AnatomyError                 a training step cannot be predicted or measured as it is given
└── SpecError                    a manifest or an option is wrong; names the field
"""

from __future__ import annotations


class StepfastError(Exception):
    """Base of all errors of Stepfast."""


class CheckpointError(StepfastError):
    """Something about a checkpoint."""


class CheckpointNotFound(CheckpointError):
    """There is no such committed step."""


class ReferenceMissing(CheckpointNotFound):
    """A step is not committed, as a step that it refers to is not there any more. `missing`: those steps."""

    def __init__(self, reason: str, missing: tuple[int, ...] = ()) -> None:
        self.missing = missing
        super().__init__(reason)


class CheckpointDamaged(CheckpointError):
    """Stored bytes are not the bytes that were saved.

    `path` names the damaged file, `step` its step, `older_step` the next older committed step that could be
    restored instead (None when there is none).
    """

    def __init__(self, path: str, step: int, reason: str, older_step: int | None = None) -> None:
        self.path = path
        self.step = step
        self.reason = reason
        self.older_step = older_step
        offer = (
            f"Restore the next older committed step instead: {older_step}."
            if older_step is not None
            else "There is no older committed step to restore instead."
        )
        super().__init__(f"step {step} is damaged: {path}: {reason}. {offer}")


class ObjectsUndefined(CheckpointError):
    """The objects hold parts of a step that could not be restored as a whole: they must not be saved as another."""


class CheckpointUnsafe(CheckpointError):
    """The checkpoint holds pickled objects, which run code when they are loaded."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint does not fit what it is to be restored into."""


class StepOutOfOrder(CheckpointError):
    """An older step than this run has saved already: a run has one history. Roll back in a new process."""


class StateUnsupported(CheckpointError):
    """The state holds something that cannot be saved; the message names where and what."""


class StorageError(StepfastError):
    """Something about the storage. The message names the path and the operation."""


class ObjectNotFound(StorageError):
    """The object is not in the storage."""


class StorageForbidden(StorageError):
    """The storage refuses: permissions, credentials or a read-only file system. Retrying alone will not help."""


class StorageFull(StorageError):
    """There is no space left on the storage."""


class StorageUnavailable(StorageError):
    """The storage does not answer, throttles or fails. It was retried until the deadline.

    `retry_after_seconds`: how long the service asked to be left alone; 0 when it did not say.
    """

    retry_after_seconds: float = 0.0


class UploadLost(StorageError):
    """An upload cannot be finished: the system could not keep bytes that it had taken. Begin the object again."""


class AgentError(StepfastError):
    """Something between the SDK and the node's agent."""


class ProtocolError(AgentError):
    """A frame that breaks the protocol. The connection that carried it is closed."""


class ProtocolMismatch(ProtocolError):
    """SDK and agent speak different protocol versions: install matching versions of both."""


class AgentUnavailable(AgentError):
    """No agent answers behind the socket."""


class MemoryBudgetTooSmall(AgentError):
    """The rank's share of the memory budget cannot hold even one chunk."""


class CheckpointerOpen(StepfastError):
    """This process has a Checkpointer of this run already: give it all objects, or close it first."""


class GangError(StepfastError):
    """The ranks of a gang do not agree on something that must be equal on all of them."""


class AnatomyError(StepfastError):
    """A training step cannot be predicted or measured as it is given; the message says what to change."""


class AnatomyOptionError(AnatomyError):
    """What was asked for is none of what there is, or does not go together."""


class SpecError(StepfastError):
    """A manifest or an option is wrong. `field` is its path, as in `spec.trainer.numNodes`."""

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        self.reason = reason
        super().__init__(f"{field}: {reason}")
