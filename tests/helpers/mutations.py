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
PROXIMAL = ["test_proximal_operator.py", "test_by_hand.py"]
STRUCTURE = ["test_properties.py", "test_axes.py"]
SELECTION = ["test_properties.py", "test_rule.py", "test_fuzz.py"]
SPARSIFIERS = ["test_fuzz.py", "test_sparsifier.py", "test_config.py"]
DYNAMIC = ["test_dynamic_counts.py", "test_dynamic_properties.py", "test_dynamic_sparsifier.py"]
REMOVAL = ["test_compact.py", "test_foreign_input.py"]

# (file, text, what replaces its first occurrence, test files)
MUTATIONS = [
    ("structure/scopes.py", "blocks + 1e-9", "blocks - 1e-9", STRUCTURE),
    ("structure/scopes.py", "0 <= float(level) <= 1", "0 <= float(level) < 1", SPARSIFIERS),
    ("structure/scopes.py", "least <= low", "least < low", STRUCTURE),
    ("structure/scopes.py", "!= math.prod(self.block.grid_shape)", "< 0", STRUCTURE),
    ("structure/scopes.py", "(high + k_weight * low)", "(low + k_weight * high)", STRUCTURE),
    ("structure/view.py", "end > last", "end > last + 1", STRUCTURE),
    (
        "structure/view.py",
        "if d == 0:\n            return False",
        "if d == 0:\n            return True",
        ["test_fuzz.py"],
    ),
    ("structure/view.py", "if d <= end:", "if d < end:", STRUCTURE),
    ("structure/view.py", "max(size, 1) if entry == -1", "size if entry == -1", SPARSIFIERS),
    ("structure/view.py", "full.copy_(target)", "full.fill_(0)", STRUCTURE),
    ("structure/view.py", "n <= 1 or a == b", "n <= 2 or a == b", SPARSIFIERS),
    ("structure/thresholds.py", "norm > t, (norm - t) / norm", "norm >= t, (norm - t) / t", PROXIMAL),
    ("structure/thresholds.py", "force <= t", "force <= 2 * t", PROXIMAL),
    ("structure/thresholds.py", "most = _scaled(h, dim, eps)", "most = _scaled(h, dim)", PROXIMAL),
    ("structure/thresholds.py", "s + change).clamp_(min=0)", "s + change / 2).clamp_(min=0)", PROXIMAL),
    ("structure/axes.py", "1 if axis in self.scope else -1", "-1 if axis in self.scope else 1", ["test_axes.py"]),
    ("structure/rule.py", "nan = INF[scores.dtype] + 1", "nan = INF[scores.dtype]", SELECTION),
    ("structure/rule.py", "torch.where(bits < 0, -(bits & top), bits)", "torch.where(bits < 0, bits, bits)", SELECTION),
    ("structure/rule.py", "descending=True, stable=True", "descending=True", ["test_rule.py", "test_fill_masks.py"]),
    ("structure/windows.py", "total / count if isinstance", "total if isinstance", SELECTION),
    ("structure/windows.py", "interleaved.mul_(kept)", "interleaved.copy_(kept.expand_as(interleaved))", SELECTION),
    ("selection/cpu.py", "beaten[j] += wins", "beaten[j] -= wins", SELECTION),
    ("selection/cpu.py", "np.greater_equal(lanes[i]", "np.greater(lanes[i]", SELECTION),
    ("selection/cpu.py", "<= room[rows])", "< room[rows])", SELECTION),
    ("selection/cpu.py", "room = keep - sum(part.above for part in parts)", "room = keep", ["test_fill_masks.py"]),
    ("selection/cpu.py", "self._kept = keys > high", "self._kept = keys >= high", ["test_fill_masks.py"]),
    ("selection/cpu.py", "within > 0, keys, wide(_iinfo(bits.dtype).min)", "within > 0, keys, 0", SELECTION),
    ("selection/cpu.py", "np.arange(width - 1, -1, -1", "np.arange(width", SELECTION),
    (
        "selection/cpu.py",
        "np.arange(first, first - width, -1",
        "np.arange(first - width, first",
        ["test_fill_masks.py"],
    ),
    ("selection/api.py", "low < 0 or high > slots", "low < -1 or high > slots", ["test_rule.py"]),
    ("sparsifiers/groups.py", "within_mask=self.stage > 0", "within_mask=self.stage > 1", ["test_fuzz.py"]),
    ("sparsifiers/groups.py", "    is_scheduled = True", "    is_scheduled = False", ["test_fuzz.py"]),
    ("sparsifiers/groups.py", "self.own_budgets.get(name) or", "", SPARSIFIERS),
    ("sparsifiers/groups.py", "is None or is_scheduled else", "is None else", SPARSIFIERS),
    (
        "sparsifiers/scope.py",
        "for stage in sorted(stages)",
        "for stage in sorted(stages, reverse=True)",
        ["test_fuzz.py"],
    ),
    ("sparsifiers/scope.py", "mask.fill_(True)", "mask.fill_(False)", ["test_fuzz.py"]),
    ("sparsifiers/report.py", "low != high", "low == high", ["test_fuzz.py"]),
    ("sparsifiers/report.py", "counts > want", "counts > want + 1", SPARSIFIERS),
    ("sparsifiers/report.py", "views[0] != views[1] or", "", ["test_fuzz.py"]),
    ("sparsifiers/config.py", "    refuse_expanded(", "    len if True else (", ["test_fuzz.py"]),
    ("sparsifiers/checkpoint.py", "(part == 0) | (part == 1)", "(part == 0) | (part > 0)", ["test_foreign_input.py"]),
    ("sparsifiers/checkpoint.py", "strict and not set(live)", "False and not set(live)", ["test_foreign_input.py"]),
    ("sparsifiers/drop_ins.py", "blocks.logical_or_(inside)", "blocks.logical_and_(inside)", ["test_weight_norm.py"]),
    ("sparsifiers/drop_ins.py", '"sparsity_level"] <= 0 or', '"sparsity_level"] < 0 or', ["test_weight_norm.py"]),
    ("masking/weight_mask.py", "return np.array_equal(now, before)", "return True", ["test_saved_masks.py"]),
    ("masking/weight_mask.py", "self.mask.fill_(True)", "pass", ["test_masking.py", "test_dynamic_meta.py"]),
    ("dynamic/update.py", "masked_fill_(changed, 0)", "masked_fill_(changed, 1)", DYNAMIC),
    ("dynamic/update.py", "reset_state(optimizers, parts.parameter, parts.put_back(changed))", "pass", DYNAMIC),
    ("dynamic/update.py", "budgets.set(k, count)", "pass", DYNAMIC),
    ("dynamic/sparsifier.py", "is_pending = False", "is_pending = True", DYNAMIC),
    ("dynamic/update.py", "masked_fill(best, math.inf)", "masked_fill(best, -math.inf)", DYNAMIC),
    ("coupling/bound.py", "rest and size % rest == 0", "rest", ["test_coupling.py"]),
    ("coupling/bound.py", '"**": ".*"', '"**": "[^.]*"', ["test_coupling.py"]),
    ("removal/manifest.py", "<= change.now <= was", "<= change.now", ["test_foreign_input.py"]),
    ("removal/manifest.py", 'not n.startswith("_")', "True", ["test_foreign_input.py"]),
    ("removal/manifest.py", "kept.diff() <= 0", "kept.diff() < 0", ["test_foreign_input.py"]),
    (
        "removal/sizes.py",
        "// removal.scope_units * removal.kept",
        "// removal.scope_units * removal.scope_units",
        REMOVAL,
    ),
    ("removal/remove.py", "dropped, units = zero.all(0)", "dropped, units = zero.any(0)", REMOVAL),
    (
        "removal/remove.py",
        "else (shape[1] * groups, shape[0])",
        "else (shape[0], shape[1] * groups)",
        ["test_compact_exact.py"],
    ),
    ("oneshot/dry.py", "undone.callback(p.copy_, p.clone())", "pass", ["test_dry.py"]),
    ("oneshot/dry.py", "passes * step", "step", ["test_dry.py"]),
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
