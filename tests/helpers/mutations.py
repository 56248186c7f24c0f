"""Mutates the library, one small change at a time, and runs the tests that should notice: do the tests fail?

    python tests/helpers/mutations.py [first last]

Each change is made in a copy of the repository, so the checkout stays as it is. Prints one line for each mutation, with
the test that failed; the exit status is the number of those that were not caught. Takes half an hour on one core.
"""

import os
import pathlib
import shutil
import signal
import sys
import tempfile

import pytest
import torch._dynamo  # noqa: F401 (each fork would import it)
from forks import begin, end

ROOT = pathlib.Path(__file__).parents[2]
PROXIMAL = ["test_proximal_operator.py", "test_algebra_literal.py"]
ALGEBRA = ["test_properties.py", "test_axes.py"]
SELECTION = ["test_properties.py", "test_kernels.py", "test_fuzz.py"]
SPARSIFIERS = ["test_fuzz.py", "test_sparsifier.py", "test_config.py"]
DYNAMIC = ["test_dynamic_counts.py", "test_dynamic_sparsifier.py"]
EXPORT = ["test_compact.py", "test_foreign_input.py"]

# (file, text, what replaces its first occurrence, test files)
MUTATIONS = [
    ("structure/budget.py", "blocks + 1e-9", "blocks - 1e-9", ALGEBRA),
    ("structure/budget.py", "0 <= float(level) <= 1", "0 <= float(level) < 1", SPARSIFIERS),
    ("structure/budget.py", "least <= low", "least < low", ALGEBRA),
    ("structure/layout.py", "end > last", "end > last + 1", ALGEBRA),
    (
        "structure/layout.py",
        "if d == 0:\n            return False",
        "if d == 0:\n            return True",
        ["test_fuzz.py"],
    ),
    ("structure/layout.py", "if d <= end:", "if d < end:", ALGEBRA),
    ("structure/layout.py", "return max(size, 1)", "return size", SPARSIFIERS),
    ("structure/view.py", "inside.fill_(False)", "inside.fill_(True)", ["test_fuzz.py"]),
    ("structure/view.py", "n <= 1 or a == b", "n <= 2 or a == b", SPARSIFIERS),
    ("structure/sparse_scope.py", "any(g % n for m", "any(False for m", ALGEBRA),
    ("structure/sparse_scope.py", "(high + k_weight * low)", "(low + k_weight * high)", ALGEBRA),
    ("structure/thresholds.py", "norm > t, (norm - t) / norm", "norm >= t, (norm - t) / t", PROXIMAL),
    ("structure/thresholds.py", "force <= t", "force <= 2 * t", PROXIMAL),
    ("structure/thresholds.py", "most = _scaled(h, dim, eps)", "most = _scaled(h, dim)", PROXIMAL),
    ("structure/thresholds.py", "s + change).clamp_(min=0)", "s + change / 2).clamp_(min=0)", PROXIMAL),
    ("structure/axes.py", "1 if axis in self.scope else -1", "-1 if axis in self.scope else 1", ["test_axes.py"]),
    ("selection/keys.py", "nan = _INF[scores.dtype] + 1", "nan = _INF[scores.dtype]", SELECTION),
    ("selection/keys.py", "torch.where(bits < 0, -(bits & top), bits)", "torch.where(bits < 0, bits, bits)", SELECTION),
    ("selection/reference.py", "stable=True", "stable=False", ["test_kernels.py", "test_rows.py"]),
    ("selection/reference.py", "total / count if as_mean", "total if as_mean", SELECTION),
    ("selection/reference.py", "interleaved.mul_(kept)", "interleaved.copy_(kept.expand_as(interleaved))", SELECTION),
    ("selection/cpu/rows.py", "beaten[j] += wins", "beaten[j] -= wins", SELECTION),
    ("selection/cpu/rows.py", "np.greater_equal(lanes[i]", "np.greater(lanes[i]", SELECTION),
    ("selection/cpu/rows.py", "ties.cumsum(1) <= left", "ties.cumsum(1) < left", SELECTION),
    ("selection/cpu/long.py", "undecided[None], keep - above", "undecided[None], keep", ["test_rows.py"]),
    ("selection/cpu/long.py", "torch.gt(keys, most", "torch.ge(keys, most", ["test_rows.py"]),
    ("selection/cpu/masks.py", "~part.mask, absent", "part.mask, absent", SELECTION),
    ("selection/work.py", "keep.reshape(grid) if keep.ndim", "keep.expand(grid) if keep.ndim", ["test_fuzz.py"]),
    ("selection/api.py", "low < 0 or high > members", "low < -1 or high > members", ["test_kernels.py"]),
    ("selection/threads.py", "for at in range(self._count)", "for at in range(self._count)[::-1]", ["test_threads.py"]),
    ("selection/threads.py", "self._todo.clear()\n            while", "while", ["test_threads.py"]),
    ("sparsifiers/planned.py", "among_kept=component.stage > 0", "among_kept=component.stage > 1", ["test_fuzz.py"]),
    (
        "sparsifiers/planned.py",
        "for stage in sorted(updates)",
        "for stage in sorted(updates, reverse=True)",
        ["test_fuzz.py"],
    ),
    ("sparsifiers/planned.py", ".fill_(True)", ".fill_(False)", ["test_fuzz.py"]),
    ("sparsifiers/component.py", "any(_is_scheduled", "all(_is_scheduled", ["test_fuzz.py"]),
    ("sparsifiers/component.py", "not scheduled:", "True:", SPARSIFIERS),
    ("sparsifiers/mask_check.py", "low != high", "low == high", ["test_fuzz.py"]),
    ("sparsifiers/mask_check.py", "kept > want", "kept > want + 1", SPARSIFIERS),
    ("sparsifiers/mask_check.py", "views[0] != views[1] or", "", ["test_fuzz.py"]),
    ("sparsifiers/config.py", "    refuse_expanded(", "    len if True else (", ["test_fuzz.py"]),
    ("sparsifiers/checkpoint.py", "(own == 0) | (own == 1)", "(own == 0) | (own > 0)", ["test_foreign_input.py"]),
    ("sparsifiers/checkpoint.py", "strict and (set(own)", "False and (set(own)", ["test_foreign_input.py"]),
    (
        "sparsifiers/weight_norm.py",
        "blocks.logical_or_(inside)",
        "blocks.logical_and_(inside)",
        ["test_weight_norm.py"],
    ),
    (
        "sparsifiers/weight_norm.py",
        "fill_(level <= 0 or",
        "fill_(level < 0 or",
        ["test_weight_norm.py"],
    ),
    ("masking/weight_mask.py", "self.mask.fill_(True)", "pass", ["test_masking.py", "test_dynamic_meta.py"]),
    ("dynamic/update.py", "masked_fill_(local(changed), 0)", "masked_fill_(local(changed), 1)", DYNAMIC),
    ("dynamic/update.py", "reset_state(optimizers, weight, changed)", "pass", DYNAMIC),
    ("dynamic/update.py", "budgets.set(k, count)", "pass", DYNAMIC),
    ("dynamic/sparsifier.py", "is_pending = False", "is_pending = True", DYNAMIC),
    ("dynamic/update.py", "masked_fill(best, math.inf)", "masked_fill(best, -math.inf)", DYNAMIC),
    ("coupling/bound.py", "rest and size % rest == 0", "rest", ["test_coupling.py"]),
    ("coupling/bound.py", '"**": ".*"', '"**": "[^.]*"', ["test_coupling.py", "test_for_model.py"]),
    ("removal/manifest.py", "now <= was", "True", ["test_foreign_input.py"]),
    ("removal/manifest.py", 'not n.startswith("_")', "True", ["test_foreign_input.py"]),
    ("removal/manifest.py", "a < b for a, b", "True for a, b", ["test_foreign_input.py"]),
    ("removal/attributes.py", "now // removal.of * removal.kept", "now // removal.of * removal.of", EXPORT),
    ("removal/removal.py", "dropped, units = zero.all(0)", "dropped, units = zero.any(0)", EXPORT),
    ("removal/removal.py", "shape[1] * groups, shape[0]", "shape[0], shape[1] * groups", EXPORT),
]


