"""The SDK for PyTorch training code."""

from stepfast.admission import Interval
from stepfast.step import Tier
from stepfast.torch.checkpoint import Checkpointer, CommittedStep, Saved, every
from stepfast.torch.sampler import GlobalBatchSampler
from stepfast.torch.settled import Settling

__all__ = ["Checkpointer", "CommittedStep", "GlobalBatchSampler", "Interval", "Saved", "Settling", "Tier", "every"]
