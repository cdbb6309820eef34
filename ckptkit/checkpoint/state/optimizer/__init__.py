"""Captures and restores an optimizer's state by parameter name, without stepping the optimizer.

These modules read and set `optimizer.state` and `optimizer.param_groups` themselves, because two torch functions have
side effects. `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` steps an optimizer that has no state
yet, which changes later training. `Optimizer.load_state_dict` casts fp32 state to the dtype of a low-precision
parameter.
"""
