"""The structure of the package: no import cycles, and torch's private names only in one place."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from tests.sources import sources


@functools.cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes of a module that a test here inspects, cached because walking the package takes a second."""
    kinds = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Call, ast.Constant, ast.ClassDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def imports(modules: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Return the imports of each module: at the top, inside functions, and for type checkers only."""
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, tree in modules.items():
        for node in nodes(tree):
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                targets = {f"{node.module}.{item.name}" for item in node.names}
                found[name] |= {target if target in modules else node.module for target in targets}
            elif isinstance(node, ast.Import):
                found[name] |= {item.name for item in node.names if item.name in modules}
        found[name].discard(name)
    return found


def cycle(edges: Mapping[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle, or nothing."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_there_are_no_import_cycles():
    assert " -> ".join(cycle(imports(sources()))) == ""
    modules = {
        "a": ast.parse("from b import f"),
        "b": ast.parse("def f():\n    from c import g"),
        "c": ast.parse("if TYPE_CHECKING:\n    import a"),
        "d": ast.parse("import a"),
    }
    assert set(cycle(imports(modules))) == set("abc")


def algorithms(tree: ast.Module) -> Iterator[str]:
    """Yield the names of digest algorithms in a module."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (item.name for item in node.names if item.name in ("hashlib", "xxhash"))
        elif isinstance(node, ast.Attribute) and node.attr == "crc32" and isinstance(node.value, ast.Name):
            yield from ("zlib.crc32" for _ in "1" if node.value.id == "zlib")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("hashlib", "isal", "xxhash"):
            yield str(node.module)
        elif isinstance(node, ast.Constant) and node.value in ("xxh3_64", "crc32", "sha256"):
            yield node.value


def test_only_digests_names_a_digest_algorithm():
    found = {name: list(algorithms(tree)) for name, tree in sources().items() if name != "ckptkit.digests"}
    wire = {"ckptkit.storage.body", "ckptkit.storage.connection", "ckptkit.storage.s3"}  # the checksums of S3 itself
    assert {name: names for name, names in found.items() if names and name not in wire} == {}
    named = algorithms(ast.parse("import xxhash\nzlib.crc32(b'')\nx == 'crc32'"))
    assert sorted(named) == ["crc32", "xxhash", "zlib.crc32"]


KINDS = ("LocalStore", "RemoteStore", "AttemptStore", "Snapshot")


def questions(tree: ast.Module) -> Iterator[str]:
    """Yield the places where a module checks the kind of a store."""
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("local_root", "is_remote"):
            yield f"line {node.lineno}: .{node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "type"):
            kinds = {name.id for part in node.args[-1:] for name in ast.walk(part) if isinstance(name, ast.Name)}
            yield from (f"line {node.lineno}: {kind}" for kind in KINDS if kind in kinds)
        elif isinstance(node, ast.ImportFrom) and node.module == "ckptkit.storage.objects":
            yield f"line {node.lineno}: RemoteStore"


def test_only_storage_checks_the_kind_of_a_store():
    found = {name: list(questions(tree)) for name, tree in sources().items() if ".storage." not in name}
    assert {name: where for name, where in found.items() if where} == {}
    lines = "isinstance(x, LocalStore)\nx.local_root\nfrom ckptkit.storage.objects import RemoteStore"
    assert len(list(questions(ast.parse(lines)))) == 3


def swallowed(tree: ast.Module) -> Iterator[str]:
    """Yield the handlers that also catch StorageError, and go on as if the part of the checkpoint did not exist."""
    for block in ast.walk(tree):
        if isinstance(block, ast.Try):
            caught: set[str] = set()
            for handler in block.handlers:
                here = {name.id for name in ast.walk(handler.type or block) if isinstance(name, ast.Name)}
                goes_on = not any(isinstance(node, ast.Raise) for node in ast.walk(handler))
                if "CkptkitError" in here and goes_on and "StorageError" not in caught:
                    yield f"line {handler.lineno}"
                caught |= here


def test_a_reader_does_not_take_a_store_that_fails_for_a_missing_part():
    readers = {
        name: tree
        for name, tree in sources().items()
        if name.startswith(("ckptkit.formats", "ckptkit.checkpoint.load"))
    }
    found = {name: list(swallowed(tree)) for name, tree in readers.items()}
    assert {name: where for name, where in found.items() if where} == {}
    assert list(swallowed(ast.parse("try:\n    read()\nexcept CkptkitError:\n    pass"))) == ["line 3"]


# Private names of torch outside of formats/dcp. Only remove names from this table: unused ones fail the test.
PRIVATE = {
    "ckptkit.checkpoint.save.staging": {"torch._foreach_copy_"},  # torch's own optimizers use the _foreach_ functions
    "ckptkit.checkpoint.state.model_tensors": {"_load_from_state_dict", "_load_state_dict_pre_hooks"},
    "ckptkit.checkpoint.state.without_values": {"_version"},
    "ckptkit.formats.pickles.weights_only": {"torch._neg_view"},
    "ckptkit.fsdp.gradients": {"torch._foreach_mul_", "torch._foreach_norm"},
    "ckptkit.fsdp.hf_model": {"_buffers", "_parameters"},
    "ckptkit.fsdp.master_weights": {"torch._foreach_copy_", "torch._foreach_sub_"},
    "ckptkit.fsdp.meta": {"_non_persistent_buffers_set"},
    "ckptkit.fsdp.reset": {"_parameters", "_version"},
    "ckptkit.fsdp.strategy": {"torch.distributed.tensor._random.manual_seed"},
    "ckptkit.fsdp.wrap": {"_buffers", "_modules", "_parameters", "torch.utils._pytree.tree_leaves"},
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_attributes() -> set[str]:
    """Return the private attributes of torch's tensors, modules, optimizers, schedulers and meshes."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    optimizer = torch.optim.SGD([torch.zeros(1)])
    things = [torch.zeros(1), torch.nn.Linear(1, 1), optimizer, DTensor, DeviceMesh]
    things.append(torch.optim.lr_scheduler.LambdaLR(optimizer, float))
    names = {name for thing in things for name in dir(thing)}
    return {name for name in names | set(DTensor.__annotations__) if is_private(name)}


def private_names(tree: ast.Module, attributes: set[str]) -> Iterator[str]:
    """Yield the private names of torch that a module imports or looks up."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (item.name for item in node.names if item.name.startswith("torch.") and "._" in item.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (full for full in (f"{node.module}.{item.name}" for item in node.names) if "._" in full)
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            if owner.split(".")[0] == "torch":
                yield f"{owner}.{node.attr}"
            elif node.attr in attributes and owner not in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            named = [part.value for part in node.args[1:2] if isinstance(part, ast.Constant)]
            yield from (name for name in named if name in attributes)


def test_private_names_of_torch_are_used_only_in_formats_dcp():
    attributes = private_attributes()
    modules = {name: tree for name, tree in sources().items() if not name.startswith("ckptkit.formats.dcp.")}
    found = {name: set(private_names(tree, attributes)) for name, tree in modules.items()}
    assert {name: names for name, names in found.items() if names} == PRIVATE
    tree = ast.parse("from torch.x import _y\nimport torch._z\ntorch._C.f()\na._local_tensor\ngetattr(b, '_spec')")
    assert set(private_names(tree, attributes)) == {"torch.x._y", "torch._z", "torch._C", "_local_tensor", "_spec"}


def test_a_class_name_is_used_once():
    found = (node for tree in sources().values() for node in nodes(tree))
    counted = Counter(node.name for node in found if isinstance(node, ast.ClassDef))
    assert [name for name, count in counted.items() if count > 1] == []
