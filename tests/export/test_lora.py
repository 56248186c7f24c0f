"""LoRA adapters are merged under masks, and every zero stays."""

import copy
from collections import OrderedDict

import pytest
import torch
from export_models import batches, looks, pruned, same
from torch import nn

from sparsekit_ao import SparsityError, export, patterns, prune


def adapted(squash, targets=("up", "down"), **options):
    """A pruned model with trained adapters, the base model's weights, and the product that each adapter adds."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(up=nn.Linear(64, 128), relu=nn.ReLU(), down=nn.Linear(128, 64)))
    model, sparsifier = pruned(model, pattern=patterns.n_m(2, 4), names=["up.weight", "down.weight"], squash=squash)
    with torch.no_grad():
        before = {name: sparsifier.groups[k]["module"].weight.clone() for k, name in enumerate(sparsifier.state)}
    lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=list(targets), **options))
    deltas = {}
    for name, module in lora.named_modules():
        if hasattr(module, "lora_A"):
            torch.nn.init.normal_(module.lora_B["default"].weight)
            deltas[name.removeprefix("base_model.model.") + ".weight"] = module.get_delta_weight("default").detach()
    return lora, sparsifier, before, deltas


@pytest.mark.parametrize("squash", [False, True])
def test_a_merge_keeps_every_zero(squash):
    lora, sparsifier, before, deltas = adapted(squash)
    merged, report = export.merge_lora(lora, sparsifier)
    assert isinstance(merged, nn.Sequential) and type(merged.up).__name__.endswith("Linear")
    for name, delta in deltas.items():
        weight = merged.get_submodule(name.removesuffix(".weight")).weight.detach()
        keep = sparsifier.mask(name) != 0
        torch.testing.assert_close(weight, torch.where(keep, before[name] + delta, 0.0))
        assert not weight[~keep].any() and (weight[keep] != before[name][keep]).any()
    assert report.converted == ("up.weight", "down.weight") and report.difference is None
    assert "up.weight: its mask drops" in str(report) and "difference" not in str(report)
    if squash:
        assert not hasattr(merged.up, "parametrizations")
    else:
        sparsifier.step()  # the masks are still registered, and the sparsifier goes on
        sparsifier.squash_mask()
    merged(batches()[0])
    export.check(merged.half(), "to_2_4", tensors=["up.weight"])


def test_masks_may_come_from_a_file_and_layers_without_adapters_are_reported():
    lora, sparsifier, _, _ = adapted(squash=True, targets=["down"])
    masks = {name: sparsifier.mask(name).clone() for name in sparsifier.state}
    merged, report = export.merge_lora(lora, masks)
    assert report.converted == ("down.weight",) and dict(report.left) == {"up.weight": "no adapter changes it"}
    assert not merged.down.weight[~masks["down.weight"]].any()


def test_adapters_are_merged_into_what_prune_returned_with_the_masks_that_the_error_names():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model, report = prune(nn.Sequential(OrderedDict(up=nn.Linear(64, 128), down=nn.Linear(128, 64))), "2:4")
    masks = {row.tensor: model.get_parameter(row.tensor) != 0 for row in report}
    lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["up"], init_lora_weights=False))
    advice = r"give \{row.tensor: model.get_parameter\(row.tensor\) != 0 for row in report\}"
    with pytest.raises(SparsityError, match="merge_lora: expected a sparsifier .* that prune returned, " + advice):
        export.merge_lora(lora, report)
    masks_of_adapted = {row.tensor: model.get_parameter(row.tensor) != 0 for row in report}
    assert all(torch.equal(masks[name], mask) for name, mask in masks_of_adapted.items())
    merged, merge = export.merge_lora(lora, masks_of_adapted)
    assert merge.converted == ("up.weight",) and torch.equal(merged.up.weight != 0, masks["up.weight"])


def test_weight_norms_of_adapters_are_those_of_masked_weights():
    merged = {}
    for squash in (False, True):
        lora, sparsifier, _before, _deltas = adapted(squash, use_dora=True)
        original = lora.get_base_model().up.get_base_layer()
        dense = original.weight if squash else original.parametrizations.weight.original.detach().clone()
        merged[squash] = export.merge_lora(lora, sparsifier)[0].up
        if not squash:  # what the mask hides is still there
            hidden = ~(sparsifier.mask("up.weight") != 0)
            found = merged[squash].parametrizations.weight.original
            assert (found - dense)[hidden].abs().max() > 0 and (found != 0).all()
    torch.testing.assert_close(merged[False].weight, merged[True].weight, rtol=0, atol=0)


def test_states_of_adapters_that_cannot_be_merged_are_refused():
    def broken(lora):
        torch.nn.init.constant_(lora.get_base_model().up.lora_A["default"].weight, torch.nan)

    for change, text in (
        (lambda lora: lora.merge_adapter(), "is merged into a Linear already; call model.unmerge_adapter"),
        (lambda lora: lora.disable_adapter_layers(), "adapters are disabled"),
        (broken, "lora_A.default.weight of a Linear is not finite"),
    ):
        lora, sparsifier, _, _ = adapted(squash=True)
        change(lora)
        before = looks(lora)
        with pytest.raises(SparsityError, match=text):
            export.merge_lora(lora, sparsifier)
        assert same(before, lora)
    lora, sparsifier, _, _ = adapted(squash=True)
    for model in (lora.get_base_model(), nn.Linear(2, 2)):  # with adapters, and without
        with pytest.raises(SparsityError, match=f"expected a model of peft.get_peft_model, got {type(model).__name__}"):
            export.merge_lora(model, sparsifier)
    lora, sparsifier, _, _ = adapted(squash=True, targets=["up"], modules_to_save=["down"])
    with pytest.raises(SparsityError, match="the model has no tensor modules, for which there is a mask"):
        export.merge_lora(lora, {"modules": torch.ones(2)})
    with pytest.raises(SparsityError, match="down.weight is in modules_to_save, so peft replaces it"):
        export.merge_lora(lora, sparsifier)


def test_several_adapters_and_other_kinds():
    lora, sparsifier, _before, _ = adapted(squash=True)
    peft = pytest.importorskip("peft")
    lora.add_adapter("second", peft.LoraConfig(r=2, target_modules=["up"]))
    assert "the adapter 'second' is not active, so it is not merged but removed" in str(
        export.merge_lora(lora, sparsifier)[1]
    )
    model = pruned(nn.Sequential(OrderedDict(up=nn.Linear(64, 64))), pattern=patterns.n_m(2, 4), names=["up.weight"])
    other = peft.get_peft_model(model[0], peft.LoHaConfig(r=2, target_modules=["up"]))
    with pytest.raises(SparsityError, match="call export.merge_lora"):
        export.save_pretrained(other, model[1], "nowhere")
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter) if parameter.requires_grad else None
    merged, report = export.merge_lora(other, model[1])
    assert report.converted == ("up.weight",) and float((merged.up.weight == 0).float().mean()) == 0.5


@pytest.mark.parametrize("squash", [False, True])
def test_sparsifiers_prepared_on_the_model_with_adapters(squash):
    peft = pytest.importorskip("peft")
    model = nn.Sequential(OrderedDict(up=nn.Linear(64, 64), down=nn.Linear(64, 4)))
    lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["up"]))
    torch.nn.init.normal_(lora.get_base_model().up.lora_B["default"].weight)
    _, sparsifier = pruned(lora, patterns.n_m(2, 4), ["base_model.model.up.base_layer.weight"], squash)
    merged = export.merge_lora(lora, sparsifier)[0]
    assert float((merged.up.weight == 0).float().mean()) == 0.5
    if not squash:  # the rule of the other order: merge, then go on or squash
        sparsifier.step()
        sparsifier.load_state_dict(sparsifier.state_dict())
        assert sparsifier.check() == 1024 and sparsifier.report()[0].tensor == "up.weight"
        snapshot = copy.deepcopy(merged)
        for part in (snapshot, None):
            sparsifier.squash_mask(model=part)
        assert float((merged.up.weight == 0).float().mean()) == float((snapshot.up.weight == 0).float().mean()) == 0.5


def test_a_merge_that_does_not_fit_is_refused_before_anything_changes():
    lora, sparsifier, _, _ = adapted(squash=True)
    before = looks(lora)
    for masks, text in (
        ({"9.weight": torch.ones(2)}, "the model has no tensor 9.weight"),
        ({"up.weight": torch.ones(2)}, r"up.weight is \(128, 64\), but its mask is \(2,\)"),
        ({}, "there are no masks"),
    ):
        with pytest.raises(SparsityError, match=text):
            export.merge_lora(lora, masks)
    with pytest.raises(SparsityError, match="expected a model of peft.get_peft_model, got Sequential"):
        export.merge_lora(pruned()[0], sparsifier)
    assert same(before, lora)
