"""Draws small mutations of one room of the library at random and runs its tests: what share of them do they notice?

    python tests/helpers/drawn_mutations.py ROOM COUNT SEED [TESTS ...]

ROOM is a folder of the package, or a file without its ending; TESTS are folders or files of tests/, by default the
folder of the same name. A mutation flips a comparison, `and` or `or`, moves an integer by 1, or drops a statement.
Prints those that no test noticed, and the share of the others, to which crashes and endless loops belong. Some of those
that are printed change nothing that anybody could notice.
"""

import ast
import collections
import pathlib
import random
import shutil
import sys
import tempfile

from mutations import ROOT, outcome

FLIPPED = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn, ast.And: ast.Or}
FLIPPED |= {other: operator for operator, other in FLIPPED.items()}
LEFT_ALONE = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Pass, ast.Global, ast.Nonlocal)


def replacements(node):
    """What may stand in the place of a node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in FLIPPED:
        return [ast.Compare(node.left, [FLIPPED[type(node.ops[0])](), *node.ops[1:]], node.comparators)]
    if isinstance(node, ast.BoolOp):
        return [ast.BoolOp(FLIPPED[type(node.op)](), node.values)]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return [ast.Constant(node.value - 1), ast.Constant(node.value + 1)]
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return [ast.Pass()] if isinstance(node, ast.stmt) and not isinstance(node, LEFT_ALONE) and not is_text else []


def places(files):
    """All (file, node, what may replace it), by the kind of change; texts with values in them are left alone."""
    found = collections.defaultdict(list)
    for file in files:
        tree = ast.parse(file.read_text())
        texts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
        for node in ast.walk(tree):
            for other in () if id(node) in texts else replacements(node):
                found[type(other)].append((file, node, other))
    return found


def changed(text, node, other):
    """The text of a file with `other` in the place of a node, whose columns count bytes; also both as text."""
    lines = text.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    before, old, after = (
        part.decode() for part in (b"".join(lines)[:start], b"".join(lines)[start:end], b"".join(lines)[end:])
    )
    new = ast.unparse(other)
    return before + (f"({new})" if isinstance(other, ast.expr) else new) + after, old, new


def main(room, count, seed, *tests):
    count, draw, package = int(count), random.Random(int(seed)), ROOT / "sparsekit_ao"
    found = places(sorted([*package.glob(f"{room}.py"), *package.glob(f"{room}/**/*.py")]))
    tests, caught = tests or [pathlib.Path(room).parts[0]], 0
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "out"))
        text = (package / "__init__.py").read_text()
        if outcome(copy, "__init__.py", text, text, tests)[0] != "SURVIVED":
            sys.exit(f"the tests {tests} do not pass as they are")
        for _ in range(count):
            kind = found[draw.choice(sorted(filter(found.get, found), key=str))]
            file, node, other = kind.pop(draw.randrange(len(kind)))
            mutated, old, new = changed(text := file.read_text(), node, other)
            if outcome(copy, file.relative_to(package), text, mutated, tests)[0] != "SURVIVED":
                caught += 1
                continue
            print(f"{file.relative_to(package)}:{node.lineno}: {' '.join(old.split())} -> {new}", flush=True)
    print(f"{caught} of {count} caught ({caught / count:.0%})")


if __name__ == "__main__":
    main(*sys.argv[1:])
