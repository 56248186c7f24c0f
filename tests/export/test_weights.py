"""`check` refuses what a function cannot take, with tensor, rule and first place; `report` names patterns."""

import contextlib
import re

import pytest
import torch
from export_models import TWO_FOUR, Tied, batches, linear, looks, masked, mlp, same, squashed, with_value
from torch import nn
from torch.ao.pruning import WeightNormSparsifier
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from sparsekit_ao import ScopeSparsifier, SparsityError, export, patterns
from sparsekit_ao.export import weights
from sparsekit_ao.export.weights import layers_of
from sparsekit_ao.plot import plot_layers

HALF = torch.float16
CONVERT = {  # everything here is refused before torchao is imported
    "to_2_4": lambda model, path: export.check(model, "to_2_4"),  # without CUDA it converts nothing
    "quantize": lambda model, path: export.quantize(model, object(), batches()),
}


def tied(dtype=HALF):
    """Two layers of one 2:4 weight, as after squash_mask and tying."""
    model = Tied()
    with torch.no_grad():
        model.a.weight[:, ::2] = 0
    return model.to(dtype)


def one_memory():
    """Two parameters of one memory, which are not one object."""
    model = tied()
    model.b.weight = nn.Parameter(model.a.weight.data)
    return model


def dense_part():
    return nn.Sequential(*squashed(linear(), HALF), nn.Linear(32, 64).half())


def normed():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(squashed(linear(), HALF)[0]))


def conv1d():
    model = nn.Sequential(type("Conv1D", (nn.Module,), {"__module__": "transformers.pytorch_utils"})())
    model[0].weight = squashed(linear(), HALF)[0].weight
    return model


BOTH = [  # model, what the error of both functions must contain
    (tied, r"a\.weight: needs a weight of its own, but it is shared with b\.weight"),
    (one_memory, r"a\.weight: needs a weight of its own, but it is shared with b\.weight"),
    (lambda: with_value(squashed(linear(), HALF), torch.nan, (0, slice(0, 64, 2))), r"got nan at \[0, 0\]"),
    (lambda: with_value(squashed(linear(), HALF), torch.inf), r"needs finite values, got inf at \[3, 5\]"),
    (normed, "0.weight: is computed by _WeightNorm; call torch.nn.utils.parametrize.remove_param"),
    (lambda: nn.Sequential(squashed(nn.Conv2d(64, 32, 1), HALF)), "Linear, got weight of Conv2d"),
    (conv1d, "got weight of Conv1D; Conv1D stores its weight transposed"),
    (lambda: linear(dtype=HALF), "no weight is masked, and none has a tenth of zeros"),
    (lambda: squashed(linear(), torch.float64), "0.weight: needs float.*, got float64"),
]
PACK = [
    (lambda: squashed(linear(), HALF, pattern=patterns.n_m(4, 8)),
     r"0\.weight: needs at most 2 nonzeros in every 4 along dimension 1, got [34] at \[\d+, \d+:\d+\]"),
    (lambda: squashed(linear(), HALF, block_shape=(1, 1), scope_shape=(4, 1), nnz=2),
     r"along dimension 1, got [34] at \[0, \d+:\d+\]; it is 2:4 along dimension 0"),
    (lambda: squashed(linear()), "0.weight: needs float16 or bfloat16 or int8, got float32"),
    (lambda: squashed(linear(48), HALF), "0.weight: needs dimension 0 to be a multiple of 32, got 48"),
    (lambda: squashed(linear(16, 64), torch.int8), "dimension 1 to be a multiple of 128, got 64"),
]  # fmt: skip
REFUSED = [*((t, *case) for t in CONVERT for case in BOTH), *(("to_2_4", *case) for case in PACK)]


@pytest.mark.parametrize(("target", "make", "text"), REFUSED, ids=[f"{r[0]}-{k}" for k, r in enumerate(REFUSED)])
def test_what_is_refused_is_refused_before_anything_changes(target, make, text, tmp_path):
    model = make()
    before = looks(model)
    with pytest.raises(SparsityError, match=text):
        export.check(model, target)
    with pytest.raises(SparsityError, match=text):
        CONVERT[target](model, tmp_path / "out")
    assert not list(tmp_path.iterdir()) and same(before, model)


