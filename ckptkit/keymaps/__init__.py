"""Key maps: rename the tensors of one system to the names of another."""

from ckptkit.keymaps.file import parse_key_map
from ckptkit.keymaps.keymap import NameMap
from ckptkit.keymaps.patterns import NamePattern
from ckptkit.keymaps.rules import Cast, Concat, Drop, Rename, RopePermute, Split, Stack, Transpose, Unstack

__all__ = [
    "NameMap",
    "NamePattern",
    "Rename",
    "Drop",
    "Split",
    "Concat",
    "Stack",
    "Unstack",
    "Transpose",
    "RopePermute",
    "Cast",
    "parse_key_map",
]