def outcome(copy, file, old, new, tests):
    """ "caught" and the test that failed, "SURVIVED", or something else for one mutation."""
    path, printed = copy / "sparsekit_ao" / file, copy / "printed.txt"
    text = path.read_text()
    if text.count(old) == 0:
        return "no such text", ""
    path.write_text(text.replace(old, new, 1))
    try:
        code = end(begin(run_tests, copy, tests, printed))
    finally:
        path.write_text(text)
    failed = [
        line.split(" ", 1)[1].split(" - ")[0]
        for line in printed.read_text().splitlines()
        if line.startswith(("FAILED", "ERROR "))
    ]
    if code == 0:
        return "SURVIVED", ""
    return ("caught", failed[0]) if code == 1 and failed else (f"exit code {code}", "")


def run_tests(copy, tests, printed):
    """In a fork, which has imported torch and pytest, but not the library."""
    signal.alarm(600)  # a mutation may also make an endless loop
    file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(copy)
    sys.path[:0] = [str(copy), str(copy / "tests" / "helpers")]
    os.environ |= {"PYTHONPATH": f"{copy}:{copy / 'tests' / 'helpers'}", "SPARSEKIT_AO_FUZZ": "200"}
    arguments = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:randomly"]
    files = [str(next((copy / "tests").rglob(t))) for t in tests]
    code = pytest.main([*arguments, *files])
    sys.stdout.flush()
    sys.exit(code)


def main():
    first, last = map(int, sys.argv[1:3]) if len(sys.argv) > 2 else (0, len(MUTATIONS))
    left = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "examples"))
        for number, mutation in enumerate(MUTATIONS[first:last], first):
            found, test = outcome(copy, *mutation)
            left += found != "caught"
            what = " -> ".join(" ".join(t.split()) or "nothing" for t in mutation[1:3])
            print(f"{number:2}  {found}  {mutation[0]}: {what}  {test.removeprefix('tests/')}".rstrip(), flush=True)
    print(f"{left} not caught")
    return left


if __name__ == "__main__":
    sys.exit(main())
