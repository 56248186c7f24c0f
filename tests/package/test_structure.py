"""The package's structure: imports, layers, no import cycles, file sizes, one version."""

import ast
import graphlib
import pathlib
import re
import tomllib

import pytest

import sparsekit_ao

ROOT = pathlib.Path(__file__).parent.parent.parent
PACKAGE = ROOT / "sparsekit_ao"

# The layers, top to bottom: the first column of the package README's table.
LAYERS = re.findall(r"^\| `(\w+)(?:\.py|/)` \|", (PACKAGE / "README.md").read_text(), re.MULTILINE)


def module_of(path: pathlib.Path) -> tuple[str, ...]:
    """A file as a dotted module below the package; a folder for its `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports_of(path: pathlib.Path) -> set[tuple[str, ...]]:
    """Every module of the package that a file imports, wherever in it; imports under TYPE_CHECKING count."""
    own, found = module_of(path), set()
    folder = own if path.name == "__init__.py" else own[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = (*folder[: len(folder) - node.level + 1], *(node.module.split(".") if node.module else ()))
            found |= {(*base, a.name) if (*base, a.name) in MODULES else base for a in node.names}
    return found - {()}


ALL_FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {module_of(p) for p in ALL_FILES}
FILES = [p for p in ALL_FILES if p.name != "__init__.py"]


def test_every_module_has_a_layer():
    assert sorted({m[0] for m in MODULES if m}) == sorted(LAYERS)


@pytest.mark.parametrize("path", [p for p in ALL_FILES if module_of(p)], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_go_to_layers_above(path):
    own = module_of(path)[0]
    for imported in imports_of(path):
        assert imported[0] == own or LAYERS.index(imported[0]) < LAYERS.index(own), ".".join(imported)


def test_there_are_no_import_cycles():
    """Among modules; the imports of `__init__` files do not count."""
    graph = {module_of(p): {m for m in imports_of(p) if m != module_of(p)} for p in FILES}
    graph |= {module_of(p): set() for p in ALL_FILES if p.name == "__init__.py"}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle


def test_no_absolute_imports_of_the_package_and_no_experimental_torch():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not [n for n in names if n.startswith("sparsekit_ao") or "_experimental" in n], path


def test_one_version():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in settings["project"]["dynamic"] and "version" not in settings["project"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "sparsekit_ao.__version__"}
    assert f"## [{sparsekit_ao.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_public_name_has_a_docstring():
    for name in sparsekit_ao.__all__:
        assert getattr(sparsekit_ao, name).__doc__, name


def test_files_and_folders_stay_small():
    long = {str(p.relative_to(PACKAGE)): n for p in ALL_FILES if (n := p.read_text().count("\n")) > 350}
    assert not long
    entries = [p for p in PACKAGE.iterdir() if not p.name.startswith("__") and (p.suffix == ".py" or p.is_dir())]
    assert len(entries) <= 17
