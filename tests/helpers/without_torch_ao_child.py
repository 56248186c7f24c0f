"""Tests of sparsifiers where `torch.ao.pruning` cannot be imported; states are written with it, and without it after.

`test_torch_ao_users.py` reads `with.pt`, which a fork writes with torch.ao, and `without.pt`, which this process writes
after loading it.
"""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
FILES = {  # those of the normal suite, and the rest
    False: ("sparsifiers/test_torch_ao_users.py", "sparsifiers/test_sparsifier.py", "package/test_schedules.py"),
    True: ("sparsifiers", "masking", "oneshot", "package/test_schedules.py", "dynamic/test_dynamic_counts.py"),
}
OF_STOCK = ("torch_ao_faults", "weight_norm", "nearly_diagonal")  # files that compare with torch.ao's sparsifiers


def parts(weight_norm):
    """Sparsifiers of 8 x 8 weights, by this class and by one of ours, with a scheduler each."""
    import torch

    from sparsekit_ao import ScopeSparsifier, schedules
    from sparsekit_ao.torch_ao import CubicSL

    torch.manual_seed(0)
    one, other = weight_norm(0.5), ScopeSparsifier(0.75)
    for sparsifier in (one, other):
        sparsifier.prepare(torch.nn.Sequential(torch.nn.Linear(8, 8)), [{"tensor_fqn": "0.weight"}])
    ours = schedules.ScheduleSL(other, schedules.linear(0.0, 0.75, 4))
    return one, CubicSL(one, delta_t=1, total_t=4), other, ours


def advance(found):
    """Step both sparsifiers, and then their schedulers."""
    for part in found:
        part.step()


def what_is_saved(found):
    """Masks and levels, and levels and steps of the schedulers."""
    one, cubic, other, ours = found
    layers = [sparsifier.groups[0]["module"] for sparsifier in (one, other)]
    masks = [layer.parametrizations.weight[0].mask.tolist() for layer in layers]
    levels = [sparsifier.groups[0]["sparsity_level"] for sparsifier in (one, other)]
    return masks, levels, [(s.last_epoch, s.get_last_sl()) for s in (cubic, ours)]


def write(path, found):
    """Write all states, and what a process that loads them must find."""
    import torch

    torch.save(([part.state_dict() for part in found], what_is_saved(found)), path)


def read(path, found):
    """Load the states, and check that what was saved is there."""
    import torch

    states, expected = torch.load(path, weights_only=False)
    for part, state in zip(found, states, strict=True):
        part.load_state_dict(state)
    assert what_is_saved(found) == expected


class Refuse:
    """An import hook: torch has no torch.ao.pruning."""

    def find_spec(self, name, path=None, target=None):
        """Raise as for a module that is not there."""
        if name.startswith("torch.ao.pruning"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def main():
    """Write, load, write, and run the tests."""
    if not (fork := os.fork()):
        from torch.ao.pruning import WeightNormSparsifier as Stock

        found = parts(Stock)
        advance(found)
        write("with.pt", found)
        os._exit(0)
    assert os.waitpid(fork, 0)[1] == 0
    sys.meta_path.insert(0, Refuse())

    from grids import EXHAUSTIVE

    import sparsekit_ao

    found = parts(sparsekit_ao.WeightNormSparsifier)
    read("with.pt", found)
    advance(found)
    write("without.pt", found)

    import pytest

    chosen = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(TESTS.parent),
        "-k",
        "not kept_first and not without_torch_ao",
    ]
    chosen += [f"--ignore-glob={TESTS}/*test_{name}.py" for name in OF_STOCK]  # a relative one is of this folder
    result = pytest.main([*chosen, *(str(TESTS / name) for name in FILES[EXHAUSTIVE])])
    assert sparsekit_ao.torch_ao.BaseSparsifier.__module__ == "sparsekit_ao.torch_ao"
    assert not [name for name in sys.modules if name.startswith("torch.ao.pruning")]
    sys.exit(result)


if __name__ == "__main__":
    main()
