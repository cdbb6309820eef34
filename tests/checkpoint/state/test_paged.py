"""The states of bitsandbytes' paged optimizers are loaded into memory that the optimizer allocates.

It does so on an accelerator. Here, a function takes its place that returns marked tensors on the CPU.
"""

from typing import Any

import pytest
import torch
from torch import nn

from ckptkit import TrainState
from ckptkit.fsdp import MasterWeightOptimizer
from ckptkit.integrations.torchtitan import _joined
from tests.checkpoint.states import bits, load_all, save

pytestmark = pytest.mark.filterwarnings("ignore")  # paged optimizers warn on the CPU

OPTIMIZERS = ["PagedAdamW8bit", "PagedAdamW32bit", "PagedLion8bit", "PagedAdEMAMix8bit"]
NAMES = {"PagedLion8bit": ["state1"]}


def made(name: str, wrap: Any = None, *, pages: bool = False) -> TrainState:
    """Return a state with this optimizer. With `pages`, it allocates marked memory."""
    import bitsandbytes.optim

    model = nn.Linear(20, 20, bias=False)
    options = {"min_8bit_size": 16} if "8bit" in name else {}
    inner = getattr(bitsandbytes.optim, name)(model.parameters(), lr=0.1, **options)
    if pages:
        inner.get_state_buffer = lambda p, dtype=torch.float32: paged(torch.zeros(p.shape, dtype=dtype))
        inner._get_state_double_buffer = lambda p, dtype=torch.float32: paged(torch.zeros((2, *p.shape), dtype=dtype))
    return TrainState(model=model, optimizer=wrap(inner) if wrap else inner, rng=False)


def paged(tensor: torch.Tensor) -> torch.Tensor:
    tensor.is_paged, tensor.page_deviceid = True, 0  # type: ignore[attr-defined]
    return tensor


def step(state: TrainState) -> None:
    state.model.weight.grad = torch.randn(20, 20)
    optimizer = state.optimizer
    (optimizer if hasattr(optimizer, "step") else optimizer.inner_optimizers[0]).step()


def states_of(state: TrainState) -> dict[str, Any]:
    return dict(state.optimizer.state[state.model.weight])


def of_paged(states: dict[str, Any]) -> list[str]:
    return sorted(name for name, value in states.items() if getattr(value, "is_paged", False))


@pytest.mark.parametrize("options", [{}, {"atomic": True}], ids=["", "atomic"])
@pytest.mark.parametrize(("name", "wrap"), [
    *((name, None) for name in OPTIMIZERS),
    ("PagedAdamW8bit", MasterWeightOptimizer), ("PagedAdamW8bit", lambda inner: _joined([inner])),
])  # fmt: skip
def test_the_optimizer_allocates_its_states_even_inside_another(tmp_path, name, wrap, kind, options):
    source, live = made(name, wrap), made(name, wrap, pages=True)
    step(source)
    load_all(save(tmp_path, source, state_dict_type=kind), live, **options)
    assert bits(states_of(live)) == bits(states_of(source))
    assert of_paged(states_of(live)) == NAMES.get(name, ["state1", "state2"])


@pytest.mark.parametrize("options", [{}, {"atomic": True}], ids=["", "atomic"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_paged_states_are_filled_in_place(tmp_path, name, options):
    source, live = made(name), made(name)
    for state in (source, live):
        step(state)
        kept = {k: paged(states_of(state)[k].contiguous().clone()) for k in NAMES.get(name, ["state1", "state2"])}
        state.optimizer.state[state.model.weight].update(kept)
    # A weight in another place than the states: on the CPU, only the memory order can differ.
    live.model.weight.data = live.model.weight.data.T.contiguous().T
    load_all(save(tmp_path, source), live, **options)
    assert bits(states_of(live)) == bits(states_of(source))
    assert all(states_of(live)[key] is value for key, value in kept.items())
