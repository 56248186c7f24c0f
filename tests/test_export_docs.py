"""The code of docs/export.md runs as one script, and its figures equal those of the committed CSV."""

import contextlib
import csv
import io
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs/export.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def run(blocks, folder, monkeypatch):
    monkeypatch.chdir(folder)
    out, names = io.StringIO(), {"__name__": "docs"}
    with contextlib.redirect_stdout(out):
        for code in blocks:
            exec(compile(code, "docs/export.md", "exec"), names)
    return out.getvalue()


def test_the_code_runs(tmp_path, monkeypatch):
    text = run([code for code in BLOCKS if "aoti" not in code], tmp_path, monkeypatch)
    assert "pack_2_4: 1 of 2 weights" in text and "save_sparse: 1 of 4 weights" in text


@pytest.mark.slow
def test_the_code_that_compiles_ahead_of_time_runs(tmp_path, monkeypatch):
    chosen = [code for code in BLOCKS if "aoti" in code or "torch.export.export(model" in code]
    run([BLOCKS[0], *chosen], tmp_path, monkeypatch)


def test_the_sizes_equal_the_csv():
    with (ROOT / "examples/benchmarks/results/sparse_files.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {(r["target"], r["pattern"], r["dtype"]): r for r in rows}
    for pattern in ("2:4", "50 %", "80 %", "90 %"):
        cells = [found["save_sparse", pattern, d] for d in ("float32", "bfloat16", "int8")]
        text = " | ".join(f"{float(c['of dense']):.3f} | {c['zlib']}" for c in cells)
        assert f"| {pattern} | {text} |" in PAGE
    for r in rows:
        assert not r["at most"] or float(r["of dense"]) <= float(r["at most"]) + 0.001
    core = [float(found["coreml_metadata", p, d]["of dense"]) for d in ("float16", "int8") for p in ("2:4", "90 %")]
    sentence = "2:4 takes {:.3f} and 90 % {:.3f} of the dense float16 file, with int8 {:.3f} and {:.3f}"
    assert sentence.format(*core) in " ".join(PAGE.split())
