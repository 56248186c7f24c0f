"""Every mistake of a caller raises an error that names it and says what to do, before anything is changed."""

import copy
from itertools import product

import numpy as np
import pytest
import torch
from stock import Holder, linear_model, refuses
from torch import nn

from sparsekit_ao import (
    SRSTE,
    BlockCoupling,
    BlockSpec,
    Coupling,
    CouplingError,
    DynamicSparsifier,
    NearlyDiagonalSparsifier,
    ProximalSparsifier,
    RigL,
    ScopeCoupling,
    ScopeSparsifier,
    ScopeSpec,
    SparsityError,
    StraightThrough,
    WeightNormSparsifier,
    coupling,
    dynamic,
    export,
    keep_mask,
    patterns,
    prune,
    removal,
    schedules,
)
from sparsekit_ao.plot import plot_layers, plot_mask
from sparsekit_ao.schedules import ScheduleSL

LINEAR = {"tensor_fqn": "0.weight"}


def prepared(model=None, config=None, **options):
    sparsifier = ScopeSparsifier(**options)
    sparsifier.prepare(linear_model(8, 4, 4) if model is None else model, config)
    return sparsifier


def magnitude(weight, name):
    return weight.abs()


CONFIGS = [
    ([], "config is empty, so nothing would be sparsified; pass None for every Linear and conv"),
    ({"0.weight": 0.5}, "config must be a list of dicts or None, got dict; give one such as [{'tensor_fqn': 'fc."),
    (["0.weight"], "config[0]: an entry must be a dict such as {'tensor_fqn': 'fc.weight'}, got str"),
    ([{}], "config[0]: 'tensor_fqn' (a name, a glob, 're:...' or a list of them) or 'module' (a module class) is requ"),
    ([{"tensor_fqn": "0.wieght"}], "'0.wieght' matches no parameter of the model. Did you mean '0.weight'?"),
    ([{"tensor_fqn": "0"}], "'0' matches no parameter of the model. It is a module; did you mean '0.weight'?"),
    ([{"tensor_fqn": "layers.*.weight"}], "'layers.*.weight' matches no parameter of the model"),
    ([{"tensor_fqn": "re:("}], "'re:(' is not a regular expression"),
    ([{"tensor_fqn": "re:" + "(" * 5000}], "is not a regular expression"),
    ([{"tensor_fqn": ["0.weight", "0.weight"]}], "config[0]: 'tensor_fqn' has '0.weight' twice; name each tensor once"),
    ([{"module": nn.Linear(2, 2)}], "config[0]: 'module', a Linear, is not a module of the model"),
    ([LINEAR | {"stages": [{"scope_shpe": (1, 4)}]}], "stages[0]: unknown key 'scope_shpe'. Did you mean"),
    ([LINEAR, LINEAR], "config[1]: '0.weight' is already named by config[0] ('0.weight'); name each tensor once"),
    ([{"tensor_fqn": "*.weight"}] * 2, "config[0] ('*.weight') has no effect, because other entries name all of its"),
    ([{"module": "Linear"}], "config[0]: 'module' must be a module class or a list of them, got 'Linear'"),
    ([{"tensor_fqn": "*", "module": []}], "'module' must be a module class or a list of them"),
    ([{"tensor_fqn": ["0.weight", "2.weight"], "module": nn.Conv2d}], "'0.weight' does not belong to a module of cl"),
    ([{"tensor_fqn": "0.bias", "module": nn.Conv2d}], "'0.bias' does not belong to a module of class Conv2d"),
    ([{"tensor_fqn": "*.bias", "module": nn.Conv2d}], "config[0]: the model has no module of class Conv2d with a ten"),
    ([{"module": nn.Conv2d}], "config[0]: the model has no module of class Conv2d with a tensor 'weight'"),
]
ENTRIES = [
    ({"sparsty_level": 0.3}, "unknown key 'sparsty_level'. Did you mean 'sparsity_level'?"),
    ({"sparsity": 0.5}, "unknown key 'sparsity'. Did you mean 'sparsity_level'?"),
    ({"exclude": ["2"]}, "unknown key 'exclude'. It is an argument of prepare"),
    ({"strength": 1.0}, "unknown key 'strength'. ProximalSparsifier takes it, this sparsifier does not"),
    ({"module_fqn": "2"}, "'module_fqn' and 'tensor_fqn' disagree: '2' and '0.weight'"),
    ({"sparsity_level": 1.5}, "0.weight: sparsity level must lie in [0, 1], got 1.5"),
    ({"sparsity_level": 50}, "sparsity level must lie in [0, 1], got 50; it is a fraction, so 50 % is 0.5"),
    ({"sparsity_level": torch.tensor([0.5, 0.5])}, "must lie in [0, 1], got a Tensor, which is not a number"),
    ({"sparsity_level": 0.5, "nnz": 2}, "sparsity_level and nnz are mutually exclusive"),
    ({"nnz": 33}, "0.weight: nnz must lie in 0 .. 32 (a scope has 32 blocks), got 33"),
    ({"nnz": 1.5}, "0.weight: nnz must be an int or an integer tensor, got 1.5"),
    ({"block_shape": (1, 3)}, '0.weight: block (1, 3) needs dimension 1 divisible by 3, got 8. Use edge="partial", or'),
    ({"block_shape": 4}, "0.weight: block_shape must be a tuple of ints, got 4"),
    ({"scope_shape": (1, 3)}, "0.weight: scope (1, 3) needs block-grid dimension 1 divisible by 3, got 8. Use edge="),
    ({"edge": "pad"}, """edge must be "error" or "partial", got 'pad'"""),
    ({"norm": 3}, "0.weight: norm must be 1, 2 or inf, got 3"),
    ({"norm": torch.abs}, "Give a function of the weight as score="),
    ({"score": 3}, "0.weight: score must be one of 'magnitude', "),
    ({"score": lambda w: w}, "score must be a function (weight, name) -> saliency, got one of (w)"),
    ({"norm": 1, "score": magnitude}, "'norm' and 'score' are mutually exclusive: a block's saliencies are"),
    ({"pattern": "n_m(2, 4)"}, "'columns', 'filters' or 'unstructured', got 'n_m(2, 4)'"),
    ({**patterns.rows(), "block_shape": (1, 2)}, "0.weight: 'pattern' and 'block_shape' are mutually exclusive"),
    ({**patterns.rows(0.5), "sparsity_level": 0.25}, "sparsity_level and patterns.rows(0.5) are mutually exclusive"),
    ({**patterns.n_m(2, 4), "nnz": 1}, "nnz and patterns.n_m(2, 4) are mutually exclusive"),
    ({**patterns.v_n_m(4, 2, 8), "stages": [{"nnz": 1}]}, "'pattern' and 'stages' are mutually exclusive"),
    ({**patterns.heads(3)}, "patterns.heads(3): needs dimension 0 (outputs) divisible by 3, got 4"),
    ({"tensor_fqn": "0.bias", **patterns.n_m(2, 4)}, "0.bias: patterns.n_m(2, 4): needs a weight with inputs and"),
    ({"view": (2, 2)}, "view must be (shape, stride), (shape, stride, offset) or a function"),
    ({"view": ((8, 8), (8, 1))}, "ends at element 63, the parameter (4, 8) at element 31"),
    ({"stages": []}, "stages must be a non-empty list of dicts"),
    ({"stages": [{"nnz": 1, "foo": 2}]}, "stages[0]: unknown key 'foo'"),
    ({"stages": [3]}, "stages[0] must be a dict, got 3"),
    ({"stages": [{"nnz": 1}], "sparsity_level": 0.9}, "sparsity_level has no effect, because every stage has a budget"),
    ({"block_coupling": "mpl"}, "block coupling 'mpl': only 0.weight gives this name, but a coupling needs"),
    ({"coupling_order": (1, 0)}, "coupling_order needs a block_coupling"),
    ({"block_coupling": 3}, "block_coupling must be a name (a str) or None, got 3"),
    ({**patterns.n_m(2, 4), "scope_coupling": "all"}, "n_m(2, 4) keeps a fixed number in every group"),
]
BAD_CONFIGS = CONFIGS + [([{**LINEAR, **entry}], text) for entry, text in ENTRIES]


