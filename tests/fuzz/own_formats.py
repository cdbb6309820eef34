"""Fuzzers of our own files: the commit record, the manifest, objects.json, LOCAL files, and the files of a run.

In half of the inputs, sizes and digests match the changed content; otherwise the digests would refuse everything.
"""

import functools
import json
import random
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckptkit import CheckpointManager, TrainState, list_run, open_checkpoint, verify
from ckptkit.checkpoint.run.inventory import list_checkpoints, resolve
from ckptkit.checkpoint.run.pins import list_pins
from ckptkit.formats.detect import open_source
from ckptkit.formats.own.columns import pack, unpack
from ckptkit.formats.own.manifest import Manifest
from ckptkit.formats.own.record import CommitRecord, _self_digest
from ckptkit.offline.inspect import summarise
from ckptkit.offline.prune import prune
from ckptkit.storage.local import LocalStore
from ckptkit.storage.lock import open_attempts
from tests.fuzz.mutations import json_text, mutate, mutate_tree
from tests.fuzz.running import Finding, Target, refused
from tests.hostile.records import reseal


def commit_records(rng: random.Random, _: Path) -> None:
    """Require an accepted record to be written again unchanged."""
    raw = (_run("sharded") / "step_00000002" / "checkpoint.json").read_bytes()
    data = mutate(rng, raw) if rng.random() < 0.4 else _sealed_record(rng, json.loads(raw))
    with refused("f"):
        record = CommitRecord.from_json(data, file="f")
        if CommitRecord.from_json(record.to_json(), file="f") != record and "nan" not in repr(record):
            raise Finding("a record that was accepted is written as another one")


def _sealed_record(rng: random.Random, body: dict[str, Any]) -> bytes:
    body.pop("self", None)
    made = mutate_tree(rng, body)
    if isinstance(made, dict):
        try:
            made["self"] = _self_digest(made)
        except ValueError:
            made["self"] = "xxh3_64:" + "0" * 16
    return json_text(rng, made)


def manifests(rng: random.Random, _: Path) -> None:
    """Require every entry of an accepted manifest to be readable and within its tensor."""
    raw = (_run(rng.choice(("sharded", "full"))) / "step_00000002" / "manifest.safetensors").read_bytes()
    data = mutate(rng, raw) if rng.random() < 0.4 else _changed_manifest(rng, raw)
    with refused("f", "path", unless="tensor"):
        catalog = Manifest.from_bytes(data, file="f").catalog()
        for entry in catalog.tensors.values():
            entry.check_coverage()
        summarise(catalog)


