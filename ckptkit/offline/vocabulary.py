"""Resizes a model's vocabulary: trims or pads the rows of the embedding and the output head.

    resized = resize(tensors, config, VocabSize(32064), store=store, catalog=catalog)

New rows are the mean of the old rows, or zeros. The mean is summed in fp64 row by row, divided, and rounded to the
tensor's stored dtype. The result is bit-identical for any number of workers, any memory limit and any sharding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ckptkit.arguments import check_int
from ckptkit.catalog.box import Box
from ckptkit.catalog.casts import cast, float_values
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog, Role
from ckptkit.catalog.targets import NO_SOURCE, Target
from ckptkit.errors import CheckpointMismatchError, UnsupportedFormatError, UsageError
from ckptkit.formats.sources import SourceReader
from ckptkit.offline.copying.gather import Gatherer
from ckptkit.offline.copying.plan import ComputedTensor, OutputTensor, Placement, Plan
from ckptkit.offline.copying.runs import prepare
from ckptkit.offline.export.tied import ends_like, is_embedding, is_head, tied_pairs
from ckptkit.offline.resharding.own_state import OwnState, OwnTensor
from ckptkit.storage.store import Store
from ckptkit.units import first_few

Bytes = npt.NDArray[np.uint8]
Doubles = npt.NDArray[np.float64]
NewRows = Literal["mean", "zeros"]

_TILE = 4 << 20  # bytes of a tensor read at a time
_TOKEN = re.compile(r".*token_(?:id|ids|index)")
# Other heads' names are ambiguous, because modules that are not heads may have them too.
_SURELY_HEADS = ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True, slots=True)
class VocabSize:
    """The requested vocabulary size.

    Attributes:
        rows: Number of rows to give the embedding and the head.
        new_rows: How to fill added rows.
        dry: Whether to only plan, without computing the mean of the old rows.
    """

    rows: int
    new_rows: NewRows = "mean"
    dry: bool = False

    @classmethod
    def of(cls, rows: int | None, new_rows: NewRows | None, *, dry: bool) -> VocabSize | None:
        """Return the user's options as one value. Returns None if the vocabulary's size does not change.

        Raises:
            UsageError: `rows` is not a positive integer, `new_rows` is unknown, or only `new_rows` is given.
        """
        if rows is None:
            if new_rows is not None:
                raise UsageError("--new-rows sets the values of the rows that --vocab-size adds. Give both options.")
            return None
        check_int("vocab_size", rows, least=1)
        if new_rows not in (None, *get_args(NewRows)):
            raise UsageError(f"new_rows={new_rows!r} is unknown. Known: {', '.join(get_args(NewRows))}.")
        return cls(rows, new_rows or "mean", dry)


def resize(
    tensors: Mapping[str, OutputTensor],
    config: Mapping[str, Any] | None,
    size: VocabSize,
    *,
    store: Store,
    catalog: Catalog,
    files: Mapping[str, bytes],
) -> tuple[dict[str, OutputTensor], Mapping[str, Any] | None, tuple[str, ...]]:
    """Give the embedding and the head `size.rows` rows. Return all tensors of the model, the changed config, and notes.

    Reads the embedding and the head if new rows are the mean of the old rows. Returns None as config if `config` is
    None.

    Args:
        files: Contents of the model's small files, by name. Every token of the tokenizer must still have a row.

    Raises:
        CheckpointMismatchError: ckptkit cannot tell which tensors have one row per token.
        UnsupportedFormatError: One of these tensors is computed or quantized.
        UsageError: A token would lose its row.
    """
    names, rows = _vocabulary({name: tensor.shape for name, tensor in tensors.items()}, config)
    check_tokens(config, files, size.rows, rows)
    made = dict(tensors)
    for name in names:
        target = _target(tensors[name], name)
        averages = size.rows > rows and size.new_rows == "mean" and not size.dry
        mean = _mean(target, store, catalog) if averages else None
        made[name] = _resized(target, size.rows, mean, size.new_rows)
    changed, notes = _resized_config(config, rows, size.rows)
    kinds = [f"{name} ({tensors[name].dtype})" for name in names]
    return made, changed, (_said(kinds, rows, size), *notes)


def fitted(
    targets: Mapping[str, Target],
    wanted: Mapping[str, tuple[int, ...] | None],
    config: Mapping[str, Any] | None,
    size: VocabSize,
) -> dict[str, Target]:
    """Return the targets to compare with a base model's shapes (`wanted`).

    The base may have the vocabulary of the checkpoint or the requested one. In the second case, the embedding and the
    head are returned with `size.rows` rows.

    Raises:
        CheckpointMismatchError: ckptkit cannot tell which tensors have one row per token.
    """
    names, _ = _vocabulary({name: target.shape for name, target in targets.items()}, config)
    resized = {name: targets[name].resized(0, size.rows) for name in names}
    return {**targets, **{name: target for name, target in resized.items() if wanted.get(name) == target.shape}}


def resize_state(
    own: OwnState,
    config: Mapping[str, Any] | None,
    size: VocabSize,
    *,
    store: Store,
    catalog: Catalog,
    files: Mapping[str, bytes],
) -> Mapping[str, Any] | None:
    """Resize the vocabulary in `own`: model, masters and optimizer states. Return the changed config.

    If a weight has a master, the new rows are computed from the master's rows. The weight gets the same rows, cast to
    its dtype. New rows of optimizer states are zeros.

    Raises:
        CheckpointMismatchError, UsageError: As for `resize`. Also raised if the shapes of a parameter and of its
            optimizer state differ.
        UnsupportedFormatError: A tensor is quantized.
    """
    weights = {item.fqn: item for item in own.tensors if item.role is Role.MODEL and item.fqn}
    if len(weights) < sum(item.role is Role.MODEL and bool(item.fqn) for item in own.tensors):
        raise CheckpointMismatchError(
            "--vocab-size: the checkpoint contains several models with the same names. Convert one of them at a time."
        )
    names, old = _vocabulary({name: item.tensor.shape for name, item in weights.items()}, config)
    check_tokens(config, files, size.rows, old)
    owners = {item.tensor.name: _owner(item, weights) for item in own.tensors}
    rest = [item.tensor for item in own.tensors if not owners[item.tensor.name] and old in item.tensor.shape]
    if rest:
        shown = first_few([f"{tensor.name} {list(tensor.shape)}" for tensor in rest])
        raise CheckpointMismatchError(
            f"--vocab-size: {shown}: ckptkit cannot tell which parameter this belongs to, and so whether its "
            f"dimension of {old} is the vocabulary. Convert the model alone."
        )
    masters = {
        owners[i.tensor.name]: i for i in own.tensors if i.role is Role.MASTER and owners[i.tensor.name] in names
    }
    rows: dict[str, Doubles] = {}
    if size.rows > old and size.new_rows == "mean" and not size.dry:
        rows = _state_rows(names, weights, masters, store, catalog)
    counts: dict[str, int] = {}
    for index, item in enumerate(own.tensors):
        fqn = owners[item.tensor.name]
        if fqn not in names or not _has_rows(item, weights[fqn].source.shape):
            continue
        target = _target(item.tensor, item.tensor.name)
        kind: NewRows = "zeros" if item.role is Role.OPTIMIZER else size.new_rows
        mean = rows.get(fqn) if kind == "mean" else None
        own.tensors[index] = replace(item, tensor=_resized(target, size.rows, mean, kind))
        if item.role is not Role.MODEL:
            what = "masters" if item.role is Role.MASTER else "optimizer states"
            counts[what] = counts.get(what, 0) + 1
    changed, notes = _resized_config(config, old, size.rows)
    own.notes += [_said(names, old, size), *notes]
    if counts:
        listed = " and ".join(f"{n} {what}" for what, n in counts.items())
        zeros = "; new rows of optimizer states are zeros" if size.rows > old else ""
        own.notes.append(f"vocabulary: {listed} were resized to match{zeros}")
    return changed


# --- which tensors


def _vocabulary(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any] | None) -> tuple[tuple[str, ...], int]:
    """Return the names of the tensors with one row per token, and their number of rows.

    These are the embedding, embeddings tied to it, the head, and the head's bias, found by name and size.

    Raises:
        CheckpointMismatchError: There is no embedding or more than one, the head is ambiguous, or other tensors have
            the same number of rows.
    """
    stated = set(_stated(config))
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    embeddings = [name for name in matrices if is_embedding(name)]
    fitting = [name for name in embeddings if matrices[name][0] in stated] or embeddings
    tied = tied_pairs(shapes)
    alone = [name for name in fitting if not any(name == half and shared in fitting for half, shared in tied)]
    if len(alone) != 1:
        said = (
            f" and has the rows of config.json's vocab_size ({first_few([str(value) for value in sorted(stated)])})"
            if stated
            else ""
        )
        what = f"{len(alone)} candidates: {first_few(alone)}" if alone else f"none has a known name{said}"
        raise CheckpointMismatchError(
            f"--vocab-size: cannot tell which tensor is the token embedding: {what}. Rename it to "
            "model.embed_tokens.weight with --key-map, or --exclude the others."
        )
    rows = matrices[alone[0]][0]
    halves = [half for half, shared in tied if shared == alone[0] and is_embedding(half)]
    heads = [name for name in matrices if is_head(name) and matrices[name][0] == rows]
    short = [n for n, shape in matrices.items() if ends_like(n, _SURELY_HEADS) and shape[0] != rows]
    if len(heads) > 1 or short:
        shown = first_few([f"{name} {list(shapes[name])}" for name in (*heads, *short)])
        raise CheckpointMismatchError(
            f"--vocab-size: expected one output head with the {rows} rows of {alone[0]!r}, found {shown}."
        )
    biases = [name.removesuffix("weight") + "bias" for name in heads]
    biases = [name for name in biases if shapes.get(name) == (rows,)]
    names = (alone[0], *halves, *heads, *biases)
    if others := [name for name, shape in shapes.items() if rows in shape and name not in names]:
        shown = first_few([f"{name} {list(shapes[name])}" for name in others])
        raise CheckpointMismatchError(
            f"--vocab-size: {alone[0]!r} has {rows} rows, and so do other tensors: {shown}. ckptkit cannot tell "
            "whether they belong to the vocabulary. --exclude them, or rename the head to lm_head.weight with "
            "--key-map."
        )
    return names, rows


def _owner(item: OwnTensor, weights: Mapping[str, OwnTensor]) -> str:
    """Return the name of the weight to which a master or an optimizer state belongs.

    A weight belongs to itself. Returns "" for any other tensor. The name of an optimizer state may lack the prefix of a
    container module.
    """
    if item.role not in (Role.MODEL, Role.MASTER, Role.OPTIMIZER) or not item.fqn:
        return ""
    if item.fqn in weights:
        return item.fqn
    longer = [name for name in weights if name.endswith(f".{item.fqn}")]
    return longer[0] if len(longer) == 1 else ""


def _target(tensor: OutputTensor, name: str) -> Target:
    if isinstance(tensor, ComputedTensor):
        raise UnsupportedFormatError(
            f"--vocab-size: {name!r} is computed ({tensor.label}). Convert without --vocab-size first, then the result."
        )
    if dtype_of(tensor.source_dtype).kind != "float" or dtype_of(tensor.dtype).kind != "float":
        raise UnsupportedFormatError(
            f"--vocab-size: {name!r} is {tensor.source_dtype}. Quantized rows cannot be resized without their "
            "scales. Convert it to bf16 first (--dtype bf16)."
        )
    return tensor


def _has_rows(item: OwnTensor, shape: tuple[int, ...]) -> bool:
    """Return whether a master or a state has one row for each row of its parameter.

    Returns False for a scalar, such as a step count.

    Raises:
        CheckpointMismatchError: The shape is that of neither the parameter nor a scalar.
    """
    if item.tensor.shape == shape:
        return True
    if item.tensor.numel == 1:
        return False
    raise CheckpointMismatchError(
        f"--vocab-size: {item.tensor.name!r} has shape {list(item.tensor.shape)}, but its parameter has {list(shape)}: "
        "ckptkit cannot tell which elements belong to a token. Convert the model alone."
    )


# --- rows


def _resized(target: Target, rows: int, mean: Doubles | None, kind: NewRows) -> OutputTensor:
    """Return the target with `rows` rows. New rows are `mean`, or zeros if it is None. `kind` is for the label."""
    resized = target.resized(0, rows)
    return _filled(resized, _row_bytes(mean, target), kind) if resized.is_padded else resized


def _filled(target: Target, row: Bytes, kind: NewRows) -> ComputedTensor:
    """Return the target with its last rows, which have no source, set to `row` (bytes in the target's dtype)."""
    known = max((part.target_box.stops[0] for part in target.parts if part.source != NO_SOURCE), default=0)

    def cut(start: int, stop: int) -> ComputedTensor:
        return _filled(target.rows(start, stop), row, kind)

    def compute(data: Sequence[Bytes], out: Bytes) -> int:
        end = len(data[0]) if data else 0
        if data:
            out[:end] = data[0]
        if len(out) > end:
            out[end:].reshape(-1, len(row))[...] = row
        return 0

    return ComputedTensor(
        target.name, target.dtype, target.shape, (target.rows(0, known),) if known else (),
        compute, f"W and rows of {'zeros' if kind == 'zeros' else 'its mean'}",
        0, cut, True,
    )  # fmt: skip


def _row_bytes(mean: Doubles | None, target: Target) -> Bytes:
    """Return one new row of a target as bytes.

    `mean` is rounded to the stored dtype, then cast like the old rows. If it is None, the row is zeros.
    """
    if mean is None:
        width = Box.whole(target.shape[1:]).numel
        return np.zeros(width * dtype_of(target.dtype).itemsize, np.uint8)
    stored, _ = cast(mean.view(np.uint8), "float64", target.source_dtype)
    return cast(stored, target.source_dtype, target.dtype)[0]


def _mean(target: Target, store: Store, catalog: Catalog) -> Doubles:
    """Return the mean of a tensor's rows. Reads the tensor a few MB at a time."""
    stored, width = replace(target, dtype=target.source_dtype), Box.whole(target.shape[1:]).numel
    itemsize = dtype_of(stored.dtype).itemsize
    most = max(1, _TILE // max(1, width * itemsize)) * width
    total: Doubles = np.zeros(width, np.float64)
    work = prepare(Plan(catalog, (), (Placement.whole(stored, 0, 0),)), check=False, by_boxes=True)
    with closing(SourceReader(store, work.origins, span=_TILE)) as reader:
        gatherer = Gatherer(reader, work.maps, max_bytes=4 * _TILE)
        for tile in Box.whole(target.shape).tiles(most):
            data = np.empty(tile.numel * itemsize, np.uint8)
            gatherer.make_box(stored, tile, data)
            # Add one row at a time, because numpy's summation order depends on the number of rows.
            for row in float_values(data, stored.dtype).reshape(-1, width):
                total += row
    return total / target.shape[0]


def _state_rows(
    names: Sequence[str],
    weights: Mapping[str, OwnTensor],
    masters: Mapping[str, OwnTensor],
    store: Store,
    catalog: Catalog,
) -> dict[str, Doubles]:
    """Return, by weight, the row to add: the mean of the weight's rows, or of its master's rows if it has a master.

    An optimizer has only one master for tied weights. If a weight has no master, but its mean equals the mean of a
    weight that has a master, the two weights are considered tied and get the same row.
    """
    of_weights = {name: _mean(_target(weights[name].tensor, name), store, catalog) for name in names}
    rows = {name: _mean(_target(item.tensor, name), store, catalog) for name, item in masters.items()}
    for name, mean in rows.items():  # rounded to the master's dtype, because the weight's new rows are cast from these
        dtype = masters[name].tensor.dtype
        rows[name] = float_values(cast(mean.view(np.uint8), "float64", dtype)[0], dtype).astype(np.float64)
    for name, mean in of_weights.items():
        if name not in rows:
            tied = [other for other in masters if np.array_equal(of_weights[other], mean)]
            rows[name] = rows[tied[0]] if tied else mean
    return rows


# --- config and tokenizer


def _stated(config: Any, depth: int = 0) -> Iterator[int]:
    """Yield each value of vocab_size in a config and in the nested configs."""
    if not isinstance(config, Mapping) or depth > 2:
        return
    value = config.get("vocab_size")
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    for inner in config.values():
        yield from _stated(inner, depth + 1)


def _resized_config(
    config: Mapping[str, Any] | None, old: int, new: int
) -> tuple[Mapping[str, Any] | None, tuple[str, ...]]:
    """Return the config with vocab_size changed to `new`, and notes on the change. None if there is no config.

    If there are several values, only `old`, the number of rows, is changed.

    Raises:
        CheckpointMismatchError: The config has several values of vocab_size, and none is the number of rows.
    """
    stated = sorted(set(_stated(config)))
    if config is None or not stated:
        return config, ("no config.json with a vocab_size was found, so none was changed",)
    if old not in stated and new in stated:  # the config of a base with the new size
        return config, ()
    if old not in stated and len(stated) > 1:
        raise CheckpointMismatchError(
            f"--vocab-size: the embedding has {old} rows, but config.json has vocab_size "
            f"{first_few([str(value) for value in stated])}."
        )
    said = old if old in stated else stated[0]
    return _replaced(config, said, new), (f"config.json: vocab_size {said} is now {new}",) if said != new else ()


def _replaced(config: Mapping[str, Any], old: int, new: int, depth: int = 0) -> dict[str, Any]:
    made = dict(config)
    for key, value in config.items():
        if key == "vocab_size" and type(value) is int and value == old:
            made[key] = new
        elif isinstance(value, Mapping) and depth < 2:
            made[key] = _replaced(value, old, new, depth + 1)
    return made


def check_tokens(config: Mapping[str, Any] | None, files: Mapping[str, bytes], rows: int, old: int) -> None:
    """Raise UsageError if any token in the config or the tokenizer would lose its row."""
    if rows >= old:
        return
    for where, token, number in (
        *_tokens_of(config, "config.json"),
        *_tokens_of(_json(files.get("generation_config.json")), "generation_config.json"),
        *_tokenizer(files),
    ):
        if rows <= number < old:
            raise UsageError(
                f"--vocab-size {rows} would remove the row of {token}, which is token {number} in {where}. Keep "
                "at least one row for each token in use."
            )


def _tokens_of(config: Any, where: str, depth: int = 0) -> Iterator[tuple[str, str, int]]:
    if not isinstance(config, Mapping) or depth > 2:
        return
    for key, value in config.items():
        if isinstance(key, str) and _TOKEN.fullmatch(key):
            numbers = value if isinstance(value, list) else [value]
            yield from ((where, key, number) for number in numbers if type(number) is int)
        yield from _tokens_of(value, where, depth + 1)


def _tokenizer(files: Mapping[str, bytes]) -> Iterator[tuple[str, str, int]]:
    """Yield (file, token, token ID) for all tokens in a tokenizer's files.

    The tokens of a file come in descending order of their IDs.
    """
    for name in ("tokenizer.json", "added_tokens.json", "vocab.json", "tokenizer_config.json"):
        content = _json(files.get(name))
        if not isinstance(content, Mapping):
            continue
        pairs: list[tuple[int, str]] = []
        if name == "tokenizer.json":
            model = content.get("model")
            vocab = model.get("vocab") if isinstance(model, Mapping) else None
            pairs += _numbered(vocab) if isinstance(vocab, Mapping) else []
            if isinstance(vocab, list) and vocab:
                pairs.append((len(vocab) - 1, str(vocab[-1])))
            added = content.get("added_tokens")
            items = [item for item in added if isinstance(item, Mapping)] if isinstance(added, list) else []
            pairs += [(item["id"], str(item.get("content"))) for item in items if type(item.get("id")) is int]
        elif name == "tokenizer_config.json":
            known = content.get("added_tokens_decoder")
            known = known if isinstance(known, Mapping) else {}
            pairs += [(int(key), str(key)) for key in known if str(key).isdecimal()]
        else:
            pairs += _numbered(content)
        # Yield all tokens. The token with the highest number is not enough, because that token may already be beyond
        # the old vocabulary.
        yield from ((name, repr(token), number) for number, token in sorted(pairs, reverse=True))


def _numbered(vocab: Mapping[str, Any]) -> list[tuple[int, str]]:
    return [(number, token) for token, number in vocab.items() if type(number) is int]


def _json(data: bytes | None) -> Any:
    try:
        return json.loads(data) if data is not None else None
    except (ValueError, RecursionError):
        return None  # not JSON; the file is copied unchanged


# --- messages


def _said(names: Sequence[str], old: int, size: VocabSize) -> str:
    head = f"vocabulary: from {old} to {size.rows} rows in {', '.join(names)}"
    if size.rows == old:
        return f"vocabulary: {', '.join(names)} already have {old} rows"
    if size.rows < old:
        return f"{head}; the last {old - size.rows} rows were removed"
    made = "zeros" if size.new_rows == "zeros" else "the mean of the old rows, summed in fp64"
    return f"{head}; the {size.rows - old} new rows are {made}"
