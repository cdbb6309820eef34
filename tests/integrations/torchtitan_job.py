"""One rank of torchtitan's Trainer on the CPU, over gloo, with its llama3 debug model and our checkpointer.

    python -m tests.integrations.torchtitan_job FOLDER STEPS CHECKPOINT PARALLELISM [KILL]

CHECKPOINT and PARALLELISM are JSON: fields of those sections of the trainer's config. In step KILL rank 1 ends with
SIGKILL.

The trainer, model, optimizer, schedule, data and loop are torchtitan's. torchtitan 0.3 takes "cuda" where it finds
no accelerator; as its own tests on the CPU do, this sets `device_type`, and an attention that has a backward there. Two
calls that released torch does not have yet are translated.
"""

import inspect
import json
import os
import random
import signal
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


class Host(ModuleType):
    """torch.cpu, with the functions of torch.cuda that torchtitan calls for its log: it shows no memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(total_memory=1)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """There are none."""

    def empty_cache(self) -> None:
        """There is none."""


def joined(step: Any) -> Any:
    """Return a schedule's `step` that takes microbatches, made of one that takes a whole batch and splits it itself."""

    def called(*, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, **options: Any) -> Any:
        args = [torch.cat(parts) for parts in zip(*(arg_mbs or ()), strict=True)]
        kwargs = {name: torch.cat([given[name] for given in kwarg_mbs]) for name in kwarg_mbs[0]}
        return step(*args, target=torch.cat(target_mbs) if target_mbs else None, **options, **kwargs)

    return called


def main(folder: str, steps: str, checkpoint: str, parallelism: str, kill: str = "0") -> None:
    import torchtitan.tools.utils as utils

    utils.device_type, utils.device_module = "cpu", Host("host")  # before the others import them from here
    if not hasattr(dist, "set_timeout"):  # the name in torch's main line of a function that torch 2.13 has
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel
    from torchtitan.tools.logging import init_logger
    from torchtitan.trainer import Trainer

    from ckptkit.integrations.torchtitan import TorchtitanCheckpointer

    class Killed(Trainer):
        def train_step(self, data_iterator: Any) -> None:
            super().train_step(data_iterator)
            if self.step == int(kill) and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    init_logger()
    random.seed(0)
    np.random.seed(0)
    config = llama3_debugmodel()
    del config.model_spec.model.layers[4:]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.hf_assets_path, config.dataloader.dataset_path = f"{folder}/tokenizer", f"{folder}/data"
    config.dump_folder = folder
    config.training.steps = int(steps)
    config.training.seq_len, config.training.local_batch_size = 32, 4
    config.training.disable_cuda_graphs = True
    config.validator.enable = False
    config.debug.seed = 1
    config.parallelism.spmd_backend = "partial_dtensor"  # the default one needs a newer torch
    for name, value in json.loads(parallelism).items():
        assert hasattr(config.parallelism, name)
        setattr(config.parallelism, name, value)
    config.checkpoint = TorchtitanCheckpointer.Config(
        enable=True, interval=2, last_save_model_only=False, **json.loads(checkpoint)
    )
    trainer = Killed(config)
    assert isinstance(trainer.checkpointer, TorchtitanCheckpointer)
    if dist.get_world_size() > 1:  # FSDP2's way for a backend that cannot divide while it sums
        for module in (module for part in trainer.model_parts for module in part.modules()):
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    if hasattr(trainer, "pp_schedule") and "arg_mbs" not in inspect.signature(trainer.pp_schedule.step).parameters:
        trainer.pp_schedule.step = joined(trainer.pp_schedule.step)  # torch 2.13
    trainer.train()
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