def _changed_manifest(rng: random.Random, raw: bytes) -> bytes:
    columns = unpack(raw, file="f")
    arrays = {name: np.array(column) for name, column in columns.arrays.items()}
    header = dict(columns.header)
    if rng.random() < 0.5:
        header = mutate_tree(rng, header)
    else:
        name = rng.choice(sorted(arrays))
        column = arrays[name]
        if len(column) and rng.random() < 0.8:
            info = np.iinfo(column.dtype)
            one = int(column[rng.randrange(len(column))]) + rng.choice((-1, 1, 2))
            near = [one, 0, -1, 1, info.max, info.min, 2**40, 255]
            value = rng.choice(near)
            column[rng.randrange(len(column))] = min(max(value, info.min), info.max)
        else:
            arrays[name] = column[: len(column) // 2] if rng.random() < 0.5 else np.concatenate([column, column])
    try:
        return pack(arrays, header)
    except (ValueError, TypeError, AttributeError):
        return raw


def committed_checkpoints(rng: random.Random, folder: Path) -> None:
    """Fuzz one file of a ckptkit checkpoint, with matching digests, in all offline commands."""
    kind = rng.choice(("sharded", "full", "local"))
    step = _copy_of_run(kind, folder) / "step_00000002"
    _lie_in(rng, step, rng.choice(("checkpoint.json", "manifest.safetensors", "objects.json", "*.safetensors", "*")))
    for look in (lambda url: summarise(open_source(url).catalog, tensors="*"), verify, _read_objects):
        with refused():
            look(str(step))
    if (folder / "outside").exists():
        raise Finding("something was written")


def run_directories(rng: random.Random, folder: Path) -> None:
    """Fuzz records, pins, leases and pointers of a run in listing and pruning."""
    root = _copy_of_run("sharded", folder)
    state = root / ".ckptkit"
    (state / "pins").mkdir(parents=True, exist_ok=True)
    (state / "deleting").mkdir(exist_ok=True)
    owner = {"host": "h", "pid": 1, "started": "1", "machine": "a/b/c"}
    texts = {
        state / "pins" / "keep-step_00000001.json": {"name": "step_00000001", "why": "x", "owner": None},
        state / "pins" / "read-0123456789abcdef.json": {"name": "step_00000002", "why": "x", "owner": owner},
        state / "lease-00000003.json": {"nonce": "0" * 16, "beat": 1, "released": False, **owner},
        state / "deleting" / "step_00000001.json": owner,
        root / ".tmp-step_00000003-0123456789abcdef.owner": owner,
        root / "latest": "step_00000002",
    }
    for path, body in texts.items():
        chosen = rng.random() < 0.4
        data = json_text(rng, mutate_tree(rng, body)) if chosen else json.dumps(body).encode()
        path.write_bytes(mutate(rng, data) if chosen and rng.random() < 0.4 else data)
    if rng.random() < 0.5:
        _lie_in(rng, root / rng.choice(("step_00000001", "step_00000002")), "checkpoint.json")
    store = LocalStore(root)
    for look in (
        lambda: list_run(str(root)), lambda: list_pins(store), lambda: open_attempts(store),
        lambda: prune(str(root), dry_run=True), lambda: resolve(list_checkpoints(store), "best"),
    ):  # fmt: skip
        with refused():
            look()


def local_files(rng: random.Random, folder: Path) -> None:
    source = _run("local") / "step_00000002" / "local_00000.safetensors"
    raw = source.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    if rng.random() < 0.8:
        inner = json.loads(header["__metadata__"]["ckptkit.local"])
        header["__metadata__"]["ckptkit.local"] = json_text(rng, mutate_tree(rng, inner)).decode("utf-8", "replace")
        text = json.dumps(header).encode()
        raw = len(text).to_bytes(8, "little") + text + raw[8 + length :]
    else:
        raw = mutate(rng, raw)
    (folder / source.name).write_bytes(raw)
    with refused(source.name, "tensor", str(folder)):
        summarise(open_source(str(folder)).catalog)


OWN: list[Target] = [commit_records, manifests, committed_checkpoints, run_directories, local_files]


# --- helpers


def _state() -> TrainState:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler.step()
    ema = {"w": torch.ones(3000), "n": (1, {2})}
    extra = {"ema": ema, "bytes": b"x", "when": float("nan"), "dtype": torch.bfloat16}
    return TrainState(model=model, optimizer=optimizer, scheduler=scheduler, extra=extra, step=2)


@functools.cache
def _run(kind: str) -> Path:
    """Return a run with two checkpoints, created once per process."""
    root = Path(tempfile.mkdtemp(prefix="fuzz-")) / "run"
    with CheckpointManager(root, state_dict_type=kind) as manager:
        for step in (1, 2):
            state = _state()
            state.step = step
            manager.save(step, state, metrics={"loss": 1.0 / step}, client_state={"a": [1]})
    return root


def _copy_of_run(kind: str, folder: Path) -> Path:
    return Path(shutil.copytree(_run(kind), folder / "run", ignore=shutil.ignore_patterns(".ckptkit")))


def _lie_in(rng: random.Random, step: Path, pattern: str) -> None:
    """Damage a file of a checkpoint, and usually make the record match it."""
    files = [path for path in sorted(step.rglob("*")) if path.is_file()]
    path = rng.choice([path for path in files if path.match(pattern)] or files)
    raw = path.read_bytes()
    if path.name == "checkpoint.json":
        path.write_bytes(_sealed_record(rng, json.loads(raw)))
        return
    if path.name == "objects.json" and rng.random() < 0.8:
        body = json.loads(raw)
        body["objects"] = mutate_tree(rng, body["objects"])
        path.write_bytes(json_text(rng, body))
    elif path.name == "manifest.safetensors" and rng.random() < 0.7:
        path.write_bytes(_changed_manifest(rng, raw))
    else:
        path.write_bytes(mutate(rng, raw))
    if rng.random() < 0.9:
        reseal(step)


def _read_objects(url: str) -> None:
    checkpoint = open_checkpoint(url)
    for name in list(checkpoint):
        with refused():
            value = checkpoint[name]
            if hasattr(value, "to_torch"):
                value.to_torch()
