"""The house keeps its rules: a light import, a ladder of imports, one version."""

import ast
import json
import pathlib
import subprocess
import sys
import tomllib

import pytest

import sparsekit_ao

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "sparsekit_ao"
HEAVY = ("triton", "torchao", "matplotlib", "transformers", "numba", "sklearn", "torch.distributed.tensor")

# Each rung may import those before it, never those after.
LADDER = [
    "errors",
    "layout",
    "kernels",
    "spec",
    "schedules",
    "densities",
    "pages",
    "select",
    "distributed",
    "masking",
    "config",
    "structure",
    "plan",
    "report",
    "saved",
    "garbage",
    "base",
    "sparsifier",
    "weight_norm",
    "nearly_diagonal",
    "dynamic",
    "schedulers",
    "patterns",
    "groups",
    "export",
    "plot",
    "integrations",
]
INSIDE = {
    "kernels": [
        "tiling",
        "nests",
        "keys",
        "radix",
        "sample",
        "cores",
        "threads",
        "reference",
        "rows",
        "long",
        "cpu",
        "jit",
        "update",
        "triton",
        "gpu",
        "proximal",
        "api",
        "batch",
    ],
    "kernels/triton": [
        "device",
        "ranking",
        "forms",
        "parts",
        "specialise",
        "table",
        "reasons",
        "plan",
        "fused",
        "blocks",
        "wide",
        "narrow",
        "passes",
        "shrink",
        "ready",
        "select",
        "launch",
        "threshold",
    ],
    "kernels/jit": ["window", "edges", "folding", "loops", "wide", "launch"],
    "spec": ["axes", "view", "threshold", "in_place", "block", "budget", "sparse_scope", "scope", "coupling"],
    "groups": ["names", "values", "bound", "group", "discovery", "ready"],
    "groups/ready": ["layouts", "transformer", "resnet", "for_model"],
    "groups/discovery": [
        "factors",
        "call",
        "pointwise",
        "shapes",
        "products",
        "lookups",
        "rules",
        "trace",
        "ties",
        "fold",
        "discover",
    ],
    "export": ["layers", "kept", "cut", "attributes", "norms", "manifest", "report", "verify", "compact"],
    "distributed": ["placement", "tensors", "agreement", "pieces", "together", "update", "fsdp"],
    "dynamic": [
        "draws",
        "masking",
        "slots",
        "rules",
        "prune",
        "grow",
        "redistribute",
        "inits",
        "settings",
        "budgets",
        "optimizer_state",
        "trained",
        "parts",
        "update",
        "choice",
        "start",
        "hooks",
        "gradients",
        "movement",
        "turnover",
        "arrival",
        "progress",
        "sparsifier",
        "decay",
        "straight_through",
        "methods",
    ],
}


def test_import_in_a_fresh_process_is_light_and_touches_no_cuda():
    code = (
        "import sys, json; before = set(sys.modules); import torch, torch.ao.pruning; base = set(sys.modules);"
        "import sparsekit_ao; new = sorted(set(sys.modules) - base);"
        "print(json.dumps([new, torch.cuda.is_initialized()]))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    new, cuda = json.loads(out)
    assert not [m for m in new if m.split(".")[0] in HEAVY or m in HEAVY]
    assert {m.split(".")[0] for m in new} <= {"sparsekit_ao", "einops"}
    assert not cuda


def test_import_alone_loads_nothing_heavy():
    code = "import sys, json; import sparsekit_ao; print(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert not [m for m in json.loads(out) if m in HEAVY]


def test_plain_tensors_import_no_dtensor():
    code = (
        "import sys, torch, sparsekit_ao; m = torch.nn.Sequential(torch.nn.Linear(8, 4));"
        "s = sparsekit_ao.ScopeSparsifier(); s.prepare(m, None); s.step(); m(torch.ones(1, 8)); s.check(); s.report();"
        "s.load_state_dict(s.state_dict()); s.squash_mask(); sys.exit('torch.distributed.tensor' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def rung(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def relative_imports(path: pathlib.Path) -> list[tuple[int, list[str]]]:
    """(level, dotted parts) of every relative import in a file, wherever it stands."""
    found = []
    tree = ast.parse(path.read_text())
    tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = node.module.split(".") if node.module else []
            found += [(node.level, base)] if base else [(node.level, [a.name]) for a in node.names]
    return found


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_climb_the_ladder(path):
    own = rung(path)
    assert own in LADDER, f"{own} has no rung: add it to the ladder here and to the map"
    folders = path.relative_to(PACKAGE).parts[:-1]
    for level, parts in relative_imports(path):
        folders = path.relative_to(PACKAGE).parts[:-1]  # level 1 is the folder itself, each more one folder up
        up = len(folders) - level + 1
        room = INSIDE["/".join(folders[:up])] if up else LADDER
        within = folders[up] if up < len(folders) else path.stem
        assert room.index(parts[0]) < room.index(within), f"{path.name} imports {parts[0]}"


def test_no_absolute_imports_of_the_package_and_no_experimental_torch():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not [n for n in names if n.startswith("sparsekit_ao") or "_experimental" in n], path


def test_the_map_names_every_room():
    readme = (PACKAGE / "README.md").read_text()
    rooms = {p.name for p in PACKAGE.iterdir() if p.suffix == ".py" and p.name != "__init__.py"}
    rooms |= {f"{p.name}/" for p in PACKAGE.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert not [room for room in rooms if room not in readme]


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == sparsekit_ao.__version__
    assert f"## [{sparsekit_ao.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_public_name_has_a_docstring():
    for name in sparsekit_ao.__all__:
        assert getattr(sparsekit_ao, name).__doc__, name
