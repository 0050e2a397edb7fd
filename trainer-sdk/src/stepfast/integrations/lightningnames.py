"""Lightning's own names, whichever of its two packages is installed."""

from __future__ import annotations

from stepfast.integrations.missing import missing

try:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
except ModuleNotFoundError:
    try:
        from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
        from pytorch_lightning import Callback, LightningModule, Trainer
        from pytorch_lightning.callbacks import ModelCheckpoint
        from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
    except ModuleNotFoundError as error:
        raise missing("lightning") from error

__all__ = [
    "Callback", "DDPStrategy", "DeepSpeedStrategy", "FSDPStrategy", "LightningModule", "ModelCheckpoint",
    "ModelParallelStrategy", "TorchCheckpointIO", "Trainer",
]  # fmt: skip
