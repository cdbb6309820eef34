"""Checkpoints that carry code in every kind of file that a training system pickles."""

import base64
import json
import pickle
from collections.abc import Callable
from typing import Any

from tests.hostile import sources
from tests.hostile.harness import Place
from tests.hostile.records import edit_json, reseal
from tests.hostile.sources import Build, Evil, changed, saved


def _file(name: str, data: Callable[[Evil], bytes]) -> Build:
    return lambda place: (place.src / name).write_bytes(data(Evil(place.marker)))


def _beside_weights(evil: Evil) -> bytes:
    return saved({"state_dict": sources.weights(), "x": evil})


def _replaced(control: str, pattern: str, *, raw: bool = False) -> Build:
    """A good checkpoint in which one file is a payload."""

    def change(place: Place) -> None:
        path, evil = sorted(place.src.rglob(pattern))[0], Evil(place.marker)
        path.write_bytes(pickle.dumps(evil) if raw else saved(evil))

    return changed(control, change)


def _rank_metadata(place: Place) -> None:
    (place.src / ".metadata").unlink()
    (place.src / "__0.metadata").write_bytes(pickle.dumps(Evil(place.marker)))


def _slice(place: Place) -> None:
    """A payload instead of a tensor's item."""
    evil, path = saved(Evil(place.marker)), place.src / "__0_0.distcp"
    data = path.read_bytes()
    path.write_bytes(data + evil)

    def change(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "weight":
                info.offset, info.length = len(data), len(evil)

    sources.edit_metadata(place.src, change)


def _own_object(place: Place) -> None:
    """A payload in objects.json with a matching record: the value is base64 of a torch.save file."""
    value = {"$torch_save": base64.b64encode(saved(Evil(place.marker))).decode()}
    for step in place.src.glob("step_*"):
        edit_json(step / "objects.json", lambda body: body["objects"].update({"extra.x": value, "step": value}))
        reseal(step)


def _code_of_the_author(place: Place) -> None:
    """A config that refers to code next to it (trust_remote_code): listed, never imported."""
    config = {"auto_map": {"AutoModel": "evil.Model", "AutoConfig": "evil.Config"}, "architectures": ["Model"]}
    (place.src / "config.json").write_text(json.dumps(config))
    for name in ("evil.py", "sitecustomize.py", "torch.py", "json.py"):
        (place.src / name).write_text(f"import os\nos.mkdir({str(place.marker)!r})\n")


PAYLOADS: dict[str, Build] = {
    "metadata": _replaced("dcp", ".metadata", raw=True),
    "metadata_field": changed("dcp", lambda place: sources.edit_metadata(
        place.src, lambda metadata: metadata.planner_data.update(weight=Evil(place.marker)))),
    "rank_metadata": changed("dcp", _rank_metadata),
    "byte_entry": lambda place: sources.dcp(place.src, {**sources.weights(), "extra": Evil(place.marker)}),
    "slice": changed("dcp", _slice),
    "zip_bin": _file("pytorch_model.bin", _beside_weights),
    "zip_pt": _file("model.pt", _beside_weights),
    "zip_ckpt": _file("last.ckpt", _beside_weights),
    "legacy": _file("pytorch_model.bin", lambda evil: saved([evil], _use_new_zipfile_serialization=False)),
    "pickle": _file("model.pt", pickle.dumps),
    "lightning_meta": _replaced("lightning_fsdp", "meta.pt"),
    "deepspeed_model": _replaced("deepspeed", "mp_rank_00_model_states.pt"),
    "deepspeed_optimizer": _replaced("deepspeed", "*optim_states.pt"),
    "deepspeed3_model": _replaced("deepspeed3", "*model_states.pt"),
    "verl_model": _replaced("verl", "model_world_size_2_rank_1.pt"),
    "verl_optimizer": _replaced("verl", "optim_world_size_2_rank_0.pt"),
    "lightrft_optimizer": _replaced("lightrft", "_rank0"),
    "fsdp1_metadata": _replaced("fsdp1_dcp", ".metadata", raw=True),
    "accelerate_metadata": _replaced("accelerate", ".metadata", raw=True),
    "megatron_common": _replaced("megatron", "common.pt"),
    "own_object": changed("own", _own_object),
}  # fmt: skip
# Files that are copied or ignored, never unpickled: a conversion may succeed.
IGNORED: dict[str, Build] = {
    "code_of_the_author": changed("hf", _code_of_the_author),
    "lightrft_client_state": _replaced("lightrft", "client_state.pt"),
    "verl_extra_state": _replaced("verl", "extra_state_world_size_2_rank_0.pt"),
    "trainer_rng": _replaced("hf_trainer", "rng_state_0.pth"),
    "trainer_scheduler": _replaced("hf_trainer", "scheduler.pt"),
    "accelerate_random_states": _replaced("accelerate", "random_states_0.pkl", raw=True),
}
