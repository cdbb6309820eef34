"""Finds tied weights by comparing bytes, and decides whether an export stores a tied weight under both names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckptkit.catalog.box import Box
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import TensorEntry, same_by_record
from ckptkit.catalog.targets import Target
from ckptkit.errors import CheckpointMismatchError
from ckptkit.formats.sources import read_box
from ckptkit.storage.store import Store

# Names of heads and embeddings that transformers' models list in `_tied_weights_keys`.
_HEADS = (
    "lm_head.weight",
    "embed_out.weight",
    "predictions.decoder.weight",
    "lm_head.decoder.weight",
    "lm_head.out_proj.weight",
    "lm_loss.weight",
    "head.decoder.weight",
    "generator_lm_head.weight",
    "vocab_projector.weight",
    "output_projection.weight",
    "proj_out.weight",
    "output.weight",
    "pred_layer.proj.weight",
)
_WHOLE_HEADS = ("decoder.weight",)  # ModernBERT's head; inside a module, this name may mean anything
_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "word_embedding.weight",
    "transformer.w.weight",
    "tok_embeddings.weight",
    "embeddings.weight",
    "shared.weight",
    "tokens_embed.weight",
)
# Encoder-decoders have embeddings in the encoder and in the decoder, besides the shared one.
_HALVES = tuple(f"{half}.embed_tokens.weight" for half in ("encoder", "decoder", "text_encoder", "text_decoder"))
# A head with a bias stores the bias twice: as `bias` and as `decoder.bias`.
_BIASES = ("predictions.decoder.bias", "lm_head.decoder.bias")
# Models whose head is never tied, even if the config says so.
_OWN_HEADS = frozenset({"pop2piano"})
_TILE = 4 << 20  # bytes of each tensor to compare at a time


@dataclass(frozen=True, slots=True)
class TiedOutcome:
    """The result of resolving tied tensors.

    Attributes:
        targets: The tensors to write.
        dropped: Source tensors that are not written because an equal tensor is written: source -> reason.
        untied: Whether the config must say `tie_word_embeddings: false`.
        notes: The decisions, for the user.
        names: Maps each omitted name to the name that is kept.
    """

    targets: dict[str, Target]
    dropped: dict[str, str]
    untied: bool = False
    notes: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)


def config_ties(config: Mapping[str, Any] | None) -> bool | None:
    """Return whether config.json ties the word embeddings. Returns None if the config has no such setting."""
    found = (config or {}).get("tie_word_embeddings")
    if found is None:
        text = (config or {}).get("text_config")
        found = text.get("tie_word_embeddings") if isinstance(text, Mapping) else None
    return bool(found) if isinstance(found, (bool, int)) else None


def is_embedding(name: str) -> bool:
    """Return whether `name` is a token embedding's name."""
    return ends_like(name, _EMBEDDINGS)


def is_head(name: str) -> bool:
    """Return whether `name` may be an output head's name. Other modules may have such a name, too."""
    return ends_like(name, _HEADS) or name in _WHOLE_HEADS


def tied_pairs(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, str]]:
    """Return pairs (second name, kept name) of tensors that have equal shapes and that a config may tie.

    There are three kinds of pairs: an output head with the embedding, the embedding of an encoder or decoder with the
    shared embedding, and the bias of a head's decoder with the bias of the head.
    """
    embeddings = [name for name in shapes if is_embedding(name)]
    pairs: list[tuple[str, str]] = []
    for head in filter(is_head, shapes):
        fitting = [name for name in embeddings if shapes[name] == shapes[head] and name != head]
        # If several embeddings fit, take the nearest in the module tree (text and audio towers), then a decoder's.
        fitting.sort(key=lambda name: (-_common(head, name), "decoder" not in name, len(name)))
        pairs += [(head, fitting[0])] if fitting else []
    for shared in (name for name in shapes if ends_like(name, ("shared.weight",))):
        halves = [shared.removesuffix("shared.weight") + half for half in _HALVES]
        pairs += [(name, shared) for name in halves if shapes.get(name) == shapes[shared]]
    for bias in (name for name in shapes if ends_like(name, _BIASES)):
        own = bias.removesuffix("decoder.bias") + "bias"
        pairs += [(bias, own)] if shapes.get(own) == shapes[bias] else []
    return pairs


