"""Every mistake of a caller raises an error that names it, before anything is changed."""

import copy
import pickle

import pytest
import torch
from stock import StockWeightNorm, linear_model
from torch import nn
from torch.ao.pruning import LambdaSL

from sparsekit_ao import (
    CouplingError,
    DynamicSparsifier,
    NearlyDiagonalSparsifier,
    ScopeSparsifier,
    SparsityError,
    StraightThrough,
    WeightNormSparsifier,
    patterns,
)

LINEAR = {"tensor_fqn": "0.weight"}


def magnitude(weight, name):
    return weight.abs()


BAD_CONFIGS = [
    ([], "config is empty, so nothing would be sparsified; pass None for every Linear and conv"),
    ({"tensor_fqn": "0.weight"}, "config must be a list of dicts or None, got dict"),
    (["0.weight"], r"config\[0\]: an entry must be a dict such as .*, got str"),
    ([{}], r"config\[0\]: 'tensor_fqn' .* is required, got None"),
    ([{"tensor_fqn": "0.wieght"}], r"'0.wieght' matches no parameter of the model. Did you mean '0.weight'\?"),
    ([{"tensor_fqn": "layers.*.weight"}], r"'layers.\*.weight' matches no parameter of the model"),
    ([{"tensor_fqn": "re:("}], r"'re:\(' is not a regular expression"),
    (
        [LINEAR, LINEAR],
        r"config\[1\]: '0.weight' is already named by config\[0\] \('0.weight'\); name each tensor once",
    ),
    ([{"tensor_fqn": "*.weight"}] * 2, r"config\[0\] \('\*.weight'\) has no effect, because other entries name all of"),
    ([{**LINEAR, "sparsty_level": 0.3}], "unknown key 'sparsty_level'. Did you mean 'sparsity_level'?"),
    ([{**LINEAR, "module_fqn": "2"}], "'module_fqn' and 'tensor_fqn' disagree: '2' and '0.weight'"),
    ([{**LINEAR, "sparsity_level": 1.5}], r"0.weight: sparsity level must lie in \[0, 1\], got 1.5"),
    ([{**LINEAR, "sparsity_level": float("nan")}], r"sparsity level must lie in \[0, 1\], got nan"),
    ([{**LINEAR, "sparsity_level": "0.5"}], r"sparsity level must lie in \[0, 1\], got '0.5'"),
    ([{**LINEAR, "sparsity_level": 0.5, "nnz": 2}], "sparsity_level and nnz are mutually exclusive"),
    ([{**LINEAR, "nnz": 33}], r"0.weight: nnz must lie in 0 .. 32 \(a scope has 32 blocks\), got 33"),
    ([{**LINEAR, "nnz": 1.5}], "0.weight: nnz must be an int or an integer tensor, got 1.5"),
    (
        [{**LINEAR, "block_shape": (1, 3)}],
        r'0.weight: block \(1, 3\) needs dimension 1 divisible by 3, got 8. Use edge="partial", or leave',
    ),
    (
        [{**LINEAR, "block_shape": (4,)}],
        r"0.weight: block \(4,\) has 1 entries, but the view has 2 dimensions \(4, 8\)",
    ),
    ([{**LINEAR, "block_shape": 4}], "0.weight: block_shape must be a tuple of ints, got 4"),
    ([{**LINEAR, "block_shape": (1, 0)}], r"needs a positive size \(or -1 for all\) at dimension 1, got 0"),
    ([{**LINEAR, "block_shape": (1, 2.0)}], "needs an int at dimension 1, got 2.0"),
    (
        [{**LINEAR, "scope_shape": (1, 3)}],
        r'0.weight: scope \(1, 3\) needs block-grid dimension 1 divisible by 3, got 8. Use edge="partial"',
    ),
    ([{**LINEAR, "scope_shape": (1, 1, 1)}], r"scope \(1, 1, 1\) has 3 entries, but the block grid has 2 dimensions"),
    ([{**LINEAR, "edge": "pad"}], """edge must be "error" or "partial", got 'pad'"""),
    ([{**LINEAR, "norm": 3}], r"0.weight: norm must be 1, 2 or inf, got 3"),
    ([{**LINEAR, "norm": torch.abs}], r"norm must be 1, 2 or inf, got <.*>. Give a function of the weight as score="),
    ([{**LINEAR, "score": 3}], "0.weight: score must be one of 'magnitude', .*, got 3"),
    (
        [{**LINEAR, "norm": 1, "score": magnitude}],
        "'norm' and 'score' are mutually exclusive: a block's saliencies are",
    ),
    ([{**LINEAR, "pattern": "2:4"}], "0.weight: pattern must be one of `sparsekit_ao.patterns`, got '2:4'"),
    ([{**LINEAR, **patterns.rows(), "block_shape": (1, 2)}], "0.weight: 'pattern' and 'block_shape' are mutually excl"),
    ([{**LINEAR, **patterns.heads(3)}], r"patterns.heads\(3\): needs dimension 0 \(outputs\) divisible by 3, got 4"),
    ([{"tensor_fqn": "0.bias", **patterns.n_m(2, 4)}], r"0.bias: patterns.n_m\(2, 4\): needs a weight with inputs and"),
    ([{"module": nn.Conv2d}], r"config\[0\]: 'module' Conv2d: no such module of the model has the tensor 'weight'"),
    ([{**LINEAR, "view": (2, 2)}], r"view must be \(shape, stride\), \(shape, stride, offset\) or a function"),
    ([{**LINEAR, "view": ((8, 8), (8, 1))}], r"0.weight: view .* ends at element 63, the parameter .* at element 31"),
    ([{**LINEAR, "view": ((4, 8), (1, 1))}], r"strides overlap: indices \(0, 1\) and \(1, 0\) map to one element"),
    ([{**LINEAR, "view": lambda w: w.t().reshape(-1)}], "the view function returned a copy, not a view"),
    ([{**LINEAR, "stages": []}], "stages must be a non-empty list of dicts"),
    ([{**LINEAR, "stages": [{"nnz": 1, "foo": 2}]}], r"stages\[0\]: unknown key 'foo'"),
    ([{**LINEAR, "stages": [3]}], r"stages\[0\] must be a dict, got 3"),
    ([{**LINEAR, "block_coupling": "mpl"}], "block coupling 'mpl': 0.weight is its only member; a coupling needs two"),
    ([{**LINEAR, "coupling_order": (1, 0)}], "coupling_order needs a block_coupling"),
    ([{**LINEAR, "block_coupling": 3}], r"block_coupling must be a name \(a str\) or None, got 3"),
]