@pytest.mark.parametrize(("config", "text"), BAD_CONFIGS, ids=range(len(BAD_CONFIGS)))
def test_a_bad_config_is_refused_and_the_model_is_unchanged(config, text):
    model = linear_model(8, 4, 4)
    sparsifier = ScopeSparsifier()
    keys, kinds = list(model.state_dict()), [type(m) for m in model]
    with refuses(text):
        sparsifier.prepare(model, config)
    assert list(model.state_dict()) == keys and [type(m) for m in model] == kinds and sparsifier.groups == []
    sparsifier.prepare(model, [LINEAR])  # and the sparsifier still works


OTHER_KEYS = [  # a sparsifier, and a key that it does not take
    (ProximalSparsifier, {"score": "magnitude"}),
    (ProximalSparsifier, {"norm": 1}),
    (ProximalSparsifier, {"member_scores": "mean"}),
    (ProximalSparsifier, {"max_sparsity": 0.5}),
    (StraightThrough, {"max_sparsity": 0.5}),
    (SRSTE, {"max_sparsity": 0.5}),
]


@pytest.mark.parametrize(("kind", "key"), OTHER_KEYS)
def test_a_key_that_a_sparsifier_does_not_take_is_refused_inside_stages_too(kind, key):
    name, stages = next(iter(key)), [{"scope_shape": (1, 4), "nnz": 2, **key}]
    with pytest.raises(TypeError, match=f"has no argument '{name}'"):
        kind(sparsity_level=0.5, **key)
    with refuses(f"defaults: stages[0]: unknown key '{name}'."):
        kind(sparsity_level=0.5, stages=stages)
    model, sparsifier = linear_model(8, 8), kind(sparsity_level=0.5)
    with refuses(f"0.weight: stages[0]: unknown key '{name}'."):
        sparsifier.prepare(model, [{**LINEAR, "stages": stages}])
    sparsifier.prepare(model, [{**LINEAR, "stages": [{"scope_shape": (1, 4), "nnz": 2}]}])


