"""Options that tell a reader what the files themselves do not contain."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ReadOptions"]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of all readers. Each reader uses those relevant to its format.

    Attributes:
        layout: URL of a JSON layout of flat parameters (FSDP1 LOCAL state); None if names are on disk.
        shapes: URL of a JSON object of parameter names and shapes, for formats that record only sizes.
        base: The model's Hugging Face directory: config and expected names.
        strip_prefix: Prefix to remove from model names, after known wrapper prefixes are removed.
        allow_pickle: Accept torch.save files whose pickles name classes outside the allow-list. No code is run: values
            of such classes become inert records and are omitted from the result.
    """

    layout: str | None = None
    shapes: str | None = None
    base: str | None = None
    strip_prefix: str | None = None
    allow_pickle: bool = False
