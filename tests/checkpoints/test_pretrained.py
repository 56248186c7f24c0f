"""Masked and smaller transformers models are saved and loaded, with masks, a manifest and a model card."""

import contextlib
import copy
import functools
import importlib.util
import json
import math
import re
import resource
import runpy
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import hf_models
import numpy
import pytest
import torch
import transformers
import yaml
from export_models import TWO_FOUR, looks, masked, mlp, pruned, same
from grids import grid, turns
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama import modeling_llama as llama

import sparsekit_ao
from sparsekit_ao import Coupling, ScopeSparsifier, SparsityError, export, patterns, prune, shrink_vocabulary
from sparsekit_ao.checkpoints import pretrained
from sparsekit_ao.masking import select, weight_mask
from sparsekit_ao.removal import compact, cut_to, shrink, shrink_layers

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "save_decilm.py"
save_decilm = runpy.run_path(str(EXAMPLE))["save_decilm"]


def masked_bert():
    model, _ = hf_models.make("BERT")
    return model, masked(model, ["encoder.*dense.weight"], **TWO_FOUR)


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
    assert same(before, model) and len(report.converted) == 6
    assert 0 < report.after - report.before < report.before / 32 + 2000  # the weights are dense, the masks are bits
    again = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(ids).last_hidden_state, want)
    masks = export.load_masks(tmp_path)
    assert masks.keys() == {g["tensor_fqn"] for g in sparsifier.groups}
    for name, mask in masks.items():
        assert torch.equal(mask, sparsifier.mask(name) != 0) and not again.get_parameter(name)[~mask].any()


@pytest.mark.parametrize("squash", [False, True])
def test_a_masked_model_is_saved_and_read_back_with_the_memory_of_one_shard(squash, tmp_path, monkeypatch):
    model, inputs = hf_models.make("Llama")
    sparsifier, living, most = ScopeSparsifier(0.5), {}, [0]
    sparsifier.prepare(model)
    sparsifier.step()
    with torch.no_grad():
        want = model(**inputs).logits
    if squash:
        sparsifier.squash_mask()

    def counted(weight, mask):
        masked = select(weight, mask)
        living[id(masked)] = masked.nbytes
        weakref.finalize(masked, living.pop, id(masked))
        most[0] = max(most[0], sum(living.values()))
        return masked

    def refused(path, **options):
        raise AssertionError(f"all of {path} was read at once")

    for module in (weight_mask, pretrained):
        monkeypatch.setattr(module, "select", counted)
    monkeypatch.setattr("safetensors.torch.load_file", refused)
    export.save_pretrained(model, sparsifier, tmp_path, max_shard_size="10KB")
    shards = [file.stat().st_size for file in tmp_path.glob("model*.safetensors")]
    assert len(shards) > 4 and most[0] <= max(shards) and bool(most[0]) != squash
    monkeypatch.undo()
    with torch.no_grad():
        assert torch.equal(type(model).from_pretrained(tmp_path).eval()(**inputs).logits, want)


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize(
    ("place", "name", "not_in_config"),  # GPT-2 has no output layer of its own
    grid(["device_map", "disk_offload", "cpu_offload"], ["Llama", "GPT-2"], ["", "it was not tried"]),
)
def test_an_offloaded_model_without_some_layers_is_saved(place, name, not_in_config, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, inputs = hf_models.make(name)
    model.save_pretrained(tmp_path / "dense")
    if place == "device_map":
        on_disk = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "offloaded"}
        model = type(model).from_pretrained(tmp_path / "dense", **on_disk)
    else:
        getattr(accelerate, place)(model, *([tmp_path / "offloaded"] if place == "disk_offload" else []))
    with torch.no_grad():
        small, report = shrink_layers(model, [inputs], 0.5)
        assert report.not_in_config == "" and next(small.parameters()).is_meta
        export.save_pretrained(small, replace(report, not_in_config=not_in_config), tmp_path / "small")
        again = export.load_pretrained(tmp_path / "small", type(model))
        assert torch.equal(again(**inputs).logits, small(**inputs).logits)


