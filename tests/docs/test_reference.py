"""Every public name is in the reference, with a docstring; examples and pages import only public names."""

import ast
import importlib
import inspect
import re
from types import ModuleType
from typing import Any

import pytest

import ckptkit
import ckptkit.fsdp
import ckptkit.keymaps
import ckptkit.reports
from tests.docs.pages import ROOT, blocks

PACKAGES = [ckptkit, ckptkit.fsdp, ckptkit.keymaps, ckptkit.reports]
HIDDEN = re.findall(r'^ +- "!(.+)"$', (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
WITHOUT_EXTRAS = ("ckptkit.integrations",)  # their frameworks may not be installed


def directives() -> list[str]:
    texts = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs/reference").glob("*.md"))]
    return [name for text in texts for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)]


def resolved(name: str) -> Any:
    """Return the module, class or function of a dotted name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)


def documented() -> dict[str, Any]:
    """Return every documented name: those that a page lists, and the exports of documented modules."""
    found: dict[str, Any] = {}
    for name in directives():
        if name.startswith(WITHOUT_EXTRAS):
            pytest.importorskip("transformers")
            pytest.importorskip("lightning")
        item = resolved(name)
        if isinstance(item, ModuleType):
            found.update({f"{name}.{part}": getattr(item, part) for part in item.__all__})
        else:
            found[name] = item
    return found


def imports(code: str) -> list[str]:
    """Return what a piece of code imports from ckptkit, as dotted names."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ckptkit":
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("ckptkit.")]
    return found


def shown_code() -> list[tuple[str, str]]:
    """Return the code that people copy: examples, and the Python blocks of all pages."""
    examples = [(path.name, path.read_text(encoding="utf-8")) for path in sorted((ROOT / "examples").glob("*.py"))]
    return [*examples, *blocks("python")]


def test_examples_and_pages_import_only_names_of_the_reference():
    public = documented()
    used = {(place, name) for place, code in shown_code() for name in imports(code)}
    assert len(used) > 20
    assert sorted(f"{place}: {name}" for place, name in used if name not in public) == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_the_reference_contains_every_export_of_a_package(package):
    names = {f"{package.__name__}.{name}" for name in package.__all__ if not name.startswith("__")}
    assert names - documented().keys() == set()


def classes_named_in(module: ModuleType) -> set[str]:
    """Return the names of the package's classes that a module defines, or imports only for annotations."""
    found = {name for name, item in vars(module).items() if inspect.isclass(item)}
    found = {name for name in found if vars(module)[name].__module__.startswith("ckptkit.")}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ckptkit."):
            source = importlib.import_module(node.module or "")
            found |= {part.name for part in node.names if inspect.isclass(getattr(source, part.name))}
    return found


def annotations(item: Any) -> list[tuple[str, Any]]:
    """Return the annotations that the reference shows of a class or function, each with the member's name."""
    if not inspect.isclass(item):
        return [("", text) for text in getattr(item, "__annotations__", {}).values()]
    found = list(vars(item).get("__annotations__", {}).items())
    for name, member in vars(item).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(function) and name != "__init__":
            found += [(name, text) for text in function.__annotations__.values()]
    return [(name, text) for name, text in found if not any(re.search(pattern, name) for pattern in HIDDEN)]


def test_classes_that_users_pass_or_get_are_public():
    public = {name.rpartition(".")[2]: name for name in documented()}
    assert [name for name in directives() if ".integrations." not in name and name.count(".") > 1] == []
    internal = []
    for name, item in documented().items():
        module = inspect.getmodule(item)
        if module is None or name.startswith(WITHOUT_EXTRAS) or name == "ckptkit.keymaps.NameMap":
            continue
        classes = classes_named_in(module) - public.keys()
        internal += [f"{name}.{part}: {text}" for part, text in annotations(item)
                     if classes.intersection(re.findall(r"\w+", str(text)))]  # fmt: skip
    assert internal == []


def test_a_package_exports_only_names_of_the_reference():
    """Checks all names that completion offers, except modules."""
    for package in PACKAGES:
        offered = [name for name in dir(package) if not name.startswith("_") and name not in package.__all__]
        assert [name for name in offered if not isinstance(getattr(package, name), ModuleType)] == []


def test_everything_public_has_a_docstring():
    missing = []
    for name, item in documented().items():
        if not inspect.isclass(item) and not callable(item):
            continue
        if not inspect.getdoc(item):
            missing.append(name)
        members = vars(item).items() if inspect.isclass(item) else ()
        for part, member in members:
            value = member.fget if isinstance(member, property) else member
            if not part.startswith("_") and inspect.isfunction(value) and not inspect.getdoc(getattr(item, part)):
                missing.append(f"{name}.{part}")
    assert missing == []
