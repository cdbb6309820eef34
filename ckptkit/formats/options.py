"""Options that tell a reader what the files themselves do not contain."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ReadOptions"]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options every reader takes; each reader uses the ones that mean something to its format.

    Attributes:
        layout: URL of a JSON layout of flat parameters (FSDP1 LOCAL state); None where names are on disk.
        shapes: URL of a JSON object of parameter names and shapes, for formats that record only sizes.
        base: Hugging Face directory the model comes from: config, and the names one expects.
        strip_prefix: Removed from the front of model names after the wrappers that are recognised.
        allow_pickle: Accept torch.save files whose pickles ask for classes from outside the allow-list. Still nothing
            is run: such values arrive as inert records, and are omitted of what is written.
    """

    layout: str | None = None
    shapes: str | None = None
    base: str | None = None
    strip_prefix: str | None = None
    allow_pickle: bool = False