def test_a_pruned_model_that_is_offloaded_is_saved(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, inputs = hf_models.make("Llama")
    masks = {f"model.layers.{k}.mlp.up_proj.weight": model.model.layers[k].mlp.up_proj.weight > 0 for k in range(2)}
    with torch.no_grad():
        for name, mask in masks.items():
            model.get_parameter(name).mul_(mask)
        want = model(**inputs).logits
    accelerate.disk_offload(model, tmp_path / "offloaded")
    export.save_pretrained(model, masks, tmp_path / "saved")
    assert torch.equal(type(model).from_pretrained(tmp_path / "saved").eval()(**inputs).logits, want)
    masks[name] = ~mask
    with pytest.raises(SparsityError, match=rf"{name} is not zero"):
        export.save_pretrained(model, masks, tmp_path / "other")


def of_a_compiled_part(model):
    model.model.layers[0] = torch.compile(model.model.layers[0])
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch.compile
@pytest.mark.parametrize("compiled", [torch.compile, of_a_compiled_part])
@pytest.mark.parametrize("when", ["before prepare", "after prepare", "after squash_mask"])
def test_a_compiled_model_is_saved_under_plain_names(when, compiled, tmp_path):
    model, inputs = hf_models.make("Llama")
    model = compiled(model) if when == "before prepare" else model
    sparsifier = masked(model, pattern=patterns.n_m(2, 4))
    if when == "after squash_mask":
        sparsifier.squash_mask()
    model = model if when == "before prepare" else compiled(model)
    converted = export.save_pretrained(model, sparsifier, tmp_path).converted
    assert set(converted) == export.load_masks(tmp_path).keys() and not any("_orig_mod" in name for name in converted)
    plain = hf_models.make("Llama")[0]
    again, info = type(plain).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    model.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        assert torch.equal(again.eval()(**inputs).logits, model(**inputs).logits)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch.compile
@pytest.mark.parametrize("not_in_config", ["", "it was not tried"])
@pytest.mark.parametrize("compiled", [torch.compile, of_a_compiled_part])
def test_a_compiled_model_without_some_layers_is_saved_under_plain_names(compiled, not_in_config, tmp_path):
    model, inputs = hf_models.make("Llama")
    small, report = shrink_layers(model, [inputs], 0.5)
    export.save_pretrained(compiled(small), replace(report, not_in_config=not_in_config), tmp_path)
    again = export.load_pretrained(tmp_path, type(model))
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        assert torch.equal(again(**inputs).logits, small(**inputs).logits)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of gguf
@pytest.mark.parametrize("pruned", ["prune", "shrink", "shrink_layers"])
def test_a_model_of_a_gguf_file_is_saved_as_a_plain_one(pruned, tmp_path):
    gguf = pytest.importorskip("gguf")
    writer, rows = gguf.GGUFWriter(tmp_path / "model.gguf", "llama"), numpy.random.default_rng(0)
    for key, number in (("block_count", 2), ("context_length", 32), ("embedding_length", 32), ("vocab_size", 48)):
        getattr(writer, f"add_{key}")(number)
    for key, number in (("feed_forward_length", 64), ("head_count", 4), ("head_count_kv", 4)):
        getattr(writer, f"add_{key}")(number)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {"token_embd": (48, 32), "output_norm": (32,), "output": (48, 32)}
    for k in range(2):
        shapes |= {f"blk.{k}.{norm}_norm": (32,) for norm in ("attn", "ffn")}
        shapes |= {f"blk.{k}.attn_{name}": (32, 32) for name in ("q", "k", "v", "output")}
        shapes |= {f"blk.{k}.ffn_gate": (64, 32), f"blk.{k}.ffn_up": (64, 32), f"blk.{k}.ffn_down": (32, 64)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rows.normal(size=shape).astype(numpy.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    model = llama.LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    inputs = {"input_ids": torch.arange(12).reshape(2, 6)}
    if pruned == "prune":
        model = prune(model, "2:4", batches=[inputs], compensate=None)[0]
        result = {name: p != 0 for name, p in model.named_parameters() if name.endswith("proj.weight")}
    elif pruned == "shrink":
        model, result = shrink(model, inputs, {"mlp": 0.5})
    else:
        model, result = shrink_layers(model, [inputs], 0.5)
    quantizer = model.hf_quantizer
    export.save_pretrained(model, result, tmp_path / "saved")
    assert model.hf_quantizer is quantizer and model.config.quantization_config is quantizer.quantization_config
    again = type(model).from_pretrained(tmp_path / "saved").eval()
    assert not hasattr(again.config, "quantization_config")
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)
        small, _, _ = shrink_vocabulary(model, range(12))
        small.save_pretrained(tmp_path / "fewer tokens")  # transformers refuses to save a quantized model
        again = type(model).from_pretrained(tmp_path / "fewer tokens").eval()
        assert torch.equal(again(**inputs).logits, small(**inputs).logits)


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    model, sparsifier = masked_bert()
    path = tmp_path / "new"
    transposed = {"encoder.layer.0.output.dense.weight": torch.ones(48, 32, dtype=torch.bool)}
    for text, given, masks in (
        ("Sequential has no method save_pretrained", mlp(), sparsifier),
        ("the model has no tensor 0.weight", model, pruned()[1]),
        ("there are no masks", model, ScopeSparsifier()),
        (r"or {name: mask}, got torch.ao.*WeightNormSparsifier", model, torch.ao.pruning.WeightNormSparsifier()),
        (r"dense.weight is \(32, 48\), but its mask is \(48, 32\)", model, transposed),
    ):
        with pytest.raises(SparsityError, match=text):
            export.save_pretrained(given, masks, path)
    assert not path.exists()


def test_a_weight_that_lost_its_zeros_is_refused_and_kept_nan_is_saved(tmp_path):
    model, sparsifier = masked_bert()
    sparsifier.squash_mask()
    name = "encoder.layer.0.output.dense.weight"
    dropped = ~(sparsifier.mask(name) != 0)
    with torch.no_grad():
        model.get_parameter(name)[dropped] = 1
    with pytest.raises(SparsityError, match=rf"{name} is not zero at .*, which its mask drops \(768 such"):
        export.save_pretrained(model, sparsifier, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with torch.no_grad():
        model.get_parameter(name)[dropped] = 0
        model.get_parameter(name)[~dropped] = torch.nan
    assert len(export.save_pretrained(model, sparsifier, tmp_path).notes) == 1


def test_damaged_files_of_masks_are_refused(tmp_path):
    def save(shapes, **tensors):
        save_file(tensors or {"w": torch.full((2,), 255, dtype=torch.uint8)}, tmp_path / "masks.safetensors", shapes)

    for shapes, text in (
        (None, "was not written by save_pretrained"),
        ({"shapes": "{"}, "is not JSON"),
        ({"shapes": "[1]"}, "must hold the shape of every mask"),
        ({"shapes": '{"v": [16]}'}, "must hold the shape of every mask"),
        ({"shapes": '{"w": [1000000, 1000000]}'}, "2 bytes do not hold a mask of shape"),
        ({"shapes": '{"w": [-4, -4]}'}, "2 bytes do not hold a mask of shape"),
        ({"shapes": '{"w": [3, 5]}'}, "2 bytes do not hold a mask of shape"),
    ):
        save(shapes)
        with pytest.raises(SparsityError, match=text):
            export.load_masks(tmp_path)
    save({"shapes": '{"w": [4, 4]}'})
    assert export.load_masks(tmp_path)["w"].all()
    file = tmp_path / "masks.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SparsityError, match="cannot be read, because it is damaged"):
        export.load_masks(tmp_path)


# Smaller models

FC = {"fc1.weight": "u i", "fc1.bias": "u", "fc2.weight": "o u"}
NEOX = {"dense_h_to_4h.weight": "u i", "dense_h_to_4h.bias": "u", "dense_4h_to_h.weight": "o u"}
EXPERTS = {"gate_up_proj": "e (two u) i", "down_proj": "e o u"}
UNITS = {  # of one layer alone, which no config holds
    "ViT": ("vit.layers.0.mlp.", FC),
    "DINOv2": ("encoder.layer.0.mlp.", FC),
    "BEiT": ("layers.0.mlp.", FC),
    "SegFormer": (
        "stages.0.blocks.0.mlp.",
        FC | {"dwconv.dwconv.weight": "u 1 h w", "dwconv.dwconv.bias": "u"},
    ),
    "GPT-NeoX": ("gpt_neox.layers.0.mlp.", NEOX),
    "Qwen3-MoE": ("model.layers.0.mlp.experts.", EXPERTS),
    "DeepSeek-V3": ("model.layers.1.mlp.experts.", EXPERTS),
}


def smaller(name):
    """A model without half of the units of one layer, the report, inputs and the first output."""
    model, inputs = hf_models.make(name)
    prefix, members = UNITS[name]
    experts = {"scope": "e", "sizes": {"two": 2}} if members is EXPERTS else {}
    coupling = Coupling({prefix + member: axes for member, axes in members.items()}, **experts)
    small, report = shrink(model, inputs, 0.5, couplings=[coupling])
    assert report.not_in_config and report.couplings
    return small, report, inputs, next(iter(small(**inputs).values()))


@pytest.mark.parametrize("name", UNITS)
def test_models_whose_tensors_transformers_renames_or_splits_on_save_are_read_back(name, tmp_path):
    with torch.no_grad():
        small, report, inputs, want = smaller(name)
        export.save_pretrained(small, report, tmp_path)
        again = next(iter(export.load_pretrained(tmp_path, type(small))(**inputs).values()))
    torch.testing.assert_close(again, want)  # a config does not say by which kernels experts are computed


@pytest.mark.parametrize("name", ["ViT", "Qwen3-MoE"])
def test_masked_models_whose_tensors_are_renamed_or_split_are_read_back(name, tmp_path):
    model, inputs = hf_models.make(name)
    sparsifier = ScopeSparsifier(0.5)
    sparsifier.prepare(model, [{"tensor_fqn": "*.gate_up_proj" if name == "Qwen3-MoE" else "*.fc1.weight"}])
    sparsifier.step()
    export.save_pretrained(model, sparsifier, tmp_path)
    with torch.no_grad():
        again, want = type(model).from_pretrained(tmp_path).eval()(**inputs), model(**inputs)
    torch.testing.assert_close(again.logits, want.logits)

    with pytest.MonkeyPatch.context() as patch:  # a conversion that loses values is seen
        patch.setattr(type(model), "from_pretrained", lambda *args, **kwargs: type(model)(model.config))
        with pytest.raises(SparsityError, match="does not hold the masked values of"):
            export.save_pretrained(model, sparsifier, tmp_path)


def test_files_of_a_smaller_model_are_those_of_the_index_or_of_the_one_standard_name(tmp_path):
    with torch.no_grad():
        small, report, inputs, want = smaller("GPT-NeoX")

    def save(**options):
        export.save_pretrained(small, report, tmp_path, **options)

    def refused(text):
        with pytest.raises(SparsityError, match=text):
            export.load_pretrained(tmp_path, type(small))

    for options in ({}, {"max_shard_size": "16KB"}):  # the second into the folder of the first
        save(**options)
        with torch.no_grad():
            assert torch.equal(export.load_pretrained(tmp_path, type(small))(**inputs).logits, want)
            save_file(
                {name: tensor + 1 for name, tensor in small.state_dict().items()}, tmp_path / "model_ema.safetensors"
            )
        refused("holds model_ema.safetensors beside .*model.safetensors.*; move away files")
        (tmp_path / "model_ema.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    text = index.read_text()
    file_of = json.loads(text)["weight_map"]
    (name, file), *_, (_, other) = sorted(file_of.items(), key=lambda item: item[1])
    for message, entries in (
        (f"{file} holds {name}, but model.safetensors.index.json names {other} for it", file_of | {name: other}),
        (f"{file} does not hold extra, although model.safetensors.index.json says so", file_of | {"extra": file}),
        ("must map names to files of its folder under 'weight_map'", file_of | {name: "../" + file}),
        ("must map names to files of its folder under 'weight_map'", [1]),
        ("cannot be read: FileNotFoundError", file_of | {"extra": "model-7.safetensors"}),
    ):
        index.write_text(json.dumps({"weight_map": entries}))
        refused(message)
    index.write_text(text)
    tensors = load_file(tmp_path / file)
    save_file(tensors | {name: torch.ones(3)}, tmp_path / file)
    refused(rf"holds {name} \(3,\); the model has \(")
    (tmp_path / file).write_bytes(b"damaged")
    refused("cannot be read: SafetensorError")
    save_file(tensors, tmp_path / "model.safetensors")
    refused("must hold either model.safetensors or model.safetensors.index.json, but holds both")
    save()
    for damaged in ("manifest.json", "config.json"):
        good = (tmp_path / damaged).read_bytes()
        for content in (b"{", b"\xff\xfe", b"[" * 100_000, b"[1]"):
            (tmp_path / damaged).write_bytes(content)
            refused("load_pretrained: .* cannot be read: ")
        (tmp_path / damaged).write_bytes(good)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "config.json").write_bytes(b"{")
    refused("load_pretrained: .* cannot be read: ")


@functools.cache
def decoder():
    """A Llama of eleven layers whose MLPs keep numbers of their own, the report, inputs and logits."""
    model, inputs = hf_models.deep("Llama", 11, attention_bias=False)
    for layer in model.model.layers[:3]:
        layer.mlp.down_proj.weight.data *= 0.1
    names = {"gate_proj.weight": "u i", "gate_proj.bias": "u", "up_proj.weight": "u i", "up_proj.bias": "u"}
    mlp = Coupling({f"model.layers.*.mlp.{name}": axes for name, axes in (names | {"down_proj.weight": "o u"}).items()})
    small, report = shrink(model, inputs, 0.3, couplings=[mlp], keep_config=False, budget="parameters")
    return small, report, inputs, small(**inputs).logits


def test_layers_of_different_sizes_are_loaded_by_the_manifest(tmp_path):
    with torch.no_grad():
        small, report, inputs, want = decoder()
        assert len({layer.mlp.down_proj.in_features for layer in small.model.layers}) > 1
        export.save_pretrained(small, report, tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["intermediate_size"] == 48
        assert torch.equal(export.load_pretrained(tmp_path, AutoModelForCausalLM)(**inputs).logits, want)


@pytest.mark.parametrize("name", ["GPT-J", "OPT", "GPT-NeoX", "CodeGen", "BART"])
@torch.no_grad()
def test_a_model_that_is_loaded_by_the_manifest_generates_as_it_was_told_to(name, tmp_path):
    model, inputs = hf_models.make(name)
    told = {"eos_token_id": [7, 9, 11], "max_new_tokens": 11, "repetition_penalty": 3.0}
    model.generation_config.update(**told)
    small, report = shrink(model, inputs, {"heads": 0.5}, score="norm", keep_config=False)
    assert report.not_in_config
    export.save_pretrained(small, report, tmp_path)
    again = export.load_pretrained(tmp_path, type(model))
    assert {key: getattr(again.generation_config, key) for key in told} == told
    assert torch.equal(again.generate(inputs["input_ids"]), small.generate(inputs["input_ids"]))


class Nothing(nn.Module):
    """Zeros, as an attention's outputs or an MLP's."""

    def forward(self, x=None, hidden_states=None, **_):
        return torch.zeros_like(x) if hidden_states is None else (torch.zeros_like(hidden_states), None)


def read_decilm(folder):
    """Construct a DeciLM by the rules of vLLM's nemotron_nas: sizes by layer from `block_configs`, Llama's names."""
    spec = importlib.util.spec_from_file_location("configuration_decilm", folder / "configuration_decilm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = json.loads((folder / "config.json").read_text())
    config = module.DeciLMConfig(**written)
    assert (written["architectures"], written["model_type"]) == (["DeciLMForCausalLM"], "nemotron-nas")
    model = llama.LlamaForCausalLM(config)
    for at, block in enumerate(config.block_configs):
        own = copy.deepcopy(model.config)
        own.num_key_value_heads = config.num_attention_heads // (block.attention.n_heads_in_group or 1)
        own.intermediate_size = block.ffn.intermediate_size or 1
        model.model.layers[at] = layer = llama.LlamaDecoderLayer(own, at)
        if block.attention.no_op:  # vLLM constructs neither the part nor the norm before it
            layer.input_layernorm, layer.self_attn = nn.Identity(), Nothing()
        if block.ffn.no_op:
            layer.post_attention_layernorm, layer.mlp = nn.Identity(), Nothing()
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    return model.eval()


def test_a_llama_whose_layers_differ_is_saved_as_a_decilm_folder(tmp_path):
    with torch.no_grad():
        small, _, inputs, want = copy.deepcopy(decoder())
        save_decilm(small, tmp_path)
        assert torch.equal(read_decilm(tmp_path)(**inputs).logits, want)
        other = small.model.layers[1].self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(other, name)
            linear.out_features //= 2
        with pytest.raises(SparsityError, match="layers must have one number of query heads, 4, .*"):
            save_decilm(small, tmp_path / "new")
        with pytest.raises(SparsityError, match="expected a LlamaForCausalLM, got BertModel"):
            save_decilm(hf_models.make("BERT")[0], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_attentions_and_mlps_without_parameters_are_no_ops_of_a_decilm_folder(tmp_path):
    model, inputs = hf_models.deep("Llama", 4, attention_bias=False)
    with torch.no_grad():
        model.model.layers[1].self_attn, model.model.layers[2].mlp = Nothing(), Nothing()
        save_decilm(model, tmp_path)
        blocks = json.loads((tmp_path / "config.json").read_text())["block_configs"]
        assert blocks[1]["attention"] == {"no_op": True, "n_heads_in_group": None}
        assert blocks[2]["ffn"] == {"no_op": True, "intermediate_size": None} and not blocks[2]["attention"]["no_op"]
        assert torch.equal(read_decilm(tmp_path)(**inputs).logits, model(**inputs).logits)
        model.model.layers[0].self_attn = Nothing()
        with pytest.raises(SparsityError, match="first block with an MLP needs an attention too, and this has none"):
            save_decilm(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def compacted(model):
    """Return the model without half of its MLP units, as `compact` makes it, and the report."""
    units = Coupling({"encoder.layer.*.intermediate.dense.weight": "u i", "encoder.layer.*.output.dense.weight": "o u"})
    kept = model.config.intermediate_size // 2
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.intermediate.dense.weight[kept:] = layer.output.dense.weight[:, kept:] = 0
            layer.intermediate.dense.bias[kept:] = 0
    bias = {"encoder.layer.*.intermediate.dense.bias": "u"}
    return compact(model, Coupling(units.members | bias), {"input_ids": torch.arange(12).reshape(2, 6)})


def test_a_folder_that_is_written_anew_keeps_no_masks_or_manifest_of_the_model_before(tmp_path):
    ids = torch.arange(12).reshape(2, 6)
    masked, sparsifier = masked_bert()
    small, report = compacted(hf_models.make("BERT")[0])
    for _ in range(2):
        export.save_pretrained(masked, sparsifier, tmp_path)
        assert export.load_masks(tmp_path) and not (tmp_path / "manifest.json").exists()
        again = export.load_pretrained(tmp_path, type(masked))
        assert torch.equal(again(ids).last_hidden_state, masked(ids).last_hidden_state)

        saved = export.save_pretrained(small, report, tmp_path)
        assert not (tmp_path / "masks.safetensors").exists()
        assert saved.after == (tmp_path / "model.safetensors").stat().st_size < saved.before
        again = export.load_pretrained(tmp_path, type(small))
        assert torch.equal(again(ids).last_hidden_state, small(ids).last_hidden_state)


@pytest.mark.parametrize("is_smaller", [False, True])
@pytest.mark.parametrize("interrupted", ["weights", "masks", *range(4)])
def test_an_interrupted_save_never_leaves_masks_beside_the_weights_of_another_model(
    interrupted, is_smaller, tmp_path, monkeypatch
):
    (old, old_sparsifier), (model, report) = masked_bert(), masked_bert()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.rand(weight.shape) - 0.5)
    report.step()
    if is_smaller:
        model, report = compacted(hf_models.make("BERT")[0])
    export.save_pretrained(old, old_sparsifier, tmp_path)

    def replace(path, target, moved=[], real=Path.replace):  # noqa: B006
        if len(moved) == interrupted:
            raise KeyboardInterrupt
        moved.append(target)
        return real(path, target)

    def save(tensors, path, *args, real=save_file, **kwargs):
        if interrupted == "weights" or (interrupted == "masks" and Path(path).name == "masks.safetensors"):
            raise KeyboardInterrupt
        return real(tensors, path, *args, **kwargs)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(Path, "replace", replace)
        patch.setattr("safetensors.torch.save_file", save)
        patch.setattr("transformers.modeling_utils.safe_save_file", save)
        export.save_pretrained(model, report, tmp_path)
    try:
        masks, weights = export.load_masks(tmp_path), load_file(tmp_path / "model.safetensors")
    except FileNotFoundError:
        assert not (tmp_path / "masks.safetensors").exists()
        return
    assert all(torch.equal(weights[name] != 0, mask) for name, mask in masks.items())


def test_a_note_on_a_result_of_compact_says_that_the_config_was_not_fitted(tmp_path):
    small, report = compacted(hf_models.make("BERT")[0])
    (note,) = export.save_pretrained(small, report, tmp_path).notes
    assert report.not_in_config is None and "does not describe" not in note
    assert (
        note.startswith("the config was not fitted to the smaller model")
        and f"load_pretrained({str(tmp_path)!r}" in note
    )


def test_errors_of_a_save_name_the_folder_that_the_user_gave(tmp_path, monkeypatch):
    small, report = compacted(hf_models.make("BERT")[0])
    wrong = {name: value + 1 for name, value in small.state_dict().items()}
    with pytest.raises(SparsityError, match=rf"loaded with other values of .*, so {tmp_path}/new is left as it was"):
        export.save_pretrained(small, report, tmp_path / "new", state_dict=wrong)
    with pytest.raises(SparsityError, match="as it was: load_pretrained: what was written holds no values of") as error:
        export.save_pretrained(
            small, report, tmp_path / "new", state_dict={"pooler.dense.bias": small.pooler.dense.bias}
        )
    assert "/tmp" not in str(error.value).replace(str(tmp_path), "") and not (tmp_path / "new").exists()


def sections_of(folder):
    """The front matter of a card, and its sections."""
    _, head, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(head), dict(part.split("\n", 1) for part in text.split("\n## ")[1:])


def loaded_as_the_card_says(folder):
    _, sections = sections_of(folder)
    (code,) = re.findall(r"```python\n(.*?)```", sections["How to load it"], re.DOTALL)
    assert f"folder = {folder.name!r}" in code
    exec(code.replace(repr(folder.name), repr(str(folder))), names := {})
    return names["model"]


@pytest.mark.parametrize("keep_config", [True, False])
def test_the_card_of_a_smaller_model_says_how_it_was_made_and_how_to_load_it(keep_config, tmp_path):
    model, inputs = hf_models.make("Llama")
    model.config._name_or_path = "someone/small-llama"
    ratio = {"mlp": 0.5, "key heads": 0.5}
    exclude = [] if keep_config else ["model.layers.0.mlp.*"]  # layers of two sizes, which Llama's config cannot hold
    small, report = shrink(model, inputs, ratio=ratio, exclude=exclude, keep_config=keep_config)
    export.save_pretrained(small, report, tmp_path / "small", evaluation={"perplexity": (20, 21.5), "bits": [1, 2.0]})
    head, sections = sections_of(tmp_path / "small")
    assert head == {
        "library_name": "transformers",
        "tags": ["sparsekit_ao", "pruned"],
        "base_model": "someone/small-llama",
    }
    call = f"ratio={ratio}, exclude={exclude}, keep_config={keep_config}"
    assert f"shrink(..., example_inputs=..., {call})" in sections["How it was made"]
    assert f"sparsekit_ao {sparsekit_ao.__version__}" in sections["How it was made"]
    assert f"{report.before.parameters:,} -> {report.after.parameters:,}" in sections["Report"]
    assert "| perplexity | 20 | 21.5 |\n| bits | 1 | 2 |" in sections["Evaluation"]
    assert (
        f"with {sum(p.numel() for p in small.parameters()):,} parameters" in (tmp_path / "small/README.md").read_text()
    )
    assert ("from_pretrained cannot load it" in sections["How to load it"]) != keep_config
    loaded = loaded_as_the_card_says(tmp_path / "small")
    assert torch.equal(loaded.eval()(**inputs).logits, small.eval()(**inputs).logits)


def test_a_model_of_prune_is_saved_without_masks_and_the_card_of_a_person_is_never_overwritten(tmp_path):
    model, inputs = hf_models.make("Llama")
    pruned_model, report = prune(model, "2:4", batches=[inputs], exclude=["lm_head"])
    saved = export.save_pretrained(pruned_model, report, tmp_path)
    assert set(saved.converted) == {row.tensor for row in report} and not (tmp_path / "masks.safetensors").exists()
    assert same(looks(pruned_model), loaded_as_the_card_says(tmp_path))
    _, sections = sections_of(tmp_path)
    assert "prune(..., sparsity_level='2:4', batches=..., exclude=['lm_head'])" in sections["How it was made"]
    assert "to_2_4" in sections["How to run it fast"] and "Evaluation" not in sections
    (tmp_path / "README.md").write_text("mine")
    masks = {row.tensor: pruned_model.get_parameter(row.tensor) != 0 for row in report}
    notes = export.save_pretrained(pruned_model, masks, tmp_path).notes
    assert "README.md is not as save_pretrained wrote it, so it is kept" in notes[-1]
    assert (tmp_path / "README.md").read_text() == "mine" and (tmp_path / "masks.safetensors").exists()
    export.save_pretrained(pruned_model, masks, tmp_path / "masked", evaluation={"accuracy": (0.9, math.nan)})
    _, sections = sections_of(tmp_path / "masked")
    assert "masks drop 50.0% of the elements" in sections["Report"] and "| 0.9 | nan |" in sections["Evaluation"]


def test_the_card_has_the_table_of_quality_by_kind(results, tmp_path):
    model, report = results["2:4"]
    kinds = {"code": [torch.tensor([[3, 4, 5]])], "a|b": [torch.tensor([[6, 7, 8]])]}
    measured = sparsekit_ao.quality(hf_models.make("Llama")[0].eval(), model, kinds)
    export.save_pretrained(model, report, tmp_path, evaluation=measured)
    lines = sections_of(tmp_path)[1]["Evaluation"].strip().splitlines()
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert cells[0][:3] == ["kind", "count", "divergence"] and {*cells[1]} == {"---"}
    assert [row[:2] for row in cells[2:]] == [["code", "3"], [r"a\|b", "3"], ["mean", "6"]]
    assert [row[2] for row in cells[2:]] == [f"{row.divergence:.4f}" for row in measured]


PAIRS = [0.5, (0.5,), (1, 2, 3), "12", (1, None), (True, False), (torch.tensor(0.5), torch.tensor(0.4))]


@pytest.mark.parametrize(
    "evaluation", [None, 0.5, (1, 2), *({"bits": (1, 2), "loss": pair} for pair in PAIRS)], ids=str
)
def test_an_evaluation_is_pairs_of_numbers(evaluation, results, tmp_path):
    for name in ("2:4", "masks", "smaller"):
        with pytest.raises(SparsityError, match=r"evaluation must be \{name: \(number before, number after\)\}.*; got"):
            export.save_pretrained(*results[name], tmp_path / "out", evaluation=evaluation)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def results():
    """Models that differ, and what `save_pretrained` takes with them."""
    model, inputs = hf_models.make("Llama")
    half, _ = prune(model, 0.5)
    masks = {name: p != 0 for name, p in half.named_parameters() if name.endswith("up_proj.weight")}
    return {
        "2:4": prune(model, "2:4"),
        "0.9": prune(model, 0.9),
        "masks": (half, masks),
        "smaller": shrink(model, inputs, 0.5),
        "fewer layers": shrink_layers(model, [inputs], 0.5),
        "without a config": compacted(hf_models.make("BERT")[0]),
    }


@pytest.mark.parametrize(
    ("before", "now", "last"),
    [
        ("2:4", "0.9", "fewer layers"),
        ("0.9", "smaller", "without a config"),
        ("smaller", "masks", "fewer layers"),
        ("masks", "2:4", "without a config"),
    ],
)
def test_the_card_of_another_model_is_replaced(before, now, last, results, tmp_path):
    for at, name in enumerate((before, now, last)):
        model, report = results[name]
        saved = export.save_pretrained(model, report, tmp_path / "all")
        export.save_pretrained(model, report, tmp_path / str(at) / "all")
        card = (tmp_path / "all/README.md").read_text()
        assert card == (tmp_path / str(at) / "all/README.md").read_text() and len(saved.notes) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text + "\nMore.\n",
        lambda text: text.replace("pruned with", "made with"),
        lambda text: text.replace("tags:", "license: mit\ntags:"),
        lambda text: text.rpartition("<!--")[0],
        lambda text: "\n".join(text.splitlines()[1:]),
        lambda text: "",
        lambda text: "caf\u00e9".encode("latin-1"),
    ],
)
def test_a_card_that_was_changed_is_kept_and_a_note_says_so(change, results, tmp_path):
    export.save_pretrained(*results["2:4"], tmp_path)
    card = tmp_path / "README.md"
    changed = change(card.read_text())
    changed = changed if isinstance(changed, bytes) else changed.encode()
    card.write_bytes(changed)
    for name in ("smaller", "0.9", "masks"):
        notes = export.save_pretrained(*results[name], tmp_path).notes
        assert card.read_bytes() == changed and notes[-1].endswith("it is kept; it may describe another model")


PATHS = [".", "./", "sub/..", "./sub/../.", "sub/../../here", "..", "new/deep", "link"]


@pytest.mark.parametrize(("path", "name"), turns(PATHS, [("2:4",), ("without a config",)]))
def test_a_folder_may_be_given_by_any_path(path, name, results, tmp_path, monkeypatch):
    (tmp_path / "here/sub").mkdir(parents=True)
    (tmp_path / "here/link").symlink_to("sub")
    monkeypatch.chdir(tmp_path / "here")
    written = Path(path).resolve()
    model, report = results[name]
    for _ in range(2):
        export.save_pretrained(model, report, path)
        assert f"folder = {written.name!r}" in (written / "README.md").read_text()
    assert same(looks(model), export.load_pretrained(written, type(model)))


UNWRITABLE = ["file", "file/deep/er", "/proc/here", "x" * 300, "a\0b", "circle/a"]


@pytest.mark.parametrize(("path", "name"), turns(UNWRITABLE, [("masks",), ("without a config",)]))
def test_a_folder_that_cannot_be_written_is_found_before_anything_is_computed(
    path, name, results, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("circle").symlink_to("circle")
    for function in ("dense_state_dict_of", "masked_tensors", "_to_write"):
        monkeypatch.setattr(pretrained, function, None)
    with pytest.raises(SparsityError, match="save_pretrained: path=.* is not a folder that can be written: "):
        export.save_pretrained(*results[name], path)
    assert {file.name for file in tmp_path.iterdir()} == {"file", "circle"}


def test_a_disk_without_room_for_the_model_is_found_before_anything_is_computed(results, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path, real=shutil.disk_usage: real(path)._replace(free=10_000))
    monkeypatch.setattr(pretrained, "dense_state_dict_of", None)
    with pytest.raises(SparsityError, match=r"10,000 bytes are free on its disk, and up to [\d,]+ are needed"):
        export.save_pretrained(*results["2:4"], tmp_path / "a/b")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["2:4", "0.9", "masks", "smaller", "fewer layers", "without a config"])
def test_a_disk_that_fills_up_leaves_the_model_and_the_folder_as_they_were(name, results, tmp_path):
    export.save_pretrained(*results["2:4"], tmp_path / "a")
    files = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    before, limits = looks(results[name][0]), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, limits[1]))  # of a file
    try:
        with pytest.raises(SparsityError, match="cannot be written, .* Nothing of the model was changed; make room"):
            export.save_pretrained(*results[name], tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert same(before, results[name][0])
    assert {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()} == files
    export.save_pretrained(*results[name], tmp_path / "b")  # as the error says
    assert same(before, export.load_pretrained(tmp_path / "b", type(results[name][0])))


def test_reports_of_calls_that_changed_nothing_are_refused(tmp_path):
    model, inputs = hf_models.deep("Llama", 1)
    for report in (
        prune(model, "2:4", batches=[inputs], dry_run=True)[1],
        shrink(model, inputs, {"mlp": 0.5}, dry_run=True)[1],
    ):
        with pytest.raises(SparsityError, match=f"this {type(report).__name__} is of a call that returned no changed"):
            export.save_pretrained(model, report, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Own(LlamaForCausalLM):
    """A class of a user's own module."""


def test_a_card_imports_a_class_from_its_module(tmp_path):
    model, inputs = hf_models.make("Llama")
    model.__class__ = Own
    pruned_model, report = prune(model, "2:4", batches=[inputs])
    export.save_pretrained(pruned_model, report, tmp_path)
    assert f"from {__name__} import Own\n" in sections_of(tmp_path)[1]["How to load it"]


class OwnConfig(transformers.PretrainedConfig):
    model_type = "a type of one's own"

    def __init__(self, hidden=32, **keys):
        self.hidden = hidden
        super().__init__(**keys)


class OwnModel(transformers.PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.a, self.b, self.c = nn.Linear(8, config.hidden), nn.Linear(config.hidden, 24), nn.Linear(24, 4)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()).relu())


def test_a_class_that_transformers_does_not_know_is_saved_and_loaded(tmp_path):
    x = torch.randn(4, 8)
    small, report = shrink(OwnModel(OwnConfig()), x, 0.5, keep_config=False)
    export.save_pretrained(small, report, tmp_path)
    assert torch.equal(export.load_pretrained(tmp_path, OwnModel)(x), small(x))


def test_the_generation_config_of_an_earlier_model_goes(tmp_path):
    model, _ = hf_models.make("Llama")
    model.generation_config.max_new_tokens = 77
    sparsifier = ScopeSparsifier(0.5)
    sparsifier.prepare(model)
    export.save_pretrained(model, sparsifier, tmp_path)
    assert (tmp_path / "generation_config.json").exists()
    x = torch.randn(4, 8)
    small, report = shrink(OwnModel(OwnConfig()), x, 0.5, keep_config=False)
    export.save_pretrained(small, report, tmp_path)
    assert not (tmp_path / "generation_config.json").exists()


def test_a_smaller_model_that_is_none_of_transformers_is_refused_with_what_helps(tmp_path):
    class Saving(nn.Sequential):
        def save_pretrained(self, path, state_dict):
            save_file(state_dict, Path(path) / "model.safetensors")

    def make():
        return Saving(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    x = torch.randn(4, 8)
    small, report = shrink(make(), x, 0.5)
    with pytest.raises(
        SparsityError, match=r"report\.save\(file\) and model\.state_dict\(\), and load them by removal"
    ):
        export.save_pretrained(small, report, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    report.save(tmp_path / "file")
    again = cut_to(make(), tmp_path / "file")
    again.load_state_dict(small.state_dict())
    assert torch.equal(again(x), small(x))