@pytest.mark.parametrize(("config", "text"), BAD_CONFIGS, ids=range(len(BAD_CONFIGS)))
def test_a_bad_config_is_refused_and_the_model_is_unchanged(config, text):
    model = linear_model(8, 4, 4)
    sparsifier = ScopeSparsifier()
    keys, kinds = list(model.state_dict()), [type(m) for m in model]
    with pytest.raises(SparsityError, match=text):
        sparsifier.prepare(model, config)
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model] == kinds
    assert sparsifier.groups == []
    sparsifier.prepare(model, [LINEAR])  # and the sparsifier still works


def test_one_bad_entry_leaves_the_whole_model_unchanged():
    model = linear_model(8, 4, 6)
    with pytest.raises(SparsityError, match=r"2.weight: block \(1, 8\) needs dimension 1 divisible by 8, got 4"):
        ScopeSparsifier(block_shape=(1, 8)).prepare(model, None)
    assert not any(k.endswith("mask") for k in model.state_dict())


COUPLING_MISTAKES = [
    ({"block_shape": (1, -1)}, {"block_shape": (1, -1)}, r"2.weight has the aligned block grid \(6, 1\), but 0.weight"),
    ({"norm": 1}, {}, "members need the same norm, but 0.weight gives 1 and 2.weight 2"),
    ({}, {"coupling_order": (0, 0)}, r"2.weight: order \(0, 0\) is no permutation of the 2 aligned grid dimensions"),
]


@pytest.mark.parametrize(("first", "second", "text"), COUPLING_MISTAKES, ids=range(len(COUPLING_MISTAKES)))
def test_members_that_do_not_fit_each_other_are_a_coupling_error(first, second, text):
    model = linear_model(8, 4, 6)
    config = [
        {"tensor_fqn": "0.weight", "block_coupling": "mlp", **first},
        {"tensor_fqn": "2.weight", "block_coupling": "mlp", **second},
    ]
    with pytest.raises(CouplingError, match=text):
        ScopeSparsifier().prepare(model, config)


def test_members_of_a_scope_coupling_must_ask_for_one_budget():
    model = linear_model(8, 4, 6)
    config = [{"tensor_fqn": f"{i}.weight", "scope_coupling": "all", "sparsity_level": i / 4} for i in (0, 2)]
    text = "scope coupling 'all': members share one budget, but 0.weight asks for sparsity_level=0.0 and 2.weight"
    with pytest.raises(CouplingError, match=text):
        ScopeSparsifier().prepare(model, config)


