"""Models that are hard to convert: each target converts them rightly, or names the fault and leaves them unchanged."""

import copy

import pytest
import torch
from exported import batches, looks, mlp, pruned, same
from torch import nn
from torch.ao.pruning import WeightNormSparsifier
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from sparsekit_ao import ScopeSparsifier, SparsityError, export, patterns
from sparsekit_ao.export.check import TARGETS
from sparsekit_ao.export.layers import layers_of
from sparsekit_ao.export.quantization import _check_packed


def quantize(model, found, **options):
    torchao = pytest.importorskip("torchao.quantization")
    return export.quantize(model, torchao.Int8WeightOnlyConfig(), found, **options)


fbgemm = pytest.param(
    export.fbgemm,
    id="fbgemm",
    marks=pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="needs fbgemm"),
)
BOTH = pytest.mark.parametrize("convert", [fbgemm, pytest.param(quantize, id="quantize")])


class Around(nn.Module):
    """A pruned layer, and what is computed around it."""

    def __init__(self, function):
        super().__init__()
        self.layer = pruned(nn.Sequential(nn.Linear(64, 64)), names=["0.weight"])[0][0]
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def hidden_in_a_closure():
    model = Around(lambda _, x: inner(x))
    inner = model.layer
    return model


def with_a_generator():
    model = Around(lambda self, x: self.layer(x))
    model.state = (i for i in range(3))
    return model


@BOTH
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (hidden_in_a_closure, r"a copy of the model still calls the original module of layer\.weight, as closures"),
        (with_a_generator, "the model cannot be copied: cannot pickle 'generator' object"),
        (lambda: Around(lambda self, x: self.layer(x).log()), "output of the model contains nan on these batches"),
        (lambda: Around(lambda self, x: self.layer(x) and None), None),
        (lambda: Around(lambda self, x: (self.layer(x), None)[1]), "the model returned no tensor"),
    ],
    ids=["closure", "generator", "nan", "raises", "nothing"],
)
def test_what_cannot_be_compared_is_refused(convert, make, text):
    model = make()
    before = looks(model)
    with pytest.raises(SparsityError if text else RuntimeError, match=text):
        convert(model, batches())
    assert same(before, model) and not model.layer._forward_hooks and not model.layer._forward_pre_hooks


@BOTH
@pytest.mark.parametrize(
    ("function", "bound"),
    [
        (lambda self, x: self.layer(x.mul_(2)), 0.1),
        (lambda self, x: nn.functional.dropout(self.layer(x), 0.5, training=True), 0.1),
        (lambda self, x: self.layer(self.layer(x) * 10), 0.2),
    ],
    ids=["writes to its input", "always random", "calls a layer twice"],
)
def test_both_models_see_the_same_inputs_and_random_numbers(convert, function, bound):
    model, found = Around(function).train(), batches()
    kept, state = [b.clone() for b in found], torch.get_rng_state()
    converted, report = convert(model, found)
    assert 0 < report.difference < bound and report.converted == ("layer.weight",)
    assert all(map(torch.equal, kept, found)) and torch.equal(torch.get_rng_state(), state)
    assert all(m.training for m in [*model.modules(), *converted.modules()])


@BOTH
def test_batches_are_a_list_of_batches(convert):
    model = mlp()
    with torch.no_grad():
        model[0].weight[:, 8:] = 0
    for found, text in (
        (batches()[0], "got one Tensor; pass"),
        ({"input": batches()[0]}, "got one dict"),
        (iter(()), "there are no batches; an iterator that was used up"),
    ):
        with pytest.raises(SparsityError, match=text):
            convert(model, found)
    assert convert(model, (b for b in batches()))[1].converted


@BOTH
def test_layers_behind_checkpoint_wrappers_and_with_other_strides(convert):
    model, _ = pruned()
    model[2].weight = nn.Parameter(model[2].weight.detach().T.contiguous().T)
    want = convert(model, batches())[0](batches()[0])
    wrapped = nn.Sequential(checkpoint_wrapper(model[0]), *model[1:])
    converted, report = convert(wrapped, batches())
    assert report.converted[:2] == ("0.weight", "2.weight")
    assert torch.equal(converted(batches()[0]), want)


class Tripled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 3


@pytest.mark.parametrize("target", ["fbgemm", "openvino"])
def test_layers_that_compute_something_else_are_refused(target):
    model, _ = pruned(nn.Sequential(Tripled(64, 64)), names=["0.weight"])
    with pytest.raises(SparsityError, match=r"0\.weight: needs the forward of Linear, but Tripled has its own"):
        export.check(model, target)
    model, _ = pruned()
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(SparsityError, match=r"0\.weight: has forward hooks, which the converted layer would not run"):
        export.check(model, target)
    many, _ = pruned(nn.Sequential(nn.Linear(2048 * 66, 1)), names=["0.weight"]) if target == "fbgemm" else (None, 0)
    if many is not None:
        with pytest.raises(SparsityError, match=r"needs at most 133,144 inputs, whose sums fit 32 bits, got 135,168"):
            export.check(many, target)


