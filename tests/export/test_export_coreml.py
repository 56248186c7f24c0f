"""coremltools stores the weights that `coreml_metadata` marks as sparse ones: the converted program is read."""

import pytest
import torch
from export_models import linear, squashed, with_value
from torch import nn

from sparsekit_ao import SparsityError, export, patterns


def model():
    """Three kinds of layers; the last one stays dense."""
    torch.manual_seed(0)
    pruned = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(64, 32))
    return nn.Sequential(*squashed(pruned), nn.Linear(32, 4)).eval()


def test_buffers_and_report():
    plain = model()
    marked, report = export.coreml_metadata(plain, int8=True)
    assert report.converted == ("0.weight", "2.weight") and report.left == {"3.weight": "less than 10% of it is zero"}
    assert not [name for name in plain.state_dict() if "COREML" in name]
    scale = marked[0].get_buffer("_COREML_/weight/quantization_scale")
    assert scale.shape == (16, 1, 1, 1) and marked[2].get_buffer("_COREML_/weight/compression_type").tolist() == [1, 3]
    x = torch.randn(2, 16, 4, 4)
    assert torch.equal(marked(x), plain(x))


def test_bytes_are_those_of_values_and_bits():
    _, report = export.coreml_metadata(squashed(linear(64, 64)))
    assert (report.before, report.after) == (8192, 4096 + 512) and not report.notes
    _, report = export.coreml_metadata(squashed(linear(64, 64), pattern=patterns.n_m(1, 4)), int8=True)
    assert report.after == 1024 + 512


def test_marks_of_an_earlier_call_are_replaced():
    marked, _ = export.coreml_metadata(model(), int8=True)
    again, report = export.coreml_metadata(marked, ["2.weight"])
    assert report.converted == ("2.weight",)
    assert [n for n in again.state_dict() if "COREML" in n] == [
        "_COREML_/metadata_version",
        "2._COREML_/weight/compression_type",
    ]


def test_values_beyond_float16_are_refused():
    with pytest.raises(SparsityError, match=r"0\.weight: needs values up to 65504, those of float16, got 1e\+06"):
        export.coreml_metadata(with_value(squashed(linear()), 1e6))


def test_values_that_coremltools_sets_to_zero_are_reported():
    _, report = export.coreml_metadata(with_value(squashed(linear()), 5e-4, slice(0, 2)), tensors="0.weight")
    assert report.notes == ("0.weight: coremltools sets 128 nonzeros of at most 9.8e-04 to zero",)
    assert "note: 0.weight: coremltools sets" in str(report)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of torch and coremltools
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a folder that it removes twice
@pytest.mark.parametrize("int8", [None, False, True])
def test_the_converted_program_holds_sparse_weights(int8):
    ct = pytest.importorskip("coremltools")
    plain = with_value(model(), 5e-4, (0, slice(0, 2)))
    marked, report = (plain, None) if int8 is None else export.coreml_metadata(plain, int8=int8)
    program = torch.export.export(marked, (torch.randn(2, 16, 4, 4),)).run_decompositions({})
    target = ct.target.iOS18 if int8 else ct.target.iOS16
    converted = ct.convert(program, minimum_deployment_target=target, skip_model_load=True)
    main = converted._mil_program.functions["main"]
    found = main.find_ops(op_type="constexpr_sparse_to_dense")
    assert len(found) == (len(report.converted) if report else 0)
    assert len(main.find_ops(op_type="constexpr_sparse_blockwise_shift_scale")) == len(found) * bool(int8)
    if int8 is False:
        values = sorted(op.nonzero_data.val.size for op in found)
        assert values == sorted(int((w.abs() > 9.8e-4).sum()) for w in (plain[0].weight, plain[2].weight))
        assert "0.weight: coremltools sets" in report.notes[0]