def test_a_shared_module_has_one_name_and_works():
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model, None)
    sparsifier.step()
    assert [g["tensor_fqn"] for g in sparsifier.groups] == ["0.weight"]


def test_no_mask_changes_if_any_budget_of_a_step_is_bad():
    for kind, level in ((ScopeSparsifier, 1.5), (WeightNormSparsifier, float("nan"))):
        sparsifier = kind(0.5)
        sparsifier.prepare(linear_model(8, 4, 4), None)
        sparsifier.groups[1]["sparsity_level"] = level
        with pytest.raises(SparsityError, match="2.weight: sparsity level must"):
            sparsifier.step()
        assert (sparsifier.mask("0.weight") == 1).all()


def test_a_budget_beside_stages_that_have_their_own_is_refused():
    stages = [{"block_shape": (4, 1), "scope_shape": (1, 8), "nnz": 4}, {"scope_shape": (1, 8), "nnz": 2}]
    entry = {**LINEAR, "stages": stages, "sparsity_level": 0.9}
    with pytest.raises(
        SparsityError, match="sparsity_level has no effect, because every stage has a budget of its own"
    ):
        ScopeSparsifier().prepare(linear_model(8, 4), [entry])


def test_preparing_an_unpickled_sparsifier_with_another_model_leaves_the_model_unchanged():
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(linear_model(8, 4), None)
    loaded, other = pickle.loads(pickle.dumps(sparsifier)), linear_model(8, 6)
    with pytest.raises(SparsityError, match=r"0.weight: the saved mask is \(4, 8\), the weight \(6, 8\)"):
        loaded.prepare(other)
    assert list(other.state_dict()) == ["0.weight", "0.bias"]


def test_squashing_a_copy_twice():
    model = linear_model(8, 4)
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model, None)
    sparsifier.step()
    snapshot = copy.deepcopy(model)
    sparsifier.squash_mask(model=snapshot)
    with pytest.raises(SparsityError, match="0.weight: its mask was removed"):
        sparsifier.squash_mask(model=snapshot)


def test_a_state_without_groups():
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(linear_model(8, 4), None)
    with pytest.raises(SparsityError, match="expected a dict with 'state' and 'groups'"):
        sparsifier.load_state_dict({"state": {}})


def test_an_unknown_key_of_update_mask():
    model = linear_model(8, 4)
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model, None)
    with pytest.raises(SparsityError, match="update_mask: unknown key 'sparsity_levl'"):
        sparsifier.update_mask(model[0], "weight", sparsity_levl=0.9)


def test_a_lazy_layer():
    with pytest.raises(SparsityError, match="'0.weight' has no shape yet; run one forward of the lazy module first"):
        ScopeSparsifier().prepare(nn.Sequential(nn.LazyLinear(4)), None)


def test_prepare_twice():
    model = linear_model(8, 4)
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model, None)
    with pytest.raises(SparsityError, match="already holds a prepared model; call squash_mask first"):
        sparsifier.prepare(model, None)
    with pytest.raises(SparsityError, match="'0.weight' already has a sparsity mask; squash it before"):
        ScopeSparsifier().prepare(model, None)


def test_stock_prepares_twice_without_an_error():
    model = linear_model(8, 4)
    sparsifier = StockWeightNorm()
    for _ in range(2):
        sparsifier.prepare(model, [LINEAR])
    assert len(sparsifier.groups) == 2


def test_squash_twice_and_step_after_squash():
    model = linear_model(8, 4)
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model, None)
    sparsifier.step()
    sparsifier.squash_mask()
    for call in (sparsifier.squash_mask, sparsifier.step, sparsifier.report):
        with pytest.raises(SparsityError, match=r"the masks were squashed already; call prepare\(model, config\)"):
            call()
    sparsifier.prepare(model, None)  # the next round of iterative pruning
    sparsifier.step()


@pytest.mark.parametrize("call", ["step", "squash_mask", "report", "check"])
def test_calls_before_prepare(call):
    with pytest.raises(SparsityError, match=f"{call}: no model has been prepared; call prepare"):
        getattr(ScopeSparsifier(), call)()


def test_squash_names_what_it_cannot_keep_and_squashes_nothing():
    model = linear_model(8, 4)
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model, None)
    with pytest.raises(SparsityError, match="0.weight has no 'sparse_block_shape'; it has"):
        sparsifier.squash_mask(params_to_keep=("sparse_block_shape",))
    with pytest.raises(SparsityError, match=r"'fc' is not a sparsified module; those are \['0'\]"):
        sparsifier.squash_mask(params_to_keep_per_layer={"fc": ("sparsity_level",)})
    with pytest.raises(SparsityError, match="params_to_keep must be a tuple of keys, got 'sparsity_level'"):
        sparsifier.squash_mask(params_to_keep="sparsity_level")
    assert sparsifier.mask("0.weight").all()


