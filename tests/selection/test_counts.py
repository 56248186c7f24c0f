"""What `check` and `report` count, and the bar that they show."""

import pytest
from torch import nn

from sparsekit_ao import ScopeSparsifier, patterns
from sparsekit_ao.models import progress
from sparsekit_ao.sparsifiers import scope


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