@pytest.mark.parametrize(
    ("config", "exclude", "text"),
    [
        (None, ["lm_haed"], "exclude[0] 'lm_haed' matches no parameter or module of the model"),
        (None, "0", "exclude must be a list of names, globs, modules and module classes, got '0'"),
        (None, [3], "exclude[0] must be a name, a glob, 're:...', a module or a module class, got 3"),
        (None, [nn.Linear], "every tensor that config=None finds is left out: 0.weight: left out by exclude[0] (Lin"),
        ([LINEAR], ["0"], "config[0]: '0.weight' is named here, but it is left out by exclude[0] ('0'"),
    ],
)
def test_an_exclude_that_cannot_be_meant(config, exclude, text):
    model = linear_model(8, 8)
    with refuses(text):
        ScopeSparsifier().prepare(model, config, exclude=exclude)
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


@pytest.mark.parametrize(
    ("shared", "first", "second", "text"),
    [
        ("block_coupling", {"block_shape": (1, -1)}, {"block_shape": (1, -1)}, "2.weight has the aligned block grid"),
        ("block_coupling", {"norm": 1}, {}, "members need the same norm, but 0.weight gives 1 and 2.weight 2"),
        ("block_coupling", {}, {"coupling_order": (0, 0)}, "2.weight: order (0, 0) is not a permutation of the 2"),
        ("scope_coupling", {"sparsity_level": 0.0}, {"sparsity_level": 0.5}, "share one budget, but 0.weight asks for"),
    ],
)
def test_members_that_do_not_fit_each_other_are_a_coupling_error(shared, first, second, text):
    config = [{"tensor_fqn": f"{k}.weight", shared: "all", **own} for k, own in ((0, first), (2, second))]
    with refuses(text, CouplingError):
        ScopeSparsifier().prepare(linear_model(8, 4, 6), config)


def test_heads_and_the_columns_that_read_them_are_coupled_by_axes_as_the_error_says():
    model = nn.ModuleDict({"value": nn.Linear(6, 8), "output": nn.Linear(8, 6)})
    by_presets = [
        {"tensor_fqn": "value.weight", "block_coupling": "heads", **patterns.heads(4)},
        {"tensor_fqn": "output.weight", "block_coupling": "heads", **patterns.columns()},
    ]
    with refuses('as a Coupling({tensor: axes}) does ("(u d) i" and "o (u d)" for heads', CouplingError):
        ScopeSparsifier().prepare(model, by_presets)
    heads = Coupling({"value.weight": "(u d) i", "output.weight": "o (u d)"}, sizes={"u": 4})
    sparsifier = prepared(model, heads.entries(model))
    sparsifier.step()
    rows, columns = sparsifier.mask("value.weight").all(1), sparsifier.mask("output.weight").all(0)
    assert torch.equal(rows, columns) and rows.view(4, 2).all(1).sum() == rows.view(4, 2).any(1).sum() == 2


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel, self.table = nn.Parameter(torch.ones(4, 4)), nn.Buffer(torch.ones(4, 4))
        self.count = nn.Parameter(torch.ones(4, dtype=torch.int32), requires_grad=False)

    def save_pretrained(self, path):
        pass