def test_masks_are_checked_but_not_converted(tmp_path):
    target = "quantize"
    model = linear(dtype=HALF)
    sparsifier = masked(model, **TWO_FOUR)
    with torch.no_grad():  # a nan under a mask is no value of the weight
        model[0].parametrizations.weight.original[model[0].weight == 0] = torch.nan
    assert [layer.fqn for layer in export.check(model, target)] == ["0.weight"]
    before = looks(model)
    with pytest.raises(SparsityError, match=rf"{target}: 0.weight still has its mask.*squash_mask"):
        CONVERT[target](model, tmp_path / "out")
    assert same(before, model) and not list(tmp_path.iterdir())
    sparsifier.squash_mask()
    assert [layer.fqn for layer in export.check(model, target)] == ["0.weight"]


def test_a_mask_of_another_pattern_is_found_before_squash():
    model = linear(dtype=HALF)
    masked(model, block_shape=(1, 1), scope_shape=(4, 1), nnz=2)
    with pytest.raises(SparsityError, match=r"it is 2:4 along dimension 0"):
        export.check(model, "to_2_4")


def test_masks_of_torch_are_masks():
    model = mlp()
    sparsifier = WeightNormSparsifier(sparsity_level=0.8, sparse_block_shape=(1, 4), zeros_per_block=4)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    assert [(layer.fqn, layer.masked) for layer in export.check(model, "quantize")] == [("0.weight", True)]
    assert next((row.tensor, row.patterns) for row in export.report(model)) == ("0.weight", ("1x4 blocks",))


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (["1.weight"], "1.weight: needs at most 2 nonzeros in every 4 along .*, got 4 at .* the weight is dense"),
        (["fc.weight"], "to_2_4: 'fc.weight' names no weight of the model. The weights are 0.weight, 1.weight."),
        (["re:("], "is not a regular expression"),
        ([], "to_2_4: tensors is empty; name weights, or leave it out"),
        ([3], "to_2_4: tensors takes names, globs or re: expressions, got int"),
    ],
)
def test_tensors_that_are_named(tensors, text):
    with pytest.raises(SparsityError, match=text):
        export.check(dense_part(), "to_2_4", tensors)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_an_empty_weight_is_not_pruned():
    model = nn.Sequential(*squashed(linear()), nn.Linear(64, 0), nn.Linear(0, 64))
    assert [(row.density, row.patterns) for row in export.report(model)] == [(0.5, ("2:4",)), (1, ()), (1, ())]
    assert [layer.fqn for layer in export.check(model, "quantize")] == ["0.weight"]


def test_a_long_list_is_cut():
    model = nn.Sequential(*(squashed(linear())[0] for _ in range(12)))
    with pytest.raises(SparsityError, match=r"9.weight: needs .*\n  2 more\nPass tensors=\[...\] to convert only"):
        export.check(model, "to_2_4")


def test_without_names_masked_weights_are_chosen_and_after_squash_pruned_ones():
    model = nn.Sequential(*linear(), *linear(64, 64), *linear(32, 64)).half()
    with torch.no_grad():
        model[2].weight[:, ::2] = 0
    sparsifier = masked(model, ["1.weight"], **TWO_FOUR)
    assert [layer.fqn for layer in export.check(model, "to_2_4")] == ["1.weight"]
    sparsifier.squash_mask()
    assert [layer.fqn for layer in export.check(model, "to_2_4")] == ["1.weight", "2.weight"]
    assert [layer.fqn for layer in export.check(model, "to_2_4", "2.weight")] == ["2.weight"]
    others = weights.checked_layers(model, "to_2_4", weights.semi_structured_refusals, ["2.*"])[1]
    assert others == {"0.weight": "not in `tensors`", "1.weight": "not in `tensors`"}
    others = weights.checked_layers(dense_part(), "to_2_4", weights.semi_structured_refusals, None)[1]
    assert others == {"1.weight": "less than 10% of it is zero"}


def test_weights_that_cannot_be_exported(monkeypatch):
    with pytest.raises(SparsityError, match="unknown target 'tensorrt'; known: to_2_4, quantize"):
        export.check(linear(), "tensorrt")
    for model in (nn.Sequential(nn.LazyLinear(4)), nn.Linear(4, 4, device="meta")):
        with pytest.raises(SparsityError, match="weight has no values yet"):
            export.report(model)
    model = linear()
    monkeypatch.setattr(weights, "is_sharded", lambda parameter: True)
    with pytest.raises(SparsityError, match="0.weight is sharded over ranks; export a model that holds whole weights"):
        export.report(model)
    monkeypatch.undo()
    model[0].weight = nn.Parameter(model[0].weight.detach().to_sparse_coo(), requires_grad=False)
    with pytest.raises(SparsityError, match="0.weight is a torch.sparse_coo, and only plain weights can be exported"):
        export.report(model)


