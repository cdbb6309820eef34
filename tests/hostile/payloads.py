"""Checkpoints that carry code in every kind of file that a training system pickles."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.hostile import sources
from tests.hostile.harness import Place
from tests.hostile.records import edit_json, reseal
from tests.hostile.sources import Build, Evil, changed, saved


def _file(name: str, data: Callable[[Evil], bytes]) -> Build:
    """A checkpoint of one file with a payload."""
    return lambda place: (place.src / name).write_bytes(data(Evil(place.marker)))


def _beside_weights(evil: Evil) -> bytes:
    return saved({"state_dict": sources.weights(), "x": evil})


def _replaced(control: str, pattern: str, *, raw: bool = False) -> Build:
    """A good checkpoint in which one file is a payload."""

    def change(place: Place) -> None:
        path, evil = sorted(place.src.rglob(pattern))[0], Evil(place.marker)
        path.write_bytes(pickle.dumps(evil) if raw else saved(evil))

    return changed(control, change)


def _added(place: Place) -> None:
    """A payload is added to the value of a torch file."""
    value = torch.load(place.src / "last.ckpt", weights_only=False)
    value["hyper_parameters"] = Evil(place.marker)
    torch.save(value, place.src / "last.ckpt")


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


def _global(name: str, argument: Callable[[Path], Any]) -> Build:
    module, _, attribute = name.rpartition(".")
    call = f"c{module}\n{attribute}\n".encode()
    return lambda place: (place.src / "model.pt").write_bytes(
        b"\x80\x02" + call + pickle.dumps(argument(place.marker), protocol=2)[2:-1] + b"\x85R."
    )


def _command(marker: Path) -> str:
    return f"mkdir {marker}"


def _python(marker: Path) -> str:
    return f"__import__('os').mkdir({str(marker)!r})"


def _nested(marker: Path) -> bytes:
    return saved(Evil(marker))


def _list(marker: Path) -> list[str]:
    return ["mkdir", str(marker)]


# The known escapes from an unpickler, from the catalogues of Fickling and picklescan.
GLOBALS: dict[str, Build] = {
    name: _global(name, argument)
    for name, argument in {
        "os.system": _command, "posix.system": _command, "nt.system": _command, "subprocess.getoutput": _command,
        "builtins.eval": _python, "builtins.exec": _python, "__builtin__.eval": _python, "builtins.compile": _python,
        "builtins.__import__": _python, "timeit.timeit": _python, "cProfile.run": _python, "pdb.run": _python,
        "code.InteractiveInterpreter": _python, "torch.storage._load_from_bytes": _nested, "pickle.loads": _nested,
        "_pickle.loads": _nested, "torch.load": _command, "torch.jit.load": _command, "numpy.load": _command,
        "torch.hub.load": _command, "torch.utils.cpp_extension.load_inline": _command, "runpy.run_path": _command,
        "importlib.import_module": _command, "functools.partial": _command, "operator.attrgetter": _command,
        "torch.distributed.run.main": _list, "pip.main": _list, "pip._internal.cli.main.main": _list,
        "shutil.rmtree": _command, "os.mkdir": str, "pathlib.Path.mkdir": str, "builtins.open": str,
        "subprocess.Popen": _list, "webbrowser.open": _command, "ctypes.CDLL": _command, "pty.spawn": _command,
        "torch._dynamo.guards.GuardBuilder.get": _python, "torch.fx.experimental.symbolic_shapes.ShapeEnv": _python,
        "idlelib.run.Executive.runcode": _python, "numpy.testing._private.utils.runstring": _python,
        "torch._inductor.codecache.compile_file": _command, "ensurepip._run_pip": _list, "doctest.debug_script": _python,
        "logging.config.listen": _command, "asyncio.unix_events._UnixSubprocessTransport": _list,
        "bdb.Bdb.run": _python, "trace.Trace.run": _python, "profile.run": _python, "lib2to3.pgen2.grammar.Grammar": str,
    }.items()
}  # fmt: skip

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
    "lightning_hyper_parameters": changed("lightning", _added),
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