def of(*layers, entry=None):
    """A call that prepares a model of these layers."""
    return lambda: prepared(nn.Sequential(*layers), None if entry is None else [entry])


MISTAKES = {
    "sparsity_level and nnz are mutually exclusive": lambda: ScopeSparsifier(0.5, nnz=2),
    "sparsity_level and patterns.n_m(2, 4) are mutually excl": lambda: ScopeSparsifier(0.5, pattern=patterns.n_m(2, 4)),
    "nnz and patterns.rows(0.5) are mutually": lambda: ScopeSparsifier(nnz=2, pattern=patterns.rows(0.5)),
    "defaults: 'norm' and 'score' are mutually exclusive": lambda: ScopeSparsifier(norm=1, score=keep_mask),
    "'pattern' and 'block_shape' are": lambda: ScopeSparsifier(pattern=patterns.rows(), block_shape=(1, 2)),
    "pattern must be one of `sparsekit_ao.patterns`, or a text such as": lambda: ScopeSparsifier(pattern="2-4"),
    "give one pattern, got '2:4' and pattern='rows'": lambda: ScopeSparsifier("2:4", pattern="rows"),
    "sparsity_level must be a number or a pattern, got the text '0.5'": lambda: ScopeSparsifier("0.5"),
    "got a Linear; give the model to prepare(model)": lambda: ScopeSparsifier(nn.Linear(2, 2)),
    "patterns.n_m('2', 4) needs whole numbers, got '2'": lambda: patterns.n_m("2", 4),
    "n_m keeps n of m, so 0 <= n <= m and m >= 1; got n=0, m=0": lambda: patterns.n_m(0, 0),
    "n_m keeps n of m, so 0 <= n <= m and m >= 1; got n=5, m=4": lambda: patterns.Pattern("n_m", (5, 4)),
    "arguments of a pattern 'n_m' must have length 2, got (2,)": lambda: patterns.Pattern("n_m", (2,)),
    "arguments of a pattern 'rows' must have length 0, got (2,)": lambda: patterns.Pattern("rows", (2,)),
    "blocks needs positive sizes (or -1 for all), got 0 x -1": lambda: patterns.blocks(0, -1),
    "blocks needs positive sizes (or -1 for all), got -1 x -5": lambda: patterns.blocks(-1, -5),
    "v_n_m needs a positive number of rows (or -1 for all), got v=0": lambda: patterns.v_n_m(0, 2, 8),
    "v_n_m needs a positive number of rows (or -1 for all), got v=-3": lambda: patterns.v_n_m(-3, 2, 8),
    "heads needs at least one head, got 0": lambda: patterns.Pattern("heads", (0,)),
    "patterns.heads(1): needs a weight with outputs, got shape ()": lambda: prepared(
        Holder(w=torch.tensor(3.0)), [{"tensor_fqn": "w", "pattern": patterns.heads(1)}]
    ),
    "is_transposed=True): needs a weight with inputs and outputs, got shape (8,)": lambda: patterns.Pattern(
        "n_m", (2, 4), is_transposed=True
    ).resolve(nn.LayerNorm(8), "weight"),
    "patterns.heads(2.0) needs whole numbers, got 2.0": lambda: patterns.heads(2.0),
    "patterns.rows(8): sparsity level must lie in [0, 1], got 8": lambda: patterns.rows(8),
    "unknown pattern 'row'; known: unstructured, n_m": lambda: patterns.Pattern("row"),
    "n_m(2, 4) keeps a fixed number in every group": lambda: prepared(pattern=patterns.n_m(2, 4), scope_coupling="all"),
    "prepare: model must be a torch.nn.Module, got list": lambda: ScopeSparsifier().prepare([nn.Linear(2, 2)]),
    "config=None found no Linear or convolution in the model": lambda: prepared(nn.ReLU()),
    "'0.weight' has no shape yet; run one forward of the lazy module first": of(nn.LazyLinear(4)),
    "'0.weight' belongs to an embedding with sparse=True": of(nn.Embedding(8, 4, sparse=True), entry=LINEAR),
    "'count' is torch.int32; only float16, bfloat16,": lambda: prepared(Own(), [{"tensor_fqn": "count"}]),
    "'table' matches no parameter of the model. It is a buffer": lambda: prepared(Own(), [{"tensor_fqn": "table"}]),
    "Its parameters are kernel, count.": lambda: prepared(Own(), [{"tensor_fqn": "weight"}]),
    "is stored as torch.sparse_coo; only dense weights": lambda: prepared(
        nn.ParameterList([nn.Parameter(torch.eye(4).to_sparse())]), [{"tensor_fqn": "0"}]
    ),
    "unknown key 'score'. ScopeSparsifier takes it": lambda: DynamicSparsifier().prepare(
        nn.Linear(2, 2), [{"tensor_fqn": "weight", "score": "wanda"}]
    ),
    "no mask for 'fc'; sparsified tensors: 0.weight": lambda: prepared().mask("fc"),
    "update_mask: 'weight' of this Linear was not prepared": lambda: prepared().update_mask(nn.Linear(2, 2), "weight"),
    "expected a dict with 'state' and 'groups'": lambda: prepared().load_state_dict({"state": {}}),
    "check: every mask keeps everything, because no masks were chosen yet": lambda: prepared().check(),
    "0.weight: model must be a torch.nn.Module, got str": lambda: prepared().check("model"),
    "the model to squash must be given by name, as squash": lambda: prepared().squash_mask(nn.Linear(2, 2)),
    "0.weight has no 'sparse_block_shape'; it has": lambda: prepared().squash_mask(("sparse_block_shape",)),
    "'fc' is not a sparsified module; choose from ['0', '2']": lambda: prepared().squash_mask(None, {"fc": ("nnz",)}),
    "params_to_keep must be a tuple of keys, got 'nnz'": lambda: prepared().squash_mask("nnz"),
    "params_to_keep_per_layer must be a dict {module: keys}, got ['0']": lambda: prepared().squash_mask(None, ["0"]),
    "removed in the given model, or it is not a copy": lambda: prepared().squash_mask(model=linear_model(8, 4, 4)),
    "resume: masks must be a dict of names and masks, got 3": lambda: dynamic.inits.resume(3),
    "schedule must be a function (step -> number), such as schedules.cubic(": lambda: ScheduleSL(prepared(), "cubic"),
    "a number in [0, 1]; at step 0 it gave 'x'": lambda: ScheduleSL(prepared(), lambda step: "x"),
    "such as schedules.cubic(0.0, 0.9": lambda: ScheduleSL(prepared(), schedules.cubic),
    "ScheduleSL: schedule must be a function": lambda: ScheduleSL(prepared(), [schedules.linear]),
    "strength must be a schedule": lambda: ProximalSparsifier(strength=schedules.linear),
    "update_fraction must be a schedule": lambda: DynamicSparsifier(0.5, until=900, update_fraction=schedules.cosine),
    "target must be a schedule": lambda: DynamicSparsifier(until=900, grow=None, target=schedules.cubic),
    "no argument 'sparsity'. Did you mean 'sparsity_level'? It takes": lambda: ScopeSparsifier(sparsity=0.5),
    "no argument 'block_size'. Did you mean 'block_sh": lambda: DynamicSparsifier(0.5, block_size=(1, 4)),
    "ScopeSparsifier has no argument '__class__'. It takes": lambda: ScopeSparsifier(__class__=3),
    "DynamicSparsifier has no argument 'scop'. Did you mean 'scope'?": lambda: RigL(0.5, until=900, scop="i"),
    "end of a schedule must be a finite number, got nan": lambda: schedules.linear(0.0, float("nan"), 3),
    "join: schedules must be a function": lambda: schedules.join([schedules.constant(0.0), 0.5], [3]),
    "join: schedules must be a list of at least one": lambda: schedules.join([], []),
    "drop_fraction: target is a sparsity": lambda: schedules.drop_fraction("a", 0.5),
    "until must be an int >= 1, got 'end'": lambda: RigL(0.5, until="end"),
    "export: model must be a torch.nn.Module, got ScopeSparsifier; pass its .model": lambda: export.report(prepared()),
    "Own.save_pretrained takes no state_dict. Squash a deep copy": lambda: export.save_pretrained(Own(), {}, "x"),
    "multiple_of must be a positive int, got 0": lambda: removal.shrink(
        linear_model(8, 8, 4), torch.ones(2, 8), multiple_of=0
    ),
    "expert_couplings: model must be a torch.nn.Module, got str": lambda: coupling.expert_couplings("bert"),
    "coupling 'a': model must be a torch.nn.Module, got list": lambda: Coupling({"a": "u"}).entries([]),
    "must be a list of Coupling, got Linear": lambda: coupling.joint_entries(nn.Linear(2, 2), nn.Linear(2, 2)),
    "the parameter must be a tensor, got ndarray": lambda: BlockSpec(np.ones((2, 2))),
    "BlockCoupling takes a list of BlockSpec, got Tensor": lambda: BlockCoupling([torch.ones(2)]),
    "ScopeCoupling takes a list of ScopeSpec, got Tensor": lambda: ScopeCoupling([torch.ones(2)]),
    "thresholds must be a number or a tensor, got '1'": lambda: ScopeSpec(torch.ones(2)).soft_threshold("1"),
    "thresholds must be a number or a tensor, got 'a'": lambda: BlockSpec(torch.ones(2)).hard_threshold("a"),
    "plot_mask needs a mask, such as sparsifier.mask(name), got str": lambda: plot_mask("0.weight"),
    "plot_layers needs sparsekit_ao.export.report(model), got a Report": lambda: plot_layers(prepared().report()),
}


