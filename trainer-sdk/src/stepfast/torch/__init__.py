"""The SDK for PyTorch training code."""

from stepfast.admission import Interval
from stepfast.step import Tier
from stepfast.torch.checkpoint import Checkpointer, CommittedStep, Saved, every

__all__ = ["Checkpointer", "CommittedStep", "Interval", "Saved", "Tier", "every"]
