"""export.openvino: int8 models run on every x86 CPU; sparse weights are used, or the reason why not is given."""

import pytest
import torch
from exported import batches, looks, pruned, same

from sparsekit_ao import SparsityError, export, patterns
from sparsekit_ao.export.openvino import _has_amx

UNSTRUCTURED = patterns.unstructured(0.8)


def test_arguments_are_checked_first():
    model, _ = pruned(pattern=UNSTRUCTURED)
    for rate in (0, 1.5, -0.1):
        with pytest.raises(SparsityError, match="rate must be a fraction above 0"):
            export.openvino(model, batches(), rate=rate)
    if not _has_amx():
        with pytest.raises(SparsityError, match="need_sparse, but sparse weights need amx_int8"):
            export.openvino(model, batches(), need_sparse=True)


def test_a_model_is_converted_runs_and_is_reported(tmp_path):
    openvino = pytest.importorskip("openvino")
    model, _ = pruned(pattern=UNSTRUCTURED)
    before = looks(model)
    converted, report = export.openvino(model, batches())
    assert same(before, model)
    assert report.converted == ("0.weight", "2.weight") and report.rate == pytest.approx(0.8, abs=0.01)
    assert 0 < report.difference < 0.1 and report.after < 0.27 * report.before
    assert all("i8" in kernel.lower() for kernel in report.kernels.values()), report.kernels
    if _has_amx():
        assert report.ran_sparse == report.converted
    else:
        assert not report.ran_sparse and "this CPU has no amx_int8" in str(report)
    assert "0.weight runs as" in str(report)
    (y,) = converted(torch.randn(7, 64))  # another batch size
    assert y.shape == (7, 3)
    openvino.save_model(converted.graph, tmp_path / "model.xml")
    assert (tmp_path / "model.bin").stat().st_size < 40_000


@pytest.mark.skipif(not _has_amx(), reason="sparse weights need a CPU with amx_int8")
def test_sparse_weights_below_the_rate_run_dense():
    pytest.importorskip("openvino")
    model, _ = pruned(pattern=UNSTRUCTURED)
    _, report = export.openvino(model, batches(), rate=0.95)
    assert not report.ran_sparse
    with pytest.raises(SparsityError, match="need_sparse, but 0.weight runs as"):
        export.openvino(model, batches(), rate=0.95, need_sparse=True)