def test_layers_are_listed_once_with_all_names():
    model = nn.ModuleDict({"tied": Tied(4, 8), "norm": nn.LayerNorm(4), "embed": nn.Embedding(3, 4)})
    model["again"], model["wrapped"] = model["embed"], checkpoint_wrapper(nn.Linear(2, 2))
    names = {layer.fqn: layer.names for layer in layers_of(model)}
    both = ("tied.a.weight", "tied.b.weight")
    embed = ("embed.weight", "again.weight")
    assert names == {both[0]: both, embed[0]: embed, "wrapped.weight": ("wrapped.weight",)}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        *(({"pattern": patterns.n_m(n, m)}, (f"{n}:{m}",)) for n, m in ((1, 8), (1, 4), (2, 4), (4, 8), (8, 16))),
        *(({"pattern": patterns.blocks(n, n, 0.5)}, (f"{n}x{n} blocks",)) for n in (4, 8, 16, 32)),
        *(({"pattern": patterns.blocks(1, n, 0.75)}, (f"1x{n} blocks",)) for n in (4, 8, 16)),
        *(({"pattern": patterns.blocks(n, 1, 0.5)}, (f"{n}x1 blocks",)) for n in (4, 8, 16)),
        ({"pattern": patterns.rows(0.5)}, ("rows",)),
        ({"pattern": patterns.columns(0.5)}, ("columns",)),
        ({"sparsity_level": 0.5}, ("unstructured",)),
    ],
)
@pytest.mark.parametrize(
    "kind", [lambda: nn.Linear(64, 96), lambda: nn.Conv2d(64, 96, 3), lambda: nn.ConvTranspose1d(64, 96, 2)]
)
def test_the_report_names_patterns(kind, config, expected):
    torch.manual_seed(0)
    model = nn.Sequential(kind())
    sparsifier = masked(model, **config)
    (row,) = export.report(model)
    assert (row.patterns, row.masked) == (expected, True)
    assert row.density == int((model[0].weight != 0).sum()) / model[0].weight.numel()
    sparsifier.squash_mask()
    assert export.report(model)[0].patterns == expected


def test_patterns_that_do_not_fit_a_weight_are_not_named():
    model = nn.Sequential(nn.Conv1d(64, 96, 2, groups=32))  # 3 outputs in each group
    masked(model, sparsity_level=0.5)
    assert export.report(model)[0].patterns == ("unstructured",)


def test_the_report_as_text_as_csv_and_as_a_picture(tmp_path):
    report = export.report(nn.Sequential(*dense_part(), *squashed(linear())))
    assert [row.taken_by for row in report] == [("to_2_4", "quantize"), ("quantize",), ("quantize",)]
    text = str(report)
    assert re.search(r"^0\.weight +Linear +32x64 +float16 +0\.5000 +2:4 +to_2_4, quantize$", text, re.MULTILINE)
    assert "to_2_4 takes 1 of 2 pruned weights; not 2.weight: needs float16 or bfloat16 or int8, got float32" in text
    assert report.to_csv().splitlines()[1].startswith("0.weight,Linear,32x64,float16,False,0.5,2:4,")
    ax = plot_layers(report, tmp_path / "layers.png")
    assert (tmp_path / "layers.png").stat().st_size > 1000
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["2:4", "dense"]
    with pytest.raises(SparsityError, match="at least one weight"):
        plot_layers(export.report(nn.ReLU()))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch.export
def test_masked_models_are_exported_by_torch_with_their_masks():
    model, x = linear(), torch.randn(4, 64)
    masked(model, **TWO_FOUR)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))
    assert "0.parametrizations.weight.0.mask" in program.state_dict


@pytest.mark.parametrize("make", [ScopeSparsifier, WeightNormSparsifier])
def test_each_masked_weight_is_computed_once(make):
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)).half()
    sparsifier, computed = make(), []
    sparsifier.prepare(model, [{"tensor_fqn": f"{k}.weight", "sparsity_level": 0.5} for k in range(2)])
    sparsifier.step()
    for k in range(2):
        model[k].parametrizations.weight[0].register_forward_hook(lambda *_, k=k: computed.append(k))
    export.report(model)
    assert computed == [0, 1]
    for target in CONVERT:
        computed.clear()
        with contextlib.suppress(SparsityError):  # a weight may not fit
            export.check(model, target)
        assert computed == [0, 1], target
