"""PipeTransformer with today's PyTorch: a pipeline that freezes layers, becomes shorter, and grows replicas.

After He et al., "PipeTransformer: Automated Elastic Pipelining for Distributed Training of Large-scale Models",
ICML 2021.
"""

from stepfast.torch.elastic_pipeline.freezing import (
    Evidence,
    FreezingRule,
    GradientNormRule,
    GradualUnfreezing,
    GuardedRule,
    LateFreezing,
    LayerEvidence,
    MomentRule,
)
from stepfast.torch.elastic_pipeline.layers import CannotSplit, Layer, split
from stepfast.torch.elastic_pipeline.microbatches import Schedule
from stepfast.torch.elastic_pipeline.shape import Shape
from stepfast.torch.elastic_pipeline.training import ElasticPipeline, TrainedStep

__all__ = [
    "CannotSplit",
    "ElasticPipeline",
    "Evidence",
    "FreezingRule",
    "GradientNormRule",
    "GradualUnfreezing",
    "GuardedRule",
    "LateFreezing",
    "Layer",
    "LayerEvidence",
    "MomentRule",
    "Schedule",
    "Shape",
    "TrainedStep",
    "split",
]
