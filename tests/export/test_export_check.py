"""Export targets refuse what they cannot take, with tensor, rule and first place, and leave the model as it is."""

import copy
import re

import pytest
import torch
from export_models import TWO_FOUR, Tied, linear, masked, same_bits, squashed, with_value
from torch import nn

from sparsekit_ao import ScopeSparsifier, SparsityError, export, patterns
from sparsekit_ao.export.check import TARGETS
from sparsekit_ao.export.layers import layers_of
from sparsekit_ao.plot import plot_layers

HALF = torch.float16
CONVERT = {
    "pack_2_4": lambda model, path, **options: export.pack_2_4(model, path, **options),
    "save_sparse": lambda model, path, **options: export.save_sparse(model, path),
    "coreml_metadata": lambda model, path, **options: export.coreml_metadata(model, **options),
}


def tied():
    """Two layers of one weight that is 2:4, as after squash_mask and tying."""
    model = Tied()
    with torch.no_grad():
        model.a.weight[:, ::2] = 0
    return model


def dense_part():
    return nn.Sequential(*squashed(linear(), HALF), nn.Linear(32, 64).half())


def double_complex():
    model = squashed(linear())
    model[0].weight = nn.Parameter(model[0].weight.detach().to(torch.complex128))
    return model


def one_memory():
    """Two parameters of one memory, which are not one object."""
    model = tied().half()
    model.b.weight = nn.Parameter(model.a.weight.data)
    return model


def normed():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(squashed(linear(), HALF)[0]))


# target, model, what the error must contain
REFUSED = [
    ("pack_2_4", lambda: squashed(linear(), HALF, pattern=patterns.n_m(4, 8)), r"0\.weight: needs at most 2 nonzeros in"
     r" every 4 along dimension 1, got [34] at \[\d+, \d+:\d+\]"),
    ("pack_2_4", lambda: squashed(linear(), HALF, block_shape=(1, 1), scope_shape=(4, 1), nnz=2), r"along dimension 1, "
     r"got [34] at \[0, \d+:\d+\]; it is 2:4 along dimension 0"),
    ("pack_2_4", lambda: squashed(linear(), torch.float32), "0.weight: needs float16 or bfloat16 or int8, got float32"),
    ("pack_2_4", lambda: squashed(linear(48), HALF), "0.weight: needs dimension 0 to be a multiple of 32, got 48"),
    ("pack_2_4", lambda: squashed(linear(16, 64), torch.int8), "dimension 1 to be a multiple of 128, got 64"),
    ("pack_2_4", lambda: tied().half(), r"a\.weight: needs a weight of its own, but it is shared with b\.weight"),
    ("pack_2_4", one_memory, r"a\.weight: needs a weight of its own, but it is shared with b\.weight"),
    ("pack_2_4", lambda: with_value(squashed(linear(), HALF), torch.nan, (0, slice(0, 64, 2))), r"got nan at \[0, 0\]"),
    ("pack_2_4", normed, "0.weight: is computed by _WeightNorm; call torch.nn.utils.parametrize.remove_param"),
    ("pack_2_4", lambda: nn.Sequential(squashed(nn.Conv2d(64, 32, 1), HALF)), "Linear, got weight of Conv2d"),
    ("pack_2_4", lambda: linear(dtype=HALF), "no weight is masked, and in none a tenth is zero"),
    ("coreml_metadata", lambda: squashed(linear(), torch.bfloat16), "0.weight: needs float32, got bfloat16"),
    ("coreml_metadata", lambda: squashed(nn.Sequential(nn.Conv3d(4, 4, 1))), "needs the weight of Linear or Conv"),
    ("coreml_metadata", tied, "shared with b.weight"),
    ("coreml_metadata", lambda: with_value(squashed(linear()), torch.inf), r"needs finite values, got inf at \[3, 5\]"),
    ("coreml_metadata", linear, "no weight is masked, and in none a tenth is zero"),
    ("save_sparse", linear, "no weight is masked, and in none a tenth is zero"),
    ("save_sparse", double_complex, "the file format has no complex128"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "make", "text"), REFUSED, ids=[f"{r[0]}-{k}" for k, r in enumerate(REFUSED)])
