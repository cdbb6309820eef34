"""Defines the options of all readers. Most of them supply information that the checkpoint's files do not contain."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options for all readers. Each reader uses only the options that concern its format.

    Attributes:
        layout: URL of a JSON file with the names and shapes in each flat parameter (FSDP1 LOCAL state), or with the
            shape of each parameter, in module order.
        base: Hugging Face directory of the model, with the config and the expected names.
        strip_prefix: Prefix to strip from the names of weights, after the prefixes of known wrappers.
        allow_pickle: Accept torch.save files whose pickles refer to classes outside the allow-list. No code is run.
            Instances of these classes become inert records, and are left out of the result.
    """

    layout: str | None = None
    base: str | None = None
    strip_prefix: str | None = None
    allow_pickle: bool = False


DEFAULTS = ReadOptions()
