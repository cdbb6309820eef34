"""Lightning over FSDP2: train, stop, resume, keep the best two checkpoints.

    python examples/lightning_fsdp2.py        # starts two ranks on the CPU; needs: pip install -e '.[lightning]'

Your own script needs only the name of the strategy and, for rotation, the callback: see the last lines of `train`.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any


def train(work: Path, *, until: int, resume: str | None) -> float:
    """Train to step `until` and return the last loss."""
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader

    from ckptkit.integrations.lightning import ManagedCheckpoint  # importing it registers the strategies

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

        def training_step(self, batch: Any, _: int) -> Any:
            loss = (self.model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
            self.log("train_loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    same = torch.sin(torch.arange(8.0)).repeat(64, 1)  # equal batches, so a resume needs no loader state
    save = ManagedCheckpoint(dirpath=work / "run", every_n_train_steps=4, monitor="train_loss", save_top_k=2)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="fsdp2", max_steps=until, callbacks=[save], logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=work,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(same, batch_size=4), ckpt_path=resume)
    return float(trainer.callback_metrics["train_loss"])


def main() -> int:
    if "RANK" in os.environ:
        warnings.filterwarnings("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        work, until = Path(sys.argv[1]), int(sys.argv[2])
        loss = train(work, until=until, resume=sys.argv[3] if len(sys.argv) > 3 else None)
        if os.environ["RANK"] == "0":
            (work / f"{until}.json").write_text(json.dumps(loss))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        subprocess.run([*launch, folder, "8"], check=True)
        first = sorted((work / "run").glob("*step=8.ckpt"))[0]
        subprocess.run([*launch, folder, "16", str(first)], check=True)
        losses = [json.loads((work / f"{step}.json").read_text()) for step in (8, 16)]
        kept = sorted(path.name for path in (work / "run").glob("*.ckpt"))
    print(f"loss {losses[0]:.4f} at step 8, {losses[1]:.4f} at step 16, resumed in fresh processes")
    print(f"kept {kept}: the best two, and the one that was resumed from")
    return 0 if losses[1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
