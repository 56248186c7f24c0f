"""What `check` and `report` count, against plain definitions; the bar that they show."""

import pytest
import torch
from grids import grid
from kernel_cases import as_scopes, plain_window
from torch import nn

from sparsekit_ao import ScopeSparsifier, patterns
from sparsekit_ao.models import progress
from sparsekit_ao.sparsifiers import scope
from sparsekit_ao.structure.windows import kept_flags, kept_grid, to_scopes


@pytest.mark.parametrize(
    ("shape", "block", "tile", "dtype", "layout"),
    grid(
        [(48, 64), (50, 70)],
        [(1, 1), (1, 2), (2, 8), (3, 5)],
        [(1, 4), (-1, -1), (1, -1), (3, 7)],
        [torch.bool, torch.float32],
        ["contiguous", "transposed", "padded"],
    ),
)
def test_kept_blocks_are_counted_as_plain_loops_count_them(shape, block, tile, dtype, layout):
    mask = (plain_window(shape, torch.float32, layout)[0] > 1).to(dtype)
    scopes = as_scopes(mask, mask, block, tile)
    tiles = [[t.ravel() for t in rows.split(block[1], 1)] for rows in mask.bool().split(block[0], 0)]
    flags = torch.tensor([[bool(t.any()) for t in row] for row in tiles])
    assert torch.equal(kept_flags(scopes.windows[0]), flags) and torch.equal(kept_grid(scopes.windows, 2), flags)
    whole = torch.tensor([[bool(t.all()) for t in row] for row in tiles])
    assert torch.equal(kept_flags(scopes.windows[0], every=True), whole)
    counts = [int(f.sum()) for rows in flags.split(scopes.shape[0], 0) for f in rows.split(scopes.shape[1], 1)]
    assert to_scopes(flags, scopes, False).sum(1).tolist() == counts


@pytest.mark.parametrize(("pattern", "kept"), [(patterns.n_m(2, 4), 2048), ({"block_shape": (1, 4)}, 512)])
def test_check_and_report_count_kept_blocks_and_show_a_bar_on_a_terminal(pattern, kept, monkeypatch, capsys):
    sparsifier = ScopeSparsifier(0.5)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    sparsifier.prepare(model, [{"tensor_fqn": f"{at}.weight", **pattern} for at in range(3)])
    monkeypatch.setattr(progress, "LARGE", 3 * 64 * 64)
    monkeypatch.setattr(progress, "AFTER", 0.0)
    monkeypatch.setattr(scope, "AT_ONCE", 64 * 64)
    for is_terminal in (False, True):
        monkeypatch.setattr("sys.stderr.isatty", lambda is_terminal=is_terminal: is_terminal)
        for title in ("step", "check", "report"):
            result = getattr(sparsifier, title)()
            assert (title in capsys.readouterr().err) is is_terminal
    assert [(row.kept, row.blocks, row.sparsity) for row in result] == [(kept, 2 * kept, 0.5)] * 3
