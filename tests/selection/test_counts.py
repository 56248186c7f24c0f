"""`check` and `report` read each mask once, whatever the pattern, and count as the plain definitions do."""

import math

import pytest
import torch
from grids import grid
from kernel_cases import generator
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sparsekit_ao import ScopeSparsifier, patterns
from sparsekit_ao.selection import Blocks, Scopes
from sparsekit_ao.selection.counts import are_whole, kept_blocks, kept_flags
from sparsekit_ao.sparsifiers import progress


class Written(TorchDispatchMode):
    """Counts the bytes of new tensors."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not (function.is_view or out._base is not None):
            self.total += out.numel() * out.itemsize
        return out


@pytest.mark.parametrize("pattern", [patterns.n_m(2, 4), patterns.unstructured(0.5), {"block_shape": (1, 4)}])
def test_the_work_of_check_and_report(pattern):
    model = nn.Sequential(nn.Linear(512, 512, bias=False, dtype=torch.bfloat16))
    sparsifier = ScopeSparsifier(0.5)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight", **pattern}])
    sparsifier.step()
    elements = 512 * 512
    for call, most in ((sparsifier.check, 1.5), (sparsifier.report, 0.5)):
        with Written() as written:
            call()
        assert written.total <= most * elements


def plainly(mask, block, scope):
    """(kept, whole): for each block of a padded mask whether any and every element is kept."""
    flags = mask != 0
    for k, n in enumerate(block):
        flags = torch.stack([f.any(k) for f in flags.split(n, k)], k)
    counts = flags
    for k, n in enumerate(scope):
        counts = torch.stack([c.sum(k) for c in counts.long().split(n, k)], k)
    return flags, counts


@pytest.mark.parametrize(
    ("shape", "block", "scope", "dtype", "layout"),
    grid(
        [(48, 64), (50, 70), (256, 512)],
        [(1, 1), (1, 2), (1, 4), (2, 8), (3, 5)],
        [(1, 4), (-1, -1), (1, -1), (-1, 1), (3, 7)],
        [torch.bool, torch.float32],
        ["contiguous", "transposed", "offset"],
    ),
)
def test_counts(shape, block, scope, dtype, layout):
    whole = torch.rand(shape[0] + 1, shape[1] + 3, generator=generator()) < 0.3
    mask = {
        "contiguous": whole[1:, 3:].contiguous(),
        "transposed": whole[1:, 3:].t().contiguous().t(),
        "offset": whole[1:, 3:],
    }[layout].to(dtype)
    member = Blocks(shape=block, mask=mask)
    sizes = [g if s == -1 else s for g, s in zip(member.grid, scope, strict=True)]
    flags, counts = plainly(mask, block, sizes)
    assert torch.equal(kept_flags(member) != 0, flags)
    assert torch.equal(kept_blocks(Scopes(members=(member,), shape=tuple(sizes))).long(), counts)
    assert are_whole(member) is (math.prod(block) == 1)
    filled = flags.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]
    assert are_whole(Blocks(shape=block, mask=filled.to(dtype)))


def test_a_bar_on_a_terminal_only_and_for_large_models_only(monkeypatch, capsys):
    sparsifier = ScopeSparsifier(nnz=2, scope_shape=(1, 4))
    sparsifier.prepare(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))))
    calls = (sparsifier.step, sparsifier.check, sparsifier.report)
    monkeypatch.setattr(progress, "LARGE", 3 * 64 * 64)
    monkeypatch.setattr(progress, "AFTER", 0.0)
    for call in calls:
        call()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for call, title in zip(calls, ("step", "check", "report"), strict=True):
        call()
        assert title in capsys.readouterr().err
    monkeypatch.setattr(progress, "LARGE", 3 * 64 * 64 + 1)
    for call in calls:
        call()
    assert capsys.readouterr() == ("", "")
