"""The code of docs/export.md runs as one script, and its figures equal those of the committed CSV."""

import contextlib
import csv
import io
import pathlib
import re

import pytest
import torch
from export_models import TWO_FOUR, masked
from grids import EXHAUSTIVE
from torch import nn

from sparsekit_ao import patterns

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/export.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)

AHEAD_OF_TIME = pytest.mark.skipif(not EXHAUSTIVE, reason="compiles C++ for half a minute: SPARSEKIT_AO_EXHAUSTIVE=1")
pytestmark = [  # of torch.export
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
]


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


@AHEAD_OF_TIME
def test_the_code_that_compiles_ahead_of_time_runs(tmp_path, monkeypatch):
    chosen = [code for code in BLOCKS if "aoti" in code or "torch.export.export(model" in code]
    run([BLOCKS[0], *chosen], tmp_path, monkeypatch)


def test_the_sizes_equal_the_csv():
    with (ROOT / "examples/benchmarks/results/sparse_files.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {(r["target"], r["pattern"], r["dtype"]): r for r in rows}
    for pattern in ("2:4", "50 %", "80 %", "90 %"):
        cells = [found["save_sparse", pattern, d] for d in ("float32", "bfloat16", "int8", "int8, one scale")]
        text = " | ".join(f"{float(c['of dense']):.3f} | {c['zlib']}" for c in cells)
        assert f"| {pattern} | {text} |" in PAGE
    for r in rows:
        assert not r["at most"] or float(r["of dense"]) <= float(r["at most"]) + 0.001
    core = [float(found["coreml_metadata", p, d]["of dense"]) for d in ("float16", "int8") for p in ("2:4", "90 %")]
    sentence = "2:4 takes {:.3f} and 90 % {:.3f} of the dense float16 file, with int8 {:.3f} and {:.3f}"
    assert sentence.format(*core) in " ".join(PAGE.split())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Sparse BSR tensor support")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_blocks_run_as_bsr_tensors_on_a_gpu(dtype):
    model = nn.Sequential(nn.Linear(256, 128, bias=False))
    masked(model, pattern=patterns.blocks(16, 16, 0.8)).squash_mask()
    model.cuda().to(dtype)
    x = torch.randn(64, 256, device="cuda", dtype=dtype)
    expected = model(x)
    weight = model[0].weight.detach().to_sparse_bsr((16, 16))
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    torch.testing.assert_close(model(x), expected, rtol=2e-2, atol=2e-2)


@pytest.fixture
def masked_model():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    masked(model, **TWO_FOUR)
    return model, torch.randn(4, 64)


def test_masked_models_are_exported_with_their_masks(masked_model, tmp_path):
    model, x = masked_model
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "x.pt2")
    program = torch.export.load(tmp_path / "x.pt2")
    torch.testing.assert_close(program.module()(x), model(x))
    assert "0.parametrizations.weight.0.mask" in program.state_dict


@AHEAD_OF_TIME
def test_masked_models_are_compiled_ahead_of_time(masked_model, tmp_path):
    model, x = masked_model
    program = torch.export.export(model, (x,))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "x.pt2"))
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), model(x))
