"""Imported once in the fork server: the modules that ranks need, and one training step that triggers lazy imports.

It must leave no thread behind: forked ranks would inherit its locks.
"""

import contextlib
import functools
import gc
import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # the kernels of flashoptim run on the CPU; read when triton is imported

import torch

torch.set_num_threads(1)

import _pytest.assertion
import _pytest.config
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import ckptkit.checkpoint.load.checkpoint
import ckptkit.checkpoint.manager
import ckptkit.fsdp.strategy

config = _pytest.config.get_config([])
config.parse([])  # pytest 8.0 does not know the names of test files before
_pytest.assertion.install_importhook(config)  # a failed assertion prints its values here too

with contextlib.suppress(ImportError), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # Takes seconds in each rank that builds one of its models.
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    # Sizes that no test uses: DTensor caches the shards of a shape, and here this process is rank 0.
    _model = torch.nn.Sequential(torch.nn.Linear(61, 59), torch.nn.Linear(59, 53))
    # The default mesh uses the accelerator, and after CUDA is initialized it does not work in forked processes.
    _mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.distributed.fsdp.fully_shard(_model, mesh=_mesh)
    _optimizer = torch.optim.AdamW(_model.parameters())
    if torch.version.cuda is None and torch.version.hip is None:
        _model(torch.randn(2, 61)).sum().backward()
    else:  # autograd of a GPU build starts a thread per device, and then no backward works after a fork
        for _parameter in _model.parameters():
            _parameter.grad = torch.zeros_like(_parameter)
    _optimizer.step()
    torch.distributed.checkpoint.state_dict.get_state_dict(_model, _optimizer)
    dist.destroy_process_group()
    del _model, _mesh, _optimizer


def caches():
    """Return the `lru_cache`s of torch.distributed and ckptkit that the garbage collector knows."""
    found = [value for value in gc.get_objects() if type(value) is functools._lru_cache_wrapper]
    return [cache for cache in found if str(cache.__module__).startswith(("torch.distributed.", "ckptkit."))]


gc.collect()
CACHES = caches()  # from here on, it does not know them
gc.freeze()  # loaded objects stay alive, and ranks need not scan them