def test_what_a_target_refuses(target, make, text, tmp_path):
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(SparsityError, match=text):
        export.check(model, target)
    with pytest.raises(SparsityError, match=text if target != "save_sparse" else None):
        CONVERT[target](model, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    after = model.state_dict()
    assert after.keys() == before.keys() and all(same_bits(after[k], before[k]) for k in before)


@pytest.mark.parametrize("target", CONVERT)
def test_masks_are_checked_but_not_converted(target, tmp_path):
    model = linear(dtype=HALF if target == "pack_2_4" else None)
    sparsifier = masked(model, **TWO_FOUR)
    assert [layer.fqn for layer in export.check(model, target)] == ["0.weight"]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(SparsityError, match=rf"{target}: 0.weight still has its mask; call sparsifier.squash_mask"):
        CONVERT[target](model, tmp_path / "out")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and not list(tmp_path.iterdir())
    sparsifier.squash_mask()
    assert [layer.fqn for layer in export.check(model, target)] == ["0.weight"]


def test_a_mask_of_another_pattern_is_found_before_squash():
    model = linear(dtype=HALF)
    masked(model, block_shape=(1, 1), scope_shape=(4, 1), nnz=2)
    with pytest.raises(SparsityError, match=r"it is 2:4 along dimension 0"):
        export.check(model, "pack_2_4")


def test_nan_under_a_mask_is_no_value_of_the_weight():
    model = linear(dtype=HALF)
    masked(model, **TWO_FOUR)
    with torch.no_grad():
        model[0].parametrizations.weight.original[model[0].weight == 0] = torch.nan
    assert export.check(model, "pack_2_4")


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (
            ["1.weight"],
            "1.weight: needs at most 2 nonzeros in every 4 along dimension 1, got 4 at .* the weight is dense",
        ),
        (["fc.weight"], "pack_2_4: 'fc.weight' names no weight of the model. The weights are 0.weight, 1.weight."),
        (["re:("], "is not a regular expression"),
        ([], "pack_2_4: tensors is empty; name weights, or leave it out"),
        ([3], "pack_2_4: tensors takes names, globs or re: expressions, got int"),
    ],
)
def test_tensors_that_are_named(tensors, text):
    with pytest.raises(SparsityError, match=text):
        export.check(dense_part(), "pack_2_4", tensors)