@pytest.mark.parametrize("text", MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_explained(text):
    with refuses(text, (SparsityError, TypeError)):
        MISTAKES[text]()


@pytest.mark.parametrize(
    ("layer", "pattern", "text"),
    [
        (nn.Conv2d(8, 6, 1, groups=2), patterns.blocks(2, 2), "needs the outputs of each group divisible by 2, got 3"),
        (nn.ConvTranspose2d(6, 8, 1, groups=2), patterns.blocks(2, 2), "needs the inputs of each group divisible by 2"),
        (nn.ConvTranspose1d(12, 6, 3, groups=2), patterns.n_m(2, 4), "needs the inputs of each group divisible by 4"),
        (nn.ConvTranspose1d(8, 8, 1, groups=2), patterns.heads(2), "with 2 groups are not in one row"),
        (nn.Conv2d(8, 4, 3), None, "block (1, 1) has 2 entries, but the view has 4 dimensions"),
    ],
)
def test_blocks_and_heads_do_not_cross_groups_and_matrices_are_no_convolutions(layer, pattern, text):
    options = {"block_shape": (1, 1)} if pattern is None else {"pattern": pattern}
    with refuses(text):
        prepared(nn.Sequential(layer), **options)


@pytest.mark.parametrize(
    ("score", "text"),
    [
        (lambda w, name: w[0], "0.weight: score must return a floating-point tensor of the weight's shape (4, 8), got"),
        (lambda w, name: 3.0, "got float"),
        (lambda w, name: w > 0, "got torch.bool (4, 8)"),
        (lambda w, name: w.to(torch.float8_e4m3fn), "got torch.float8_e4m3fn (4, 8)"),
        (lambda w, name: w.to("meta"), "score must return a tensor on the weight's device cpu, got meta"),
    ],
)
def test_a_score_that_returns_something_else(score, text):
    sparsifier = prepared(score=score)
    with refuses(text):
        sparsifier.step()
    assert sparsifier.mask("0.weight").all()


def in_place(weight, statistics):
    return weight.abs_()


@pytest.mark.parametrize("reads", [{}, {"needs": ()}])
def test_a_score_that_works_in_place_leaves_the_weight_as_it_is(reads, monkeypatch):
    for name, value in reads.items():
        monkeypatch.setattr(in_place, name, value, raising=False)
    sparsifier = prepared(score=in_place)
    before = copy.deepcopy(sparsifier.model.state_dict())
    sparsifier.step()
    weight = "0.parametrizations.weight.original"
    assert torch.equal(sparsifier.model.state_dict()[weight], before[weight])


# the order of calls


@pytest.mark.parametrize("call", ["step", "squash_mask", "report", "check", "materialized"])
def test_calls_before_prepare_and_after_squash(call):
    def called(sparsifier):
        found = getattr(sparsifier, call)()
        return found.__enter__() if call == "materialized" else found

    with refuses(f"{call}: no model has been prepared; call prepare"):
        called(ScopeSparsifier())
    sparsifier = prepared()
    sparsifier.step()
    sparsifier.squash_mask()
    if call != "check":
        with refuses(f"{call}: the masks were squashed already; call prepare(model, config)"):
            called(sparsifier)
    sparsifier.prepare(sparsifier.model, None)  # the next round of iterative pruning
    sparsifier.step()


class Wrapped(nn.parallel.DistributedDataParallel):
    def __init__(self, module):
        nn.Module.__init__(self)  # no process group
        self.module = module


def test_a_model_that_ddp_has_wrapped_is_refused_where_it_would_be_masked():
    model = linear_model(8, 4)
    before = list(model.state_dict())
    with refuses("prepare the model inside (model.module), and wrap it anew after that"):
        ScopeSparsifier().prepare(Wrapped(model))
    assert list(model.state_dict()) == before
    ProximalSparsifier(nnz=1, conditioner=None).prepare(Wrapped(linear_model(8, 4)))  # weights stay parameters


def test_prepare_twice():
    sparsifier = prepared()
    with refuses("already holds a prepared model; call squash_mask first"):
        sparsifier.prepare(sparsifier.model, None)
    with refuses("'0.weight' already has a sparsity mask; squash it before"):
        ScopeSparsifier().prepare(sparsifier.model, None)


def test_masks_that_are_gone():
    sparsifier = prepared()
    sparsifier.step()
    snapshot = copy.deepcopy(sparsifier.model)
    sparsifier.squash_mask(model=snapshot)
    with refuses("0.weight: its mask was removed"):
        sparsifier.squash_mask(model=snapshot)
    nn.utils.parametrize.remove_parametrizations(sparsifier.model[0], "weight")
    with refuses("0.weight: its mask was removed"):
        sparsifier.step()


def test_a_mask_that_is_gone_leaves_the_others_as_they_were():
    for sparsifier in (ScopeSparsifier(), WeightNormSparsifier(), WeightNormSparsifier(norm=torch.exp)):
        model = linear_model(8, 6, 8)
        sparsifier.prepare(model, None)
        sparsifier.step()
        before = sparsifier.mask("0.weight").clone()
        nn.utils.parametrize.remove_parametrizations(model[2], "weight")
        for level in (0.0, 0.9, 1.0):
            sparsifier.groups[0]["sparsity_level"] = level
            with refuses("2.weight: its mask was removed"):
                sparsifier.step()
            assert torch.equal(sparsifier.mask("0.weight"), before)


@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
def test_masks_on_the_meta_device_cannot_be_chosen(level):
    nearly, weight_norm = NearlyDiagonalSparsifier(1), WeightNormSparsifier(level)
    for sparsifier in (ScopeSparsifier(level), weight_norm, WeightNormSparsifier(level, norm=torch.exp), nearly):
        with torch.device("meta"):
            sparsifier.prepare(nn.Sequential(nn.Linear(8, 8)), None)
        with refuses("step: 0.weight is on the meta device"):
            sparsifier.step()
        with refuses("0.weight is on the meta device"):
            sparsifier.update_mask(**sparsifier.groups[0])


@pytest.mark.parametrize("kind", [ScopeSparsifier, WeightNormSparsifier, NearlyDiagonalSparsifier])
def test_unknown_keys_of_every_sparsifier(kind):
    model, sparsifier = linear_model(8, 4), kind()
    with refuses("unknown key 'levle'"):
        sparsifier.prepare(model, [{**LINEAR, "levle": 1}])
    sparsifier.prepare(model, None)
    sparsifier.update_mask(**sparsifier.groups[0])
    with refuses("update_mask: unknown key 'levle'"):
        sparsifier.update_mask(**sparsifier.groups[0], levle=1)


LEVELS = [None, True, 1.5, float("nan"), "0.5", torch.tensor([0.5, 0.6]), torch.tensor(0.5), np.array([0.1, 0.2])]
COUNTS = [{"nnz": 2, "scope_shape": (1, 4)}, {"pattern": "2:4"}]
KINDS = [ScopeSparsifier, StraightThrough, DynamicSparsifier]
BAD_LEVELS = [*product(KINDS, COUNTS, LEVELS), *product([ScopeSparsifier], [{}], LEVELS)]


@pytest.mark.parametrize(("kind", "budget", "level"), [*BAD_LEVELS, (WeightNormSparsifier, {}, float("nan"))])
def test_no_mask_changes_if_any_level_of_a_step_is_bad(kind, budget, level):
    options = {"grow": "random", "update_every": 1} if kind is DynamicSparsifier else {}
    model, sparsifier = linear_model(8, 4, 4), kind(**budget, **options)
    sparsifier.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.attach(optimizer)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    sparsifier.groups[1]["sparsity_level"] = level
    before = sparsifier.mask("0.weight").clone()
    with refuses("2.weight: sparsity level"):
        sparsifier.step()
    assert torch.equal(sparsifier.mask("0.weight"), before)


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
    with refuses("no model has been prepared"):
        sparsifier.step()
    monkeypatch.undo()
    sparsifier.prepare(model, None)
    assert [g["tensor_fqn"] for g in sparsifier.groups] == ["0.weight", "2.weight"]


# models that cannot be masked, or not any more


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_scripted_modules_are_refused_and_left_alone_beside_others():
    scripted = torch.jit.script(nn.Linear(8, 4))
    with refuses("prepare: model is scripted or traced; give the one that"):
        prepared(scripted, [{"tensor_fqn": "weight"}])
    model = nn.Sequential(nn.Linear(8, 8), scripted)
    with refuses("'1.weight' is in a scripted or traced module"):
        prepared(model, [{"tensor_fqn": "1.weight"}])
    sparsifier = prepared(model)
    assert [g["tensor_fqn"] for g in sparsifier.groups] == ["0.weight"]
    sparsifier.step()
    model(torch.ones(2, 8)).sum().backward()
    sparsifier.squash_mask()


def test_weights_and_masks_without_values():
    sparsifier = prepared()
    sparsifier.step()
    weight = sparsifier.model[0].parametrizations.weight.original
    sparsifier.model[0].parametrizations.weight.original = nn.Parameter(weight.to("meta"))  # as offloading does
    with refuses("0.weight has no values, since it was moved to the meta device or offloaded"):
        sparsifier.step()
    moved = prepared()
    moved.step()
    saved = moved.state_dict()
    moved.model.to("meta")
    for call in ("check", "report", "step", "squash_mask"):
        with refuses(f"{call}: 0.weight is on the meta device, so its mask has no values; load"):
            getattr(moved, call)()
    saved["state"]["0.weight"]["mask"] = saved["state"]["0.weight"]["mask"].to("meta")
    with refuses("load_state_dict: 0.weight: the saved mask is on the meta device"):
        prepared().load_state_dict(saved)


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        (patterns.n_m(2, 4), "the state was saved with block_shape=(1, 1), scope_shape=(1, 4), and this sparsifier"),
        (patterns.v_n_m(4, 2, 4), "nnz=4 then block_shape=(1, 1), scope_shape=(1, 4), nnz=2"),
        (patterns.rows(0.5), "was prepared with single elements over the tensor. Prepare with the structure"),
    ],
)
def test_a_state_of_another_structure_is_refused(saved, text):
    state = prepared(pattern=saved).state_dict()
    sparsifier = prepared()
    before = copy.deepcopy(sparsifier.state_dict())
    with refuses(text):
        sparsifier.load_state_dict(state)
    assert str(sparsifier.state_dict()) == str(before)


@pytest.mark.parametrize("make", [ScopeSparsifier, WeightNormSparsifier])
def test_a_state_is_loaded_before_a_model_on_the_meta_device_gets_its_values(make):
    model, other = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8, device="meta"))
    sparsifier, restored = make(0.5), make(0.5)
    sparsifier.prepare(model)
    sparsifier.step()
    restored.prepare(other)
    restored.load_state_dict(sparsifier.state_dict())
    other.to_empty(device="cpu")
    other.load_state_dict(model.state_dict())
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(restored.mask("0.weight"), sparsifier.mask("0.weight"))


def test_a_pattern_that_fits_no_layer_says_which_config_does():
    model = linear_model(10, 8)
    remedy = "Name tensors, and set their keys, in a config of a sparsifier."
    with refuses(f'divisible by 3, got 10. Use edge="partial", or leave the tensor out. {remedy}'):
        prune(model, "2:3")
    sparsifier = ScopeSparsifier(pattern="2:3")
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight", "edge": "partial"}])
    sparsifier.step()
    assert sparsifier.mask("0.weight").sum(1).tolist() == [7] * 8  # two of each three, and the tenth
