"""Integrates Lightning: provides strategies for FSDP2, a CheckpointIO for other strategies, and a ModelCheckpoint.

    from ckptkit.integrations.lightning import FSDP2Strategy, ManagedCheckpoint
    trainer = Trainer(strategy=FSDP2Strategy(), callbacks=[ManagedCheckpoint(dirpath=..., monitor="val_loss")])
    fabric = Fabric(strategy="fsdp2")

The import registers the name "fsdp2" for Trainer and Fabric, and lets `LightningModule.load_from_checkpoint` read
ckptkit's checkpoints.
"""

from __future__ import annotations

from ckptkit.integrations.extras import missing

try:
    import lightning.pytorch  # noqa: F401  raises if Lightning is not installed
except ImportError as error:
    raise missing("lightning", "lightning") from error

from ckptkit.integrations.lightning_callback import ManagedCheckpoint
from ckptkit.integrations.lightning_fabric import FSDP2FabricStrategy, register_fabric_strategies
from ckptkit.integrations.lightning_io import CkptkitCheckpointIO, extend_load_from_checkpoint
from ckptkit.integrations.lightning_setup import fsdp2_strategy_parallelize
from ckptkit.integrations.lightning_strategy import FSDP2Strategy, register_strategies

__all__ = [
    "FSDP2FabricStrategy",
    "FSDP2Strategy",
    "fsdp2_strategy_parallelize",
    "CkptkitCheckpointIO",
    "ManagedCheckpoint",
]

register_strategies()
register_fabric_strategies()
extend_load_from_checkpoint()