def test_weights_of_another_name_in_the_state_dict(tmp_path):
    model = squashed(linear(), HALF)
    model.register_state_dict_post_hook(lambda m, state, prefix, _: state.update({"w": state.pop(f"{prefix}0.weight")}))
    with pytest.raises(SparsityError, match="0.weight has another name in model.state_dict"):
        export.pack_2_4(model, tmp_path / "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_an_empty_weight_is_not_pruned():
    model = nn.Sequential(*squashed(linear()), nn.Linear(64, 0), nn.Linear(0, 64))
    assert [(row.density, row.patterns) for row in export.report(model)] == [(0.5, ("2:4",)), (1, ()), (1, ())]
    assert [layer.fqn for layer in export.check(model, "coreml_metadata")] == ["0.weight"]


def test_a_long_list_is_cut():
    model = nn.Sequential(*(squashed(linear())[0] for _ in range(12)))
    with pytest.raises(
        SparsityError, match=r"9.weight: needs .*\n  2 more\nPass tensors=\[...\] to convert only others"
    ):
        export.check(model, "pack_2_4")


def test_what_is_not_chosen_is_reported(tmp_path):
    report = export.pack_2_4(dense_part(), tmp_path / "x", tensors=["0.*"])
    assert report.converted == ("0.weight",) and report.left == {"1.weight": "not in `tensors`"}
    report = export.pack_2_4(dense_part(), tmp_path / "x")
    assert report.left == {"1.weight": "less than 10% of it is zero"}
    assert str(report).splitlines()[0] == "pack_2_4: 1 of 2 weights"
    assert "left: 1.weight (less than 10% of it is zero)" in str(report)


def test_without_names_masked_weights_are_chosen_and_after_squash_pruned_ones():
    model = nn.Sequential(*linear(), *linear(64, 32), *linear(32, 64))
    with torch.no_grad():
        model[2].weight[:, ::2] = 0
    sparsifier = ScopeSparsifier(**TWO_FOUR)
    sparsifier.prepare(model, [{"tensor_fqn": "1.weight"}])
    sparsifier.step()
    assert [layer.fqn for layer in export.check(model, "save_sparse")] == ["1.weight"]
    sparsifier.squash_mask()
    assert [layer.fqn for layer in export.check(model, "save_sparse")] == ["1.weight", "2.weight"]
    assert [layer.fqn for layer in export.check(model, "save_sparse", "2.weight")] == ["2.weight"]


def test_unknown_targets_and_weights_without_values():
    with pytest.raises(SparsityError, match="unknown target 'tensorrt'; known: .*pack_2_4"):
        export.check(linear(), "tensorrt")
    for model in (nn.Sequential(nn.LazyLinear(4)), nn.Linear(4, 4, device="meta")):
        with pytest.raises(SparsityError, match="weight has no values yet"):
            layers_of(model)


def test_weights_that_are_no_plain_tensors(monkeypatch):
    from sparsekit_ao.export import layers

    model = linear()
    monkeypatch.setattr(layers, "is_sharded", lambda parameter: True)
    with pytest.raises(SparsityError, match="0.weight is sharded over ranks; export a model that holds whole weights"):
        export.report(model)
    monkeypatch.undo()
    model[0].weight = nn.Parameter(model[0].weight.detach().to_sparse_coo(), requires_grad=False)
    with pytest.raises(SparsityError, match="0.weight is a torch.sparse_coo, and only plain weights can be exported"):
        export.report(model)


def test_a_model_of_one_layer_and_another_library_s(tmp_path):
    layer = squashed(linear(), HALF)[0]
    assert export.pack_2_4(layer, tmp_path / "x").converted == ("weight",)
    assert export.coreml_metadata(layer.float())[1].converted == ("weight",)
    kind = type("Conv1D", (nn.Module,), {"__module__": "transformers.pytorch_utils"})
    model = nn.Sequential(kind())
    model[0].weight = layer.weight
    with pytest.raises(SparsityError, match="got weight of Conv1D; Conv1D stores its weight transposed"):
        export.check(model, "pack_2_4")


def test_every_target_is_a_function_of_export():
    assert all(callable(getattr(export, name)) for name in TARGETS)


def test_layers_are_listed_once_with_all_names():
    model = nn.ModuleDict({"tied": Tied(4, 8), "norm": nn.LayerNorm(4), "embed": nn.Embedding(3, 4)})
    model["again"] = model["embed"]
    found = {layer.fqn: layer.names for layer in layers_of(model)}
    both = ("tied.a.weight", "tied.b.weight")
    assert found == {"tied.a.weight": both, "embed.weight": ("embed.weight", "again.weight")}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TWO_FOUR, ("2:4",)),
        ({"pattern": patterns.n_m(1, 4)}, ("1:4",)),
        ({"pattern": patterns.blocks(4, 4, 0.5)}, ("4x4 blocks",)),
        ({"pattern": patterns.blocks(1, 4, 0.75)}, ("1x4 blocks",)),
        ({"pattern": patterns.rows(0.5)}, ("rows",)),
        ({"pattern": patterns.columns(0.5)}, ("columns",)),
        ({"sparsity_level": 0.5}, ("unstructured",)),
    ],
)
@pytest.mark.parametrize(
    "kind", [lambda: nn.Linear(12, 20), lambda: nn.Conv2d(12, 20, 3), lambda: nn.ConvTranspose1d(12, 20, 2)]
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


def test_the_report_as_text_and_as_a_picture(tmp_path):
    model = dense_part()
    report = export.report(model)
    pruned, dense = report
    assert set(pruned.taken_by) >= {"pack_2_4", "save_sparse"} and "coreml_metadata" not in pruned.taken_by
    assert not dense.patterns and dense.density > 0.99 and not set(dense.taken_by) & set(CONVERT)
    text = str(report)
    assert re.search(r"^0\.weight +Linear +32x64 +float16 +0\.5000 +2:4 +.*pack_2_4", text, re.MULTILINE)
    assert "coreml_metadata takes 0 of 1 pruned weights; not 0.weight: needs float32, got float16" in text
    ax = plot_layers(report, tmp_path / "layers.png")
    assert (tmp_path / "layers.png").stat().st_size > 1000
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["2:4", "dense"]
    with pytest.raises(SparsityError, match="at least one weight"):
        plot_layers(export.report(nn.ReLU()))