def test_openvino_takes_tensors_and_its_own_rate():
    from sparsekit_ao.export.openvino import RATE

    model, _ = pruned()
    with pytest.raises(SparsityError, match="batches must hold tensors only, got bool as argument 'flag'"):
        export.openvino(model, [{"input": batches()[0], "flag": True}])
    with pytest.raises(SparsityError, match="is set by rate=..., not in config"):
        export.openvino(model, batches(), config={RATE: 0.5})
    with pytest.raises(
        SparsityError, match=r"4\.weight: needs more than 12\.50% of zeros .* dimension 0|multiple of 64"
    ):
        export.openvino(model, batches(), tensors=["4.weight"])
    with pytest.raises(SparsityError, match=r"0\.weight: needs more than 12\.50% of zeros to be smaller, got 0\.00%"):
        export.check(mlp(), "openvino", ["0.weight"])


def test_only_2_4_weights_may_be_packed_as_2_4():
    class SparseTensor(torch.Tensor):
        """As torchao's: a packed weight."""

        def dequantize(self):
            return self.as_subclass(torch.Tensor)

    model, _ = pruned(pattern=patterns.n_m(2, 4), names=["0.weight"])
    packed = copy.deepcopy(model)
    packed[0].weight = nn.Parameter(packed[0].weight.detach().as_subclass(SparseTensor))
    _check_packed(model, packed, ["0.weight"])
    packed[2].weight = nn.Parameter(packed[2].weight.detach().as_subclass(SparseTensor))
    with pytest.raises(SparsityError, match=r"packs 2\.weight as 2:4 as well, which needs at most 2 .*FqnToConfig"):
        _check_packed(model, packed, ["0.weight", "2.weight"])


def test_configs_of_torchao_may_name_layers():
    torchao = pytest.importorskip("torchao.quantization")
    int8 = torchao.Int8WeightOnlyConfig()
    report = export.quantize(pruned()[0], torchao.FqnToConfig({"0": int8, "2": int8}), batches())[1]
    assert report.converted == ("0.weight", "2.weight") and list(report.left) == ["4.weight"]
    unused = Around(lambda self, x: self.layer(x))
    unused.other = copy.deepcopy(unused.layer)
    assert "other.weight: no batch calls its module" in str(export.quantize(unused, int8, batches())[1])


# Masks of torch.ao's own sparsifiers, and names behind wrappers


def masked_by_torch():
    model = mlp()
    sparsifier = WeightNormSparsifier(sparsity_level=0.8, sparse_block_shape=(1, 4), zeros_per_block=4)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    return model, sparsifier


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "pack_2_4"])
def test_masks_of_torch_are_masks(target):
    model, _ = masked_by_torch()
    assert [(layer.fqn, layer.masked) for layer in export.check(model, target)] == [("0.weight", True)]


def test_masks_of_torch_are_squashed_first(tmp_path):
    model, sparsifier = masked_by_torch()
    assert next((row.tensor, row.patterns) for row in export.report(model)) == ("0.weight", ("1x4 blocks",))
    for convert in (lambda m: export.save_sparse(m, tmp_path / "x"), export.coreml_metadata):
        with pytest.raises(SparsityError, match=r"0\.weight still has its mask; call sparsifier\.squash_mask"):
            convert(model)
    sparsifier.squash_mask()
    assert "0.weight" in export.save_sparse(model, tmp_path / "x").converted
    model[0] = nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(SparsityError, match=r"save_sparse does not take\s+0\.weight: is computed by _WeightNorm"):
        export.check(model, "save_sparse")


def test_names_are_those_of_the_state_dict_behind_checkpoint_wrappers(tmp_path):
    model = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(64, 32))), checkpoint_wrapper(nn.Linear(64, 32)))
    sparsifier = ScopeSparsifier(pattern=patterns.n_m(2, 4))
    sparsifier.prepare(model)
    sparsifier.step()
    assert [(layer.names, layer.masked) for layer in layers_of(model)] == [
        (("0.0.weight",), True),
        (("1.weight",), True),
    ]
    assert len(export.check(model, "save_sparse", [g["tensor_fqn"] for g in sparsifier.groups])) == 2
    sparsifier.squash_mask()
    model.half()
    assert export.pack_2_4(model, tmp_path / "x").converted == ("0.0.weight", "1.weight")
    again = nn.Sequential(nn.Sequential(nn.Linear(64, 32)), nn.Linear(64, 32)).half()
    export.load_2_4(again, tmp_path / "x")
    assert torch.equal(again[1].weight, model.state_dict()["1.weight"])
