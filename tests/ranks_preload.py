"""Imported once in the fork server: the heavy imports, and one training step to warm what torch loads lazily.

It must leave no thread behind: forked ranks would inherit its locks.
"""

import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)

import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    _model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    torch.distributed.fsdp.fully_shard(_model)
    _optimizer = torch.optim.AdamW(_model.parameters())
    _model(torch.randn(2, 4)).sum().backward()
    _optimizer.step()
    torch.distributed.checkpoint.state_dict.get_state_dict(_model, _optimizer)
    dist.destroy_process_group()
    del _model, _optimizer