def settle_tied(
    targets: Mapping[str, Target],
    config: Mapping[str, Any] | None,
    *,
    same: Callable[[Target, Target], bool],
    wanted: Mapping[str, Any] | None = None,
    untie: bool = False,
) -> TiedOutcome:
    """Return the targets (the tensors to write) without the second names of tied tensors.

    An output head is omitted only if it is tied and its bytes equal those of the embedding. The head is tied if the
    config says so. If the config does not say, the head is tied if the base model stores the embedding but no head.

    Args:
        same: A function that returns whether two targets have equal bytes. Called only when needed.
        wanted: The names that the base model stores, if known.
        untie: Keep both names, and correct the config.

    Raises:
        CheckpointMismatchError: The config ties the head, but the head differs from the embedding.
    """
    if not config or config_ties(config) is False:
        return TiedOutcome(dict(targets), {})
    names = dict(targets)
    dropped: dict[str, str] = {}
    notes: list[str] = []
    kept: dict[str, str] = {}
    untied = False
    own = str(config.get("model_type")) in _OWN_HEADS
    for head, embedding in tied_pairs({name: target.shape for name, target in targets.items()}):
        if own and ends_like(head, _HEADS):
            continue
        # If the config does not say, a base model without a head proves that the head is tied.
        tied = config_ties(config) or (wanted is not None and embedding in wanted and head not in wanted)
        equal = same(targets[head], targets[embedding])
        if equal and tied and not untie:
            for source in set(names.pop(head).sources) - set(targets[embedding].sources):
                dropped[source] = f"tied: the same bytes as {embedding!r}"
            kept[head] = embedding
            notes.append(f"{head} is tied to {embedding}: equal bytes, written once")
        elif not equal and config_ties(config) and not untie:
            raise CheckpointMismatchError(
                f"config.json has tie_word_embeddings, but {head!r} differs from {embedding!r}: loading the "
                "export would lose the head. Was it trained separately? `convert --untie` keeps both and "
                "corrects the config."
            )
        elif not equal or untie:
            untied = True
            notes.append(f"{head} and {embedding} are both kept; config.json says tie_word_embeddings: false")
    if untie and not untied:
        notes.append("--untie had no effect: the checkpoint has no separate head")
    return TiedOutcome(names, dropped, untied, tuple(notes), kept)


def restore_embedding(targets: Mapping[str, Target], wanted: Mapping[str, Any]) -> dict[str, Target]:
    """Return the tensors to write. A tensor that is stored only under the head's name gets the embedding's name.

    `wanted` has the names in the base model. Call this only if the config ties the embedding and the head.
    """
    names = dict(targets)
    for embedding in (name for name in wanted if ends_like(name, _EMBEDDINGS) and name not in targets):
        for head in (name for name in targets if ends_like(name, _HEADS) and name not in wanted):
            names[embedding] = replace(names.pop(head), name=embedding)
            break
    return names


def same_values(store: Store, first: TensorEntry, second: TensorEntry) -> bool:
    """Return whether two tensors in a checkpoint have equal bytes.

    Compares recorded digests if both tensors have the same slices. Otherwise reads both, a few MB at a time.
    """
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    known = same_by_record(first, second)
    if known is not None:
        return known
    tiles = Box.whole(first.shape).tiles(max(1, _TILE // dtype_of(first.dtype).itemsize))
    return all(np.array_equal(read_box(store, first, tile), read_box(store, second, tile)) for tile in tiles)


def ends_like(name: str, endings: tuple[str, ...]) -> bool:
    """Return whether the name ends with one of `endings` after a dot: "a.lm_head.weight", not "xlm_head.weight"."""
    return any(name == ending or name.endswith("." + ending) for ending in endings)


def _common(first: str, second: str) -> int:
    count = 0
    for a, b in zip(first.split("."), second.split("."), strict=False):
        if a != b:
            break
        count += 1
    return count
