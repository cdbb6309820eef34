"""Lists the keys and the file names under which training programs save the parts of a training state."""

from __future__ import annotations

import re

# Keys. Some end in the number of a rank or an object, such as "rng_state_0" and "extra_state.1".
MODEL_KEYS = (
    "model", "state_dict", "module", "model_state_dict", "model_state", "models", "actor", "policy", "network", "net",
)  # fmt: skip
OPTIMIZER_KEY = re.compile(r"(?:optim|optimizer)s?(?:_states?|_state_dict)?(?:_?\d+)?")
SCHEDULER_KEY = re.compile(r"(?:lr_)?schedulers?(?:_states?|_state_dict)?(?:[._]\d+)?")
RANDOM_KEY = re.compile(r"(?:rng|random|(?:rng|random|extra)_states?)(?:[._](\d{1,9}))?")  # group 1: the rank
RANDOM_WORD = re.compile(r"(?<![A-Za-z])(?:rng|random_states?)(?![A-Za-z])|^random$")  # in keys such as "torch_rng"
STEPS = ("global_step", "step", "iteration", "iter", "iter_num")
# Where MMEngine, Composer and fairseq save the step.
STEP_PATHS: tuple[tuple[str | int, ...], ...] = (
    ("meta", "iter"),
    ("state", "timestamp", "Timestamp", "batch"),
    ("optimizer_history", -1, "num_updates"),
)
_OTHER_KEYS = frozenset(
    ("dataloader", "dataloaders", "train_dataloader", "train_state", "trainer_state", "extra", "callbacks", "loops",
     "sampler", "grad_scaler", "scaler", "scalers", "client_state", "epoch", "metrics", "custom_states",
     "hyper_parameters", *STEPS)
)  # fmt: skip
PARAM_GROUPS = "param_groups"
SCHEDULER_STATE = ("last_epoch", "_last_lr")  # keys in every torch scheduler's state
SCALER_STATE = ("scale", "growth_factor", "backoff_factor")  # keys in the state of an enabled GradScaler

WEIGHTS_NAMES = "model|adapter_model|diffusion_pytorch_model|consolidated"  # of one safetensors file, without ending

# Files that transformers and accelerate write in addition to the weights. If a job has several models, optimizers or
# schedulers, accelerate numbers the second and later ones.
MODEL_FILE = re.compile(r"(?:pytorch_)?model_(\d+)\.(?:safetensors|bin)")  # accelerate's second and later models
OPTIMIZER_FILE = re.compile(r"optimizer(?:_(\d+))?\.(?:bin|pt)")
ACCELERATE_FILE = re.compile(r"random_states_\d+\.pkl")  # accelerate always writes these
# accelerate's FSDP models. Groups: model number, rank, kind. Not `pytorch_model.bin`, which many systems write.
ACCELERATE_MODEL = re.compile(
    r"(?=pytorch_model_fsdp|pytorch_model_\d+/?\Z|pytorch_model(?:_\d+)?_rank)"
    r"pytorch_model(?:_fsdp)?(?:_(\d+))?(?:_rank(\d+))?(\.bin|/)"
)
STATE_FILE = re.compile(
    rf"scheduler(?:_\d+)?\.(?:bin|pt)|{ACCELERATE_FILE.pattern}|rng_state(?:_\d+)?\.pth|trainer_state\.json|"
    r"sampler(?:_\d+)?\.bin|custom_checkpoint_\d+\.pkl|scaler\.pt|dl_state_dict(?:_\d+)?\.bin"
)


def is_other_key(key: str) -> bool:
    """Return whether programs use this key for a part of the training state other than a model or an optimizer."""
    return key in _OTHER_KEYS or bool(SCHEDULER_KEY.fullmatch(key) or RANDOM_KEY.fullmatch(key))
