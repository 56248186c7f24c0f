"""The package's structure: layers, no import circles, no two files of one name, one version."""

import ast
import functools
import graphlib
import pathlib
import re
import tomllib
from collections import Counter

import sparsekit_ao

ROOT = pathlib.Path(__file__).parent.parent.parent
PACKAGE = ROOT / "sparsekit_ao"
ALL_FILES = sorted(PACKAGE.rglob("*.py"))
FILES = [p for p in ALL_FILES if p.name != "__init__.py"]
README = (PACKAGE / "README.md").read_text()

# The layers, top to bottom, in three parts: the first columns of the tables under "Layers" in the package's README.
COMMON, TRAINING, TRAINED = [
    re.findall(r"^\| `(\w+)(?:\.py|/)` \|", table, re.MULTILINE)
    for table in re.findall(r"^### (?:Common|Training|Trained models)\n\n((?:\|.+\n)+)", README, re.MULTILINE)
]
LAYERS = [*COMMON, *TRAINING, *TRAINED]


def module_of(path: pathlib.Path) -> tuple[str, ...]:
    """A file as a dotted module below the package; a folder for its `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


MODULES = {module_of(p) for p in ALL_FILES}


@functools.cache
def nodes_of(path: pathlib.Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


@functools.cache
def imports_of(path: pathlib.Path) -> set[tuple[str, ...]]:
    """Every module of the package that a file imports, wherever in it; imports under TYPE_CHECKING count."""
    module, imported = module_of(path), set()
    folder = module if path.name == "__init__.py" else module[:-1]
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = (*folder[: len(folder) - node.level + 1], *(node.module.split(".") if node.module else ()))
            imported |= {(*base, a.name) if (*base, a.name) in MODULES else base for a in node.names}
    return imported


def test_modules_import_only_from_layers_above():
    assert sorted({m[0] for m in MODULES if m}) == sorted(LAYERS)
    for path in ALL_FILES:
        assert () not in imports_of(path), f"{path} imports from the package's __init__"
        for layer in {imported[0] for imported in imports_of(path)} if module_of(path) else ():
            own = module_of(path)[0]
            assert layer == own or LAYERS.index(layer) < LAYERS.index(own), f"{path} imports {layer}"


def test_training_imports_nothing_of_trained_models():
    imported = {p: {m[0] for m in imports_of(p)} for p in ALL_FILES if module_of(p)[:1] and module_of(p)[0] in TRAINING}
    assert {"sparsifiers", "dynamic", "integrations"} < {module_of(p)[0] for p in imported}
    assert not {p: names for p, names in imported.items() if names & {*TRAINED}}


def test_there_are_no_import_circles():
    """Among modules; the imports of `__init__` files do not count."""
    graph = {module_of(p): {m for m in imports_of(p) if m != module_of(p)} for p in FILES}
    graph |= {module_of(p): set() for p in ALL_FILES if p.name == "__init__.py"}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_private_attributes_are_used_in_the_file_of_their_class_alone():
    defined, used = {}, {}
    for path in ALL_FILES:
        nodes = nodes_of(path)
        members = [n for c in nodes if isinstance(c, ast.ClassDef) for n in c.body]
        private = [n for n in nodes if isinstance(n, ast.Attribute) and re.match("_[^_]", n.attr)]
        own = [n for n in private if ast.unparse(n.value) in ("self", "cls", "super()")]
        defined[path] = {n.attr for n in own if isinstance(n.ctx, ast.Store)}
        defined[path] |= {n.name for n in members if isinstance(n, ast.FunctionDef)}
        defined[path] |= {ast.unparse(n.target) for n in members if isinstance(n, ast.AnnAssign)}
        used[path] = {n.attr for n in private if n not in own}
    for path in ALL_FILES:
        of_others = set().union(*(names for other, names in defined.items() if other != path))
        assert not (used[path] & of_others) - defined[path], path


def test_no_two_files_have_one_name():
    assert not [name for name, count in Counter(p.name for p in FILES).items() if count > 1]


def test_every_mutation_has_its_place():
    tree = ast.parse((ROOT / "tests/helpers/mutations.py").read_text())
    (table,) = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "MUTATIONS"]
    places = [[ast.literal_eval(part) for part in entry.elts[:2]] for entry in table.elts]
    assert not [place for place in places if place[1] not in (PACKAGE / place[0]).read_text()]


def test_no_absolute_imports_of_the_package_no_experimental_torch_and_torch_ao_in_one_file():
    for path in FILES:
        for node in nodes_of(path):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            refused = ("sparsekit_ao", *(() if path.name == "torch_ao.py" else ("torch.ao",)))
            assert not [n for n in names if n.startswith(refused) or "_experimental" in n], path


def test_one_version():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in settings["project"]["dynamic"] and "version" not in settings["project"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "sparsekit_ao.version.__version__"}
    assert f"## [{sparsekit_ao.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