def test_both_budgets_in_the_constructor():
    with pytest.raises(SparsityError, match="sparsity_level and nnz are mutually exclusive"):
        ScopeSparsifier(0.5, nnz=2)


def test_integer_weights_are_refused():
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(4, dtype=torch.int32), requires_grad=False)
    with pytest.raises(SparsityError, match="'w' is torch.int32; only float16, bfloat16, float32 and float64"):
        ScopeSparsifier().prepare(model, [{"tensor_fqn": "w"}])


def test_a_model_without_layers():
    with pytest.raises(SparsityError, match="config=None found no Linear or convolution in the model"):
        ScopeSparsifier().prepare(nn.ReLU(), None)


def test_update_mask_of_a_module_that_was_not_prepared():
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(linear_model(8, 4), None)
    with pytest.raises(SparsityError, match="'weight' of this Linear was not prepared"):
        sparsifier.update_mask(nn.Linear(2, 2), "weight")


def test_a_step_after_a_mask_was_removed_by_torch_is_an_error():
    model = linear_model(8, 4)
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model, None)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    with pytest.raises(SparsityError, match="0.weight: its mask was removed"):
        sparsifier.step()


def test_an_unknown_mask_name():
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(linear_model(8, 4), None)
    with pytest.raises(SparsityError, match="no mask for 'fc'; sparsified tensors: 0.weight"):
        sparsifier.mask("fc")


def test_a_scheduled_level_out_of_range_is_an_error_before_a_mask_changes():
    sparsifier = ScopeSparsifier(0.5)
    sparsifier.prepare(linear_model(8, 4), None)
    scheduler = LambdaSL(sparsifier, lambda epoch: 1.0 + epoch)
    sparsifier.step()
    scheduler.step()
    scheduler.step()
    before = sparsifier.mask("0.weight").clone()
    with pytest.raises(SparsityError, match=r"0.weight: sparsity level must lie in \[0, 1\], got 1.5"):
        sparsifier.step()
    assert torch.equal(sparsifier.mask("0.weight"), before)


@pytest.mark.parametrize("kind", [ScopeSparsifier, WeightNormSparsifier, NearlyDiagonalSparsifier])
def test_a_typo_in_a_key_for_every_sparsifier(kind):
    with pytest.raises(SparsityError, match="unknown key 'levle'"):
        kind().prepare(linear_model(8, 4), [{**LINEAR, "levle": 1}])


def test_stock_ignores_a_typo():
    sparsifier = StockWeightNorm()
    sparsifier.prepare(linear_model(8, 4), [{**LINEAR, "sparsty_level": 0.9}])
    assert sparsifier.groups[0]["sparsity_level"] == 0.5


@pytest.mark.parametrize("kind", [ScopeSparsifier, WeightNormSparsifier, DynamicSparsifier, StraightThrough])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_prepare_that_fails_after_the_first_mask_puts_everything_back(kind, error, monkeypatch):
    model = linear_model(8, 8, 8)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    kinds, parameters = [type(m) for m in model], [id(p) for p in model.parameters()]
    register = nn.utils.parametrize.register_parametrization

    def failing(module, *args, **kwargs):
        if module is model[2]:
            raise error("no mask here")
        return register(module, *args, **kwargs)

    sparsifier = kind()
    monkeypatch.setattr(nn.utils.parametrize, "register_parametrization", failing)
    with pytest.raises(error, match="no mask here"):
        sparsifier.prepare(model, None)
    assert list(model.state_dict()) == list(before) and [type(m) for m in model] == kinds
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [id(p) for p in model.parameters()] == parameters and sparsifier.groups == []
    with pytest.raises(SparsityError, match="no model has been prepared"):
        sparsifier.step()
    monkeypatch.undo()
    sparsifier.prepare(model, None)
    assert [g["tensor_fqn"] for g in sparsifier.groups] == ["0.weight", "2.weight"]


def test_a_report_of_a_model_on_the_meta_device():
    model = linear_model(8, 4).to("meta")
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model, None)
    with pytest.raises(SparsityError, match="report: 0.weight is on the meta device, so its mask has no values; give"):
        sparsifier.report()
    model.to_empty(device="cpu")
    sparsifier.report()
