"""Masked transformers models saved as dense ones with masks beside them, and LoRA adapters merged under masks."""

import warnings
from collections import OrderedDict

import pytest
import torch
from exported import batches, looks, mlp, pruned, same
from torch import nn

from sparsekit_ao import ScopeSparsifier, SparsityError, export, patterns


def bert():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=40
    )
    return transformers.BertModel(config).eval()


def masked_bert():
    model, sparsifier = bert(), ScopeSparsifier(pattern=patterns.n_m(2, 4))
    sparsifier.prepare(model, [{"tensor_fqn": "encoder.*dense.weight"}])
    sparsifier.step()
    return model, sparsifier


@pytest.mark.parametrize("squash", [False, True])
def test_saved_and_loaded_outputs_are_the_same_bits(squash, tmp_path):
    model, sparsifier = masked_bert()
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        want = model(ids).last_hidden_state
    if squash:
        sparsifier.squash_mask()
    before = looks(model)
    report = export.save_pretrained(model, sparsifier, tmp_path)
    assert same(before, model) and len(report.converted) == 3
    assert report.after < report.before / 32 + 2000
    again = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(ids).last_hidden_state, want)
    masks = export.load_masks(tmp_path)
    assert masks.keys() == {g["tensor_fqn"] for g in sparsifier.groups}
    for name, mask in masks.items():
        assert torch.equal(mask, sparsifier.mask(name) != 0) and not again.get_parameter(name)[~mask].any()


def test_training_goes_on_with_the_loaded_masks(tmp_path):
    model, sparsifier = masked_bert()
    export.save_pretrained(model, sparsifier, tmp_path)
    again, other = type(model).from_pretrained(tmp_path), ScopeSparsifier(pattern=patterns.n_m(2, 4))
    other.prepare(again, [{"tensor_fqn": "encoder.*dense.weight"}])
    for name, mask in export.load_masks(tmp_path).items():
        other.mask(name).copy_(mask)
    assert all(torch.equal(other.mask(name), sparsifier.mask(name)) for name in sparsifier.state)


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    model, sparsifier = masked_bert()
    path = tmp_path / "new"
    with pytest.raises(SparsityError, match="Sequential has no method save_pretrained"):
        export.save_pretrained(mlp(), sparsifier, path)
    with pytest.raises(SparsityError, match="the model has no tensor 0.weight"):
        export.save_pretrained(model, pruned()[1], path)
    with pytest.raises(SparsityError, match="there are no masks"):
        export.save_pretrained(model, ScopeSparsifier(), path)
    name = "encoder.layer.0.output.dense.weight"
    with pytest.raises(SparsityError, match=r"dense.weight is \(32, 64\), but its mask is \(64, 32\)"):
        export.save_pretrained(model, {name: torch.ones(64, 32, dtype=torch.bool)}, path)
    assert not path.exists()


# LoRA


def adapted(squash, targets=("up", "down")):
    """A pruned model with trained adapters, the base model's weights, and the product that each adapter adds."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(up=nn.Linear(64, 128), relu=nn.ReLU(), down=nn.Linear(128, 64)))
    model, sparsifier = pruned(model, pattern=patterns.n_m(2, 4), names=["up.weight", "down.weight"], squash=squash)
    with torch.no_grad():
        before = {name: sparsifier.groups[k]["module"].weight.clone() for k, name in enumerate(sparsifier.state)}
    lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=list(targets)))
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
    assert report.converted == ("up.weight", "down.weight") and 0.3 < report.difference < 1
    assert "up.weight: its mask drops" in str(report)
    if squash:
        assert not hasattr(merged.up, "parametrizations")
    else:
        sparsifier.step()  # the masks are still registered, and the sparsifier goes on
        sparsifier.squash_mask()
    merged(batches()[0])
    export.check(merged.half(), "pack_2_4", tensors=["up.weight"])


def test_without_it_every_zero_is_lost_or_the_merge_refused():
    lora, _, _, _ = adapted(squash=True)
    assert not (lora.merge_and_unload().up.weight == 0).any()
    lora, _, _, _ = adapted(squash=False)
    with pytest.raises(SparsityError, match="peft cannot merge adapters into masked weights"):
        lora.merge_and_unload()


def test_masks_may_come_from_a_file_and_layers_without_adapters_are_reported():
    lora, sparsifier, _, _ = adapted(squash=True, targets=["down"])
    masks = {name: sparsifier.mask(name).clone() for name in sparsifier.state}
    merged, report = export.merge_lora(lora, masks)
    assert report.converted == ("down.weight",) and dict(report.left) == {"up.weight": "no adapter changes it"}
    assert not merged.down.weight[~masks["down.weight"]].any()


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


def test_adapters_must_be_merged_before_saving(tmp_path):
    peft = pytest.importorskip("peft")
    model, sparsifier = masked_bert()
    sparsifier.squash_mask()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft reads an attribute that transformers deprecates
        lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["dense"]))
    with pytest.raises(SparsityError, match="call export.merge_lora"):
        export.save_pretrained(lora, sparsifier, tmp_path)
    merged, _ = export.merge_lora(lora, sparsifier)
    assert export.save_pretrained(merged, sparsifier, tmp_path).converted
