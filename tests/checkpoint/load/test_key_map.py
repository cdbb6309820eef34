"""Key maps at load: weights with other names and layouts are bit-equal in the live model."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ckptkit import TrainState
from ckptkit.checkpoint.report import LoadReport
from ckptkit.errors import CheckpointMismatchError, IntegrityError, UnsupportedFormatError, UsageError
from ckptkit.formats.dcp.subclasses import with_lower_bits
from ckptkit.fsdp import MasterWeightOptimizer
from ckptkit.keymaps import Cast, Concat, Drop, NameMap, NamePattern, Pad, Rename, RopePermute, Split, Stack, Transpose
from tests.checkpoint import states
from tests.checkpoint.states import module_of
from tests.fsdp.models import assert_equal, weights
from tests.ranks import on_ranks

P = NamePattern
ROWS, PADDED = 10, 13
MAP = NameMap(
    "old-to-new",
    (
        Rename(P("tok.weight"), "embed.weight"),
        Pad(P("embed.weight"), PADDED),
        Concat((P("{x}.q"), P("{x}.k")), "{x}.qk"),
        Rename(P("a.qk"), "attention.qk"),
        RopePermute(P("attention.qk"), 2),
        Split(P("mlp.fused"), ("mlp.gate", "mlp.up"), 1),
        Stack(P("experts.{i:d}"), "experts"),
        Transpose(P("out")),
        Drop(P("rope.{x:*}"), "computed"),
    ),
)


def filled(seed: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


def new() -> nn.Module:
    shapes = {"mlp.gate": (6, 5), "mlp.up": (6, 5), "experts": (3, 4, 2), "out": (7, 3), "kept": (5,)}
    return module_of(filled(1, {"embed.weight": (PADDED, 4), "attention.qk": (8, 6), **shapes}))


def old() -> dict[str, torch.Tensor]:
    shapes = {"tok.weight": (ROWS, 4), "a.q": (5, 6), "a.k": (3, 6), "mlp.fused": (6, 10), "out": (3, 7), "kept": (5,)}
    return filled(2, {**shapes, "rope.freqs": (2,), **{f"experts.{i}": (4, 2) for i in range(3)}})


def expected(source: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    qk = torch.cat([source["a.q"], source["a.k"]])
    return {
        "embed.weight": torch.cat([source["tok.weight"], before["embed.weight"][ROWS:]]),
        "attention.qk": qk.view(2, 2, 2, 6).transpose(1, 2).reshape(8, 6),
        "mlp.gate": source["mlp.fused"][:, :5],
        "mlp.up": source["mlp.fused"][:, 5:],
        "experts": torch.stack([source[f"experts.{i}"] for i in range(3)]),
        "out": source["out"].T,
        "kept": source["kept"],
    }


def write(kind: str, url: str, sharded: bool) -> None:
    """Write the old model: by a manager, as plain DCP, or as a Hugging Face directory."""
    model = module_of(old())
    if sharded:
        fully_shard(model)
    if kind in ("sharded", "full"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        states.save(url, TrainState(model=model, optimizer=optimizer, extra={"note": "old"}), 7, state_dict_type=kind)
    elif kind == "dcp":
        dcp.save({"model": model.state_dict()}, checkpoint_id=url)
    elif not dist.is_initialized() or dist.get_rank() == 0:
        Path(url).mkdir()
        save_file(old(), f"{url}/model.safetensors", {"format": "pt"})
        (Path(url) / "config.json").write_text("{}")
    if dist.is_initialized():
        dist.barrier()


def warm_start(url: str, run: str, sharded: bool, key_map: Any = MAP, **options: Any) -> tuple[Any, LoadReport, Any]:
    model = new()
    if sharded:
        fully_shard(model)
    before = weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    state = TrainState(model=model, optimizer=optimizer, extra={"note": "new"}, step=3)
    report = states.load(run, state, url, key_map=key_map, optimizer="skip", **options)
    assert (state.step, state.extra) == (3, {"note": "new"})
    return before, report, weights(model)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["sharded", "full", "dcp", "hf"])
@on_ranks("world_size")
def test_weights_of_another_model_are_bit_equal(tmp_path, kind, world_size):
    write(kind, f"{tmp_path}/old", sharded=True)
    source = f"{tmp_path}/old/step_00000007" if kind in ("sharded", "full") else f"{tmp_path}/old"
    before, report, after = warm_start(source, f"{tmp_path}/run", sharded=True, atomic=kind == "full")
    assert_equal(after, expected(old(), before))
    prefix = "" if kind == "hf" else "model."
    assert report.sources["model.attention.qk"] == (f"{prefix}a.q", f"{prefix}a.k")
    assert report.sources["model.kept"] == (f"{prefix}kept",)
    assert report.padded == ["model.embed.weight"]
    assert report.skipped[f"{prefix}rope.freqs"] == "computed"
    assert {"rng", "extra.note", "optimizer"} <= set(report.skipped)
    assert any("filled [10, 4] at [0, 0]; the rest is left unchanged" in note for note in report.notes)


def like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


NEVER_UPDATED = ("experts.1", "kept")  # so that their optimizer keeps nothing of them


def write_rounded(url: str, keeps: str) -> dict[str, torch.Tensor]:
    """Save the old model in bf16 with an optimizer that keeps more of its weights; return the exact weights."""
    exact = old()
    model = module_of(exact, dtype=torch.bfloat16)
    fully_shard(model)
    live = dict(model.named_parameters())
    if keeps == "masters":
        optimizer: Any = MasterWeightOptimizer(torch.optim.SGD(live.values(), lr=1.0))
        for name, parameter in live.items():
            optimizer.state[parameter]["master"] = like(parameter, exact[name])
    else:
        optimizer = torch.optim.SGD(live.values(), lr=1.0)
        for seed, (name, parameter) in enumerate(live.items()):
            exact[name] = exact[name].bfloat16().float()
            if name not in NEVER_UPDATED:
                generator = torch.Generator().manual_seed(seed)
                lower = torch.randint(-32767, 32768, exact[name].shape, dtype=torch.int16, generator=generator)
                exact[name] = with_lower_bits(exact[name].bfloat16(), lower)
                optimizer.state[parameter]["error_bits"] = like(parameter, lower)
    states.save(url, TrainState(model=model, optimizer=optimizer), 7)
    return exact


@pytest.mark.parametrize("keeps", ["masters", "lower bits"])
@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks("world_size")
def test_a_mapped_weight_that_is_cast_is_as_exact_as_the_optimizer_keeps_it(tmp_path, keeps, world_size):
    exact = write_rounded(f"{tmp_path}/old", keeps)
    said = "from the fp32 masters" if keeps == "masters" else "with the lower bits"
    for options in ({"convert_dtype": True}, {"convert_dtype": True, "atomic": True}):
        before, report, after = warm_start(f"{tmp_path}/old/step_00000007", f"{tmp_path}/run", True, **options)
        assert_equal(after, expected(exact, before))
        assert any(said in note for note in report.notes)
    model = new().bfloat16()  # without a cast, the weights are those that were saved
    fully_shard(model)
    before = weights(model)
    states.load(f"{tmp_path}/run", TrainState(model=model), f"{tmp_path}/old/step_00000007", key_map=MAP)
    assert_equal(weights(model), expected({name: value.bfloat16() for name, value in old().items()}, before))


@pytest.fixture
def source(tmp_path: Path) -> str:
    write("sharded", str(tmp_path / "old"), sharded=False)
    return str(tmp_path / "old" / "step_00000007")


def with_rules(*more: Any, without: tuple[type, ...] = ()) -> NameMap:
    return NameMap("changed", (*(rule for rule in MAP.rules if not isinstance(rule, without)), *more))


REFUSED = [
    (with_rules(Drop(P("kept"))), CheckpointMismatchError, "model: 1 missing in the checkpoint: kept"),
    (with_rules(without=(Drop,)), CheckpointMismatchError, "1 unexpected: rope.freqs"),
    (NameMap("wrong", (Rename(P("{i:d}.{x}"), "{x}"),)), CheckpointMismatchError, "'wrong' matches none of 10 weights"),
    (with_rules(without=(Pad,)), CheckpointMismatchError, r"embed.weight \(\[10, 4\]"),
    (NameMap("short", (Pad(P("tok.weight"), 9),)), CheckpointMismatchError, "padded to 9 along 0: its size is larger"),
    ({"a": "b"}, UsageError, "key_map is of type dict, expected a built-in name, a file"),
    (with_rules(Cast(P("kept"), "bf16")), UnsupportedFormatError, "casts kept"),
]


@pytest.mark.parametrize(("key_map", "error", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_a_map_that_does_not_fit_is_refused(source, tmp_path, key_map, error, said):
    with pytest.raises(error, match=said):
        warm_start(source, str(tmp_path / "run"), False, key_map)


def test_without_strict_what_matches_is_loaded_and_the_rest_is_reported(source, tmp_path):
    key_map = NameMap("one", (Rename(P("out"), "elsewhere"),), "keep")
    _, report, after = warm_start(source, str(tmp_path / "run"), False, key_map, strict=False)
    assert torch.equal(after["kept"], old()["kept"])
    assert report.sources == {"model.kept": ("model.kept",)}
    assert "model.embed.weight" in report.missing
    assert "model.elsewhere" in report.unexpected


def test_a_rule_that_matches_nothing_is_noted(source, tmp_path):
    _, report, _ = warm_start(source, str(tmp_path / "run"), False, with_rules(Rename(P("bias.{x}"), "b.{x}")))
    assert any("bias.{x}) matched nothing" in note for note in report.notes)


def test_an_optimizer_must_be_skipped_explicitly(source, tmp_path):
    for said, options in (("pass optimizer='skip'", {}), ("key_map= loads weights only", {"optimizer": "deferred"})):
        more = {"error": UsageError, "which": source, "key_map": MAP, **options}
        states.check_misfit(tmp_path / "run", states.optimized(new()), said, **more)


def test_a_flipped_bit_is_found_in_a_slice_that_a_map_splits(source, tmp_path):
    states.flip(source, old()["mlp.fused"])
    with pytest.raises(IntegrityError, match=r"mlp.gate \(from model.mlp.fused\)|mlp.up"):
        warm_start(source, str(tmp_path / "run"), False, MAP)


def test_a_second_name_of_a_tied_weight_is_mapped(tmp_path):
    tied = module_of({"tok": torch.randn(4, 2), "head": torch.zeros(4, 2)})
    tied.head = tied.tok
    states.save(tmp_path / "old", TrainState(model=tied, rng=False), state_dict_type="full")
    untied = module_of({"new.tok": torch.zeros(4, 2), "new.head": torch.zeros(4, 2)})
    key_map = NameMap("under", (Rename(P("{x}"), "new.{x}"),))
    states.load(tmp_path / "run", TrainState(model=untied), f"{tmp_path}/old/step_00000001", key_map=key_map)
    assert torch.equal(untied.new.tok, tied.tok)
    assert torch.equal(untied.new.head, tied.tok)


def test_a_map_file_is_read_and_its_sizes_come_from_the_models_config(source, tmp_path):
    file = tmp_path / "map.json"
    file.write_text(
        '{"rules": [{"op": "pad", "from": "tok.weight", "size": "vocab_size"},'
        ' {"op": "rename", "from": "tok.weight", "to": "embed"}], "rest": "drop"}'
    )
    model = module_of({"embed": torch.zeros(PADDED, 4)})
    model.config = type("Config", (), {"to_dict": lambda self: {"vocab_size": PADDED}})()  # type: ignore[assignment]
    report = states.load(tmp_path / "run", TrainState(model=model), source, key_map=str(file))
    assert torch.equal(model.embed[:ROWS], old()["tok.weight"])
    assert report.padded == ["model.embed"]
