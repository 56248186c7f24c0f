"""shrink_layers: the smaller model is the dense one in which the removed blocks pass their input on.

The dense model is skipped by hooks of this file. It is compared in memory, saved and loaded, and by the tokens that are
generated with and without a cache, which are more than fit the sliding windows.
"""

import copy
import itertools

import pytest
import torch
import transformers
from grids import nightly_except
from networks import Net
from torch import nn

from sparsekit_ao import SparsityError
from sparsekit_ao.export import load_pretrained, save_pretrained
from sparsekit_ao.removal import shrink_layers

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "vocab_size": 60,
    "num_hidden_layers": 6,
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 59, "max_position_embeddings": 64}
_DECODER = {**_SMALL, **_TOKENS, "num_key_value_heads": 2}
_SLIDING = {**_DECODER, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 3}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_EXPERTS |= {"shared_expert_intermediate_size": 16, "experts_implementation": "batched_mm"}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 4}
_GEMMA_3N = {**_SLIDING, "vocab_size_per_layer_input": 60, "hidden_size_per_layer_input": 4, "laurel_rank": 4}
_GEMMA_3N |= {"altup_num_inputs": 2, "activation_sparsity_pattern": [0.5, *[0.0] * 5], "num_kv_shared_layers": 0}
_GEMMA_3N |= {"intermediate_size": [48, 48, 48, 48, 48, 40]}
_GEMMA_4 = {**_SLIDING, "vocab_size_per_layer_input": 60, "hidden_size_per_layer_input": 4, "global_head_dim": 16}
# Of a T5 with fewer blocks in the encoder than in the decoder, transformers makes a cache that is too short.
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "vocab_size": 60, "num_layers": 4, "num_decoder_layers": 4}
_T5 |= {"decoder_start_token_id": 0, "eos_token_id": 59, "pad_token_id": 0}
_BART = {"d_model": 32, "vocab_size": 60, "max_position_embeddings": 64, "decoder_start_token_id": 2, **_TOKENS}
_BART |= {f"{half}_{what}": n for half in ("encoder", "decoder") for what, n in (("layers", 4), ("ffn_dim", 48))}
_BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "forced_eos_token_id": None}
_WHISPER = {**_BART, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32}
_WHISPER |= {"begin_suppress_tokens": None, "suppress_tokens": None}
_VISION = {**_SMALL, "image_size": 16, "patch_size": 4}
_DPT = {**_VISION, "image_size": 32, "patch_size": 8, "neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8}
_DPT |= {"backbone_out_indices": [0, 2, 3, 5], "is_hybrid": False}
_SOUND = {**_SMALL, "conv_dim": (16, 16), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_feat_extract_layers": 2}
_SOUND |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}

# {name: (class, fields of its config, list of blocks, which of them change their input least)}
DECODERS = {
    "Gemma 2": ("Gemma2ForCausalLM", _SLIDING, "model.layers", (2,)),
    "Gemma 3": ("Gemma3ForCausalLM", _SLIDING, "model.layers", (1, 2)),
    "Gemma 3n": ("Gemma3nForCausalLM", _GEMMA_3N, "model.layers", (2,)),
    "Gemma 3n, first": ("Gemma3nForCausalLM", _GEMMA_3N, "model.layers", (0,)),
    "Gemma 3n, shared keys": ("Gemma3nForCausalLM", {**_GEMMA_3N, "num_kv_shared_layers": 2}, "model.layers", (1,)),
    "Gemma 3n, sharing": ("Gemma3nForCausalLM", {**_GEMMA_3N, "num_kv_shared_layers": 2}, "model.layers", (4,)),
    "Gemma 4": ("Gemma4ForCausalLM", _GEMMA_4, "model.layers", (2,)),
    "Gemma 4, shared keys": ("Gemma4ForCausalLM", {**_GEMMA_4, "num_kv_shared_layers": 2}, "model.layers", (1,)),
    "Gemma 4, sharing": ("Gemma4ForCausalLM", {**_GEMMA_4, "num_kv_shared_layers": 2}, "model.layers", (4,)),
    "Qwen 2": (
        "Qwen2ForCausalLM",
        {**_DECODER, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3},
        "model.layers",
        (1,),
    ),
    "Qwen 3": ("Qwen3ForCausalLM", {**_DECODER, "head_dim": 8}, "model.layers", (3,)),
    "Qwen 3 MoE": (
        "Qwen3MoeForCausalLM",
        {**_DECODER, **_EXPERTS, "head_dim": 8, "mlp_only_layers": [1, 4]},
        "model.layers",
        (1,),
    ),
    "Qwen 3 Next": (
        "Qwen3NextForCausalLM",
        {
            **_DECODER,
            **_EXPERTS,
            **_LINEAR,
            "head_dim": 8,
            "mlp_only_layers": [4],
            "layer_types": ["linear_attention", "full_attention"] * 3,
        },
        "model.layers",
        (1, 2),
    ),
    "Llama 4": (
        "Llama4ForCausalLM",
        {
            **_DECODER,
            "head_dim": 8,
            "num_local_experts": 4,
            "intermediate_size_mlp": 48,
            "moe_layers": [1, 3, 5],
            "no_rope_layers": [1, 1, 0, 1, 1, 0],
            "attention_chunk_size": 4,
        },
        "model.layers",
        (1,),
    ),
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM",
        {
            **_DECODER,
            **_ROUTED,
            **_LATENT,
            "moe_intermediate_size": 16,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 2,
            "experts_implementation": "batched_mm",
        },
        "model.layers",
        (0,),
    ),
    "LFM2": (
        "Lfm2ForCausalLM",
        {**_DECODER, "full_attn_idxs": [1, 4], "block_auto_adjust_ff_dim": False},
        "model.layers",
        (1,),
    ),
    "Granite hybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            **_DECODER,
            **_MAMBA,
            "shared_intermediate_size": 32,
            "num_local_experts": 0,
            "layer_types": ["linear_attention", "full_attention"] * 3,
        },
        "model.layers",
        (3,),
    ),
    "Falcon-H1": (
        "FalconH1ForCausalLM",
        {**_DECODER, **_MAMBA, "head_dim": 8, "mamba_d_ssm": 64},
        "model.layers",
        (2,),
    ),
    "GPT-NeoX": ("GPTNeoXForCausalLM", {**_SMALL, **_TOKENS}, "gpt_neox.layers", (0, 3)),
    "T5, encoder": ("T5ForConditionalGeneration", {**_T5, "num_layers": 5}, "encoder.block", (0,)),
    "T5, decoder": ("T5ForConditionalGeneration", _T5, "decoder.block", (0,)),
    "T5, later": ("T5ForConditionalGeneration", _T5, "decoder.block", (2,)),
    "mT5, encoder": ("MT5ForConditionalGeneration", {**_T5, "num_layers": 5}, "encoder.block", (0,)),
    "UMT5, encoder": ("UMT5ForConditionalGeneration", {**_T5, "num_layers": 5}, "encoder.block", (0,)),
    "UMT5, decoder": ("UMT5ForConditionalGeneration", _T5, "decoder.block", (0,)),
    "BART, encoder": ("BartForConditionalGeneration", _BART, "model.encoder.layers", (1,)),
    "BART, decoder": ("BartForConditionalGeneration", _BART, "model.decoder.layers", (0,)),
    "Whisper, encoder": ("WhisperForConditionalGeneration", _WHISPER, "model.encoder.layers", (0,)),
    "Whisper, decoder": ("WhisperForConditionalGeneration", _WHISPER, "model.decoder.layers", (1,)),
    "Whisper, other numbers": (
        "WhisperForConditionalGeneration",
        {**_WHISPER, "encoder_layers": 3},
        "model.decoder.layers",
        (3,),
    ),
}
OWNERS = ("T5, encoder", "T5, decoder", "mT5, encoder")
ENCODERS = {
    "ViT": ("ViTForImageClassification", _VISION, "", (2,)),
    "DPT": ("DPTForDepthEstimation", _DPT, "", (1,)),
    "DPT, read": ("DPTForDepthEstimation", _DPT, "", (2,)),
    "DINOv2": ("Dinov2Model", _VISION, "", (5,)),  # its config has names of stages, one for each block
    "DINOv3": ("DINOv3ViTModel", _VISION, "", (1, 4)),
    "BEiT": ("BeitModel", _VISION, "", (2,)),
    "Wav2Vec2": ("Wav2Vec2Model", _SOUND, "encoder.layers", (2,)),
}


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def fill(model):
    """The model itself with weights that are spread widely, so that each part of it matters."""
    torch.manual_seed(0)
    for key, p in model.named_parameters():
        is_vector = p.ndim == 1 and "bias" not in key
        p.copy_(
            torch.randn_like(p) * 0.2 + is_vector if p.ndim < 2 else torch.randn_like(p) * max(p[0].numel(), 1) ** -0.5
        )
    return model


def made(name, quiet=None):
    """A float64 model of widely spread weights, whose named blocks change their input little; its blocks; inputs."""
    class_name, keys, path, usual = (DECODERS | ENCODERS)[name]
    quiet = quiet or usual
    model_class = getattr(transformers, class_name)
    model = fill(model_class(model_class.config_class(**keys)))
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    path = path or max(lists, key=lambda n: sum(p.numel() for p in lists[n].parameters()))
    for at in quiet:
        for key, p in model.get_submodule(path)[at].named_parameters():
            if "relative_attention_bias" not in key:
                is_centred = p.ndim == 1 and key.endswith("norm.weight") and name in ("Gemma 2", "Gemma 3")
                p.copy_(p * 1e-3 - float(is_centred))
    return model.double().eval(), path, quiet, inputs_of(model)


def inputs_of(model):
    draw = torch.Generator().manual_seed(0)
    if hasattr(model.config, "image_size"):
        return {"pixel_values": torch.randn(2, 3, *[model.config.image_size] * 2, generator=draw).double()}
    if model.main_input_name == "input_values":
        return {"input_values": torch.randn(2, 400, generator=draw).double()}
    tokens = {"input_ids": torch.randint(3, 50, (2, 9), generator=draw)}
    if model.main_input_name == "input_features":
        tokens = {"input_features": torch.randn(2, 8, 16, generator=draw).double()}
    if model.config.is_encoder_decoder:
        tokens["decoder_input_ids"] = torch.randint(3, 50, (2, 7), generator=draw)
    return tokens


def skipping(model, path, dropped):
    """A copy of the model in which these blocks pass their input on."""
    dense = copy.deepcopy(model)

    def skip(block, args, kwargs, output):
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    for at in dropped:
        dense.get_submodule(path)[at].register_forward_hook(skip, with_kwargs=True, prepend=True)
    return dense


def first(output):
    return next(value for key, value in output.items() if key not in ("loss", "past_key_values"))


def assert_same(wanted, models, inputs, generates):
    """The outputs are the same, and so are the tokens that are generated with and without a cache."""

    def generated(model, cached):
        prompt = {key: value for key, value in inputs.items() if key != "decoder_input_ids"}
        return model.generate(**prompt, max_new_tokens=7, do_sample=False, eos_token_id=None, use_cache=cached)

    outputs = first(wanted(**inputs))
    tokens = {cached: generated(wanted, cached) for cached in (True, False) if generates}
    for model in models:
        assert float((first(model(**inputs)) - outputs).abs().max()) <= 1e-5 * float(outputs.abs().max())
        assert all(torch.equal(generated(model, cached), expected) for cached, expected in tokens.items())


def dropped_of(report):
    (group,) = (group for group in report.manifest["groups"] if group["lists"])
    return [at for at in range(group["sizes"][group["unit"]]) if at not in group["kept"][0]]


@pytest.mark.parametrize(
    "name", nightly_except([*DECODERS, *ENCODERS], "Gemma 3n, sharing", "Llama 4", "T5, encoder", "DPT, read", "DINOv2")
)
def test_a_removed_block_passes_its_input_on(name, tmp_path):
    model, path, quiet, inputs = made(name)
    blocks = len(model.get_submodule(path))
    small, report = shrink_layers(model, [inputs], len(quiet) / blocks, layers=path, compensate=None)
    dropped = dropped_of(report)
    wanted, generates = skipping(model, path, dropped), name in DECODERS
    assert len(dropped) == len(quiet) and report.difference < 1e-5 and report.error_to_dense >= 0
    if name in OWNERS:  # the first block of a T5 has the bias of positions of all
        assert 0 not in dropped and report.left_out[0].startswith(f"{path}.0 stays, and another block leaves")
    save_pretrained(small, report, tmp_path)
    assert report.not_in_config == "" and "shrink_layers(" in (tmp_path / "README.md").read_text()
    keys = {"experts_implementation": "batched_mm"} if hasattr(model.config, "num_experts_per_tok") else {}
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64, **keys)
    assert_same(wanted, [small, again.eval()], inputs, generates)


@pytest.mark.parametrize("quiet", [(1,), (3, 4)])
def test_a_backbone_gives_the_outputs_of_the_stages_that_remain(quiet, tmp_path):
    config = transformers.Dinov2Config(**_VISION, out_features=["stage2", "stage4", "stage6"])
    model = fill(transformers.Dinov2Backbone(config)).double().eval()
    for p in (p for at in quiet for key, p in model.encoder.layer[at].named_parameters() if "lambda" in key):
        p.copy_(p * 1e-3)
    inputs = inputs_of(model)
    small, report = shrink_layers(model, [inputs], len(quiet) / 6, compensate=None)
    assert dropped_of(report) == [*quiet] and report.not_in_config == ""
    save_pretrained(small, report, tmp_path)
    again = transformers.Dinov2Backbone.from_pretrained(tmp_path, dtype=torch.float64).eval()
    wanted = skipping(model, "encoder.layer", quiet)(**inputs).feature_maps
    for smaller in (small, again):
        for features, expected in zip(smaller(**inputs).feature_maps, wanted, strict=True):
            torch.testing.assert_close(features, expected, rtol=1e-6, atol=1e-6)


def test_blocks_inside_a_stage_leave_the_names_of_stages_alone(tmp_path):
    sizes = {"hidden_sizes": [8, 8, 16, 16], "image_size": 32, "mlp_ratios": [2] * 4, "sr_ratios": [2, 2, 1, 1]}
    config = transformers.PvtV2Config(**sizes, depths=[2, 3, 2, 2], num_attention_heads=[1, 1, 2, 2])
    model = fill(transformers.PvtV2Model(config)).double().eval()
    inputs = {"pixel_values": torch.randn(1, 3, 32, 32, dtype=torch.float64)}
    small, report = shrink_layers(model, [inputs], 1 / 3, layers="encoder.layers.1.blocks", compensate=None)
    assert small.config.depths == [2, 2, 2, 2] and report.not_in_config == ""
    assert small.config.stage_names == config.stage_names and small.config.out_features == ["stage4"]
    config = transformers.ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[2, 4, 2, 2], image_size=64)
    model = fill(transformers.ConvNextBackbone(config)).double().eval()
    inputs = {"pixel_values": torch.randn(1, 3, 64, 64, dtype=torch.float64)}
    small, report = shrink_layers(model, [inputs], 0.25, layers="encoder.stages.1.layers", compensate=None)
    save_pretrained(small, report, tmp_path)
    again = transformers.ConvNextBackbone.from_pretrained(tmp_path, dtype=torch.float64).eval()
    (features,), (expected,) = again(**inputs).feature_maps, small(**inputs).feature_maps
    torch.testing.assert_close(features, expected, rtol=1e-6, atol=1e-6)


def test_stages_leave_a_backbone_in_a_list():
    configs = [transformers.Dinov2Config(**_VISION, out_features=["stage2", "stage4", "stage6"]) for _ in range(2)]
    nets = nn.ModuleList([fill(transformers.Dinov2Backbone(config)).double().eval() for config in configs])
    inputs = inputs_of(nets[0])
    model = Net(lambda m, x: tuple(out for net in m.nets for out in net(x).feature_maps), nets=nets)
    for key, p in nets[0].encoder.layer[3].named_parameters():
        p.copy_(p * 1e-3 if "lambda" in key else p)
    batches, layers = [inputs["pixel_values"]], "nets.0.encoder.layer"
    small, report = shrink_layers(model, batches, 1 / 6, layers=layers, compensate=None)
    assert dropped_of(report) == [3] and small.nets[0].out_features == ["stage2", "stage3", "stage5"]
    assert small.nets[1].out_features == configs[1].out_features == ["stage2", "stage4", "stage6"]
    for features, expected in zip(small(*batches), skipping(model, layers, [3])(*batches), strict=True):
        torch.testing.assert_close(features, expected, rtol=1e-6, atol=1e-6)


def test_two_stages_that_become_one_are_named_once(tmp_path):
    config = transformers.Dinov2Config(**_VISION, out_indices=[5, 6])
    model = fill(transformers.Dinov2Model(config)).double().eval()
    for key, p in model.encoder.layer[5].named_parameters():
        p.copy_(p * 1e-3 if "lambda" in key else p)
    small, report = shrink_layers(model, [inputs_of(model)], 1 / 6, compensate=None)
    assert dropped_of(report) == [5] and small.config.out_indices == [5] and report.not_in_config == ""
    save_pretrained(small, report, tmp_path)


def test_blocks_that_no_config_can_hold_are_loaded_by_the_manifest(tmp_path):
    model, path, _, inputs = made("Gemma 4", (5,))  # whose config makes the last block read all tokens
    small, report = shrink_layers(model, [inputs], 1 / 6, compensate=None)
    assert dropped_of(report) == [5] and report.not_in_config
    save_pretrained(small, report, tmp_path)
    again = load_pretrained(tmp_path, type(model), dtype=torch.float64)
    assert_same(skipping(model, path, [5]), [small], inputs, True)
    assert_same(small, [again.eval()], inputs, False)


@pytest.mark.parametrize(("name", "quiet"), [("Gemma 3n, shared keys", (1, 3)), ("Gemma 4, shared keys", (2, 3))])
def test_blocks_whose_keys_others_share_stay(name, quiet):
    model, path, _, inputs = made(name, quiet)
    small, report = shrink_layers(model, [inputs], 2 / 6, compensate=None)
    dropped = dropped_of(report)
    stay = {2, 3} & {*quiet}  # the last of their types before those that share
    assert len(dropped) == 2 and not stay & {*dropped} and {*quiet} - stay <= {*dropped}
    assert [text.partition(":")[0] for text in report.left_out] == [
        f"{path}.{at} stays, and another block leaves instead" for at in sorted(stay)
    ]
    assert_same(skipping(model, path, dropped), [small], inputs, True)


def test_a_dry_run_removes_what_the_call_removes():
    model, path, _, inputs = made("T5, decoder")
    before = {name: p.clone() for name, p in model.state_dict().items()}
    _, report = shrink_layers(model, [inputs], 0.25, layers=path)
    same, plan = shrink_layers(model, [inputs], 0.25, layers=path, dry_run=True)
    assert same is model and model.state_dict().keys() == before.keys() and len(model.get_submodule(path)) == 4
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert (plan.after.parameters, plan.left_out) == (report.after.parameters, report.left_out)
    assert plan.couplings == report.couplings and plan.difference < 1e-5
    with pytest.raises(SparsityError, match="dry run"):
        plan.save("manifest.json")


class Paired(nn.Module):
    """Blocks of which each is scaled by its own entry, so that the code needs all of them."""

    def __init__(self):
        super().__init__()
        self.layers, self.scales = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), [1.0, 0.5, 2.0, 3.0]

    def forward(self, x):
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = x + scale * layer(x)
        return x


def test_what_cannot_lose_any_block_is_refused():
    torch.manual_seed(0)
    with pytest.raises(
        SparsityError, match=r"layers without the blocks \[\d\]: .*does not run: .* shrink the units of all"
    ):
        shrink_layers(Paired(), [torch.randn(3, 8)], 0.25)


def test_outputs_by_block_do_not_count():
    model, _, _, inputs = made("Qwen 3")
    expected = shrink_layers(model, [inputs], 1 / 6, compensate=None)[0](**inputs).logits
    model.config.output_hidden_states = True
    small, report = shrink_layers(model, [{**inputs, "output_attentions": False}], 1 / 6, compensate=None)
    assert torch.equal(small(**inputs).logits, expected) and len(small(**inputs).hidden_states) == 6
    assert report.difference < 1e-5 and model.config.output_hidden_states


class Branch(nn.Module):
    def __init__(self, in_place=False):
        super().__init__()
        self.up, self.down, self.in_place = nn.Linear(8, 16), nn.Linear(16, 8), in_place

    def forward(self, x):
        added = self.down(torch.relu(self.up(x)))
        if self.in_place:
            x += added
            return x
        return x + added


class Network(nn.Module):
    def __init__(self, blocks=5, needed=0, **keys):
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 8), nn.ModuleList(Branch(**keys) for _ in range(blocks))
        self.needed = needed  # so many first blocks have weights that the forward reads

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        for at in range(self.needed):
            x = x * self.blocks[at].up.weight[:2].sum()
        return x


def network(**keys):
    torch.manual_seed(0)
    return Network(**keys).double(), [torch.randn(20, 4, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("where", ["weight", "batch"])
def test_values_that_are_not_finite_are_named(where):
    model, batches = network()
    (model.blocks[2].up.weight if where == "weight" else batches[1])[0, 0] = torch.nan
    name, at = ("blocks.2", 0) if where == "weight" else ("blocks.0", 1)
    with pytest.raises(
        SparsityError, match=f"shrink_layers: {name} reads or gives .* not finite for batch {at}; leave"
    ):
        shrink_layers(model, batches, 0.2)


def test_blocks_that_change_their_input_in_place_are_removed_like_others():
    model, batches = network()
    same, _ = network(in_place=True)
    expected, report = shrink_layers(model, batches, 0.4)
    small, found = shrink_layers(same, batches, 0.4)
    assert report.changed == found.changed and torch.allclose(small(batches[0]), expected(batches[0]))


def test_the_report_says_which_blocks_left_and_if_fewer_did_than_were_asked_for():
    model, batches = network(blocks=4, needed=2)
    small, report = shrink_layers(model, batches, 0.75, compensate=None)
    assert report.changed[0] == "blocks: without the blocks 2, 3" and len(small.blocks) == 2
    assert [text.partition(":")[0] for text in report.left_out] == [
        f"blocks.{at} stays, and only 2 of 3 blocks leave" for at in (0, 1)
    ]


def test_calls_that_cannot_be_compared_are_refused():
    model, batches = network()

    def run(model, x):
        x = model.first(x)
        for block in model.blocks:
            x = block(x)
        return x

    with pytest.raises(SparsityError, match="forward calls a module of the model, but not the model itself"):
        shrink_layers(model, batches, 0.2, forward=run)
    with pytest.raises(SparsityError, match=r"no nn.ModuleList 'first', but 'blocks'; its blocks"):
        shrink_layers(model, batches, 0.2, layers="first")
    with torch.inference_mode(), pytest.raises(SparsityError, match="shrink_layers: in inference mode, weights"):
        shrink_layers(model, batches, 0.2)
    with torch.autocast("cpu", torch.bfloat16):
        _, report = shrink_layers(*network(), 0.2)
    assert any("under torch.autocast; call shrink_layers outside" in text for text in report.left_out)


class Shift(nn.Module):
    """Adds a vector to each token, times the first element of the token if it is for padding alone."""

    def __init__(self, by, is_for_padding):
        super().__init__()
        self.by, self.is_for_padding = nn.Parameter(torch.full((8,), by)), is_for_padding

    def forward(self, x):
        return x + self.by * x[..., :1] if self.is_for_padding else x + self.by


class Shifted(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x, mask=None):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(("token_mask", "removed"), [("mask", 0), (False, 1)])
def test_tokens_that_do_not_count_have_no_say_in_which_blocks_leave(token_mask, removed):
    x, mask = torch.randn(2, 6, 8), torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]])
    x[..., 0] = 1 - mask
    batches = [{"x": x, "mask": mask}]
    model = Shifted(Shift(2.0, True), Shift(0.1, False))
    small, report = shrink_layers(model, batches, 0.5, token_mask=token_mask, compensate=None)
    assert f"blocks: without the blocks {removed}" in report.changed and len(small.blocks) == 1


def test_blocks_that_undo_each_other_leave_together():
    model = Shifted(Shift(0.1, False), Shift(0.5, False), Shift(-0.5, False), Shift(0.2, False))
    _, report = shrink_layers(model, [torch.randn(2, 6, 8)], 0.5, compensate=None)
    assert "blocks: without the blocks 1, 2" in report.changed


@pytest.mark.parametrize("seed", range(5))
def test_the_runs_that_leave_have_the_smallest_sum_of_influences(seed):
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(7)]
    model, x = Shifted(*blocks).double(), torch.randn(3, 5, 8).double()
    states = [x]
    for block in blocks:
        states.append(block(states[-1]))

    def influence(gone):
        starts = [at for at in gone if at - 1 not in gone]
        ends = [next(end for end in range(at, 8) if end not in gone) for at in starts]
        pairs = zip(starts, ends, strict=True)
        return float(sum(1 - torch.cosine_similarity(states[a], states[b], dim=-1).mean() for a, b in pairs))

    best = min(itertools.combinations(range(7), 3), key=influence)
    _, report = shrink_layers(model, [x], 3 / 7, compensate=None)
    assert f"blocks: without the blocks {', '.join(map(str, best))}" in report.changed


class Ordered(nn.Module):
    def __init__(self, order, *blocks):
        super().__init__()
        self.order, self.blocks = order, nn.ModuleList(blocks)

    def forward(self, x):
        for at in self.order:
            x = self.blocks[at](x) if at < len(self.blocks) else x
        return x


def test_blocks_that_run_in_another_order_leave_by_the_sum_of_their_influences():
    blocks = [Shift(by, False) for by in (0.1, 0.2, 0.3, 0.4)]
    _, report = shrink_layers(Ordered([3, 2, 1, 0], *blocks), [torch.randn(2, 6, 8)], 0.75, compensate=None)
    assert "blocks: without the blocks 0, 1, 2" in report.changed


def test_influences_far_below_the_precision_of_a_cosine_still_rank_blocks():
    torch.manual_seed(0)
    blocks = [Shift(by, False) for by in (3e-5, 1e-5, 2e-5)]
    _, report = shrink_layers(Shifted(*blocks), [torch.randn(2, 60, 8)], 1 / 3, compensate=None)
    assert "blocks: without the blocks 1" in report.changed


class Twice(Shift):
    """A block that calls itself."""

    def forward(self, x, again=True):
        return self(x, again=False) if again else super().forward(x)


def test_a_block_that_calls_itself_is_refused_as_one_that_runs_twice():
    model = Shifted(Twice(0.1, False), Twice(0.2, False))
    with pytest.raises(SparsityError, match=r"blocks\.0 is called 2 times for a batch"):
        shrink_layers(model, [torch.randn(2, 6, 8)], 0.5)


def test_a_coarse_default_dtype_changes_no_choice():
    blocks = [Shift(by, False) for by in (0.001, 0.001001, 0.001002)]  # the same in bfloat16
    model, x = Shifted(*blocks), torch.ones(2, 6, 8) + torch.arange(8)
    try:
        torch.set_default_dtype(torch.bfloat16)
        _, report = shrink_layers(model, [x], 1 / 3, compensate=None)
        assert "blocks: without the blocks 0" in report.changed
    finally:
        torch.set_default_dtype(torch.float32)


class Pair(nn.Module):
    """An encoder whose output the decoder's blocks do not need to read, under names of their own."""

    def __init__(self, name, *blocks):
        super().__init__()
        self.encoder, self.name = Shifted(Shift(0.1, False)), name
        self.add_module(name, Shifted(*blocks))

    def forward(self, x, decoder_x, attention_mask=None, decoder_attention_mask=None, labels=None):
        return self.get_submodule(self.name)(decoder_x + 0 * self.encoder(x).mean())


@pytest.mark.parametrize("name", ["decoder", "text_decoder", "dec"])
@pytest.mark.parametrize("is_first", [True, False])
def test_blocks_of_a_decoder_are_rated_by_the_tokens_of_the_decoder(name, is_first):
    masks = [torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]), torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])]
    encoder, decoder = masks if is_first else masks[::-1]
    x = torch.randn(2, 4, 8)
    x[..., 0] = 1 - decoder
    batch = {"x": x.clone(), "decoder_x": x, "attention_mask": encoder, "decoder_attention_mask": decoder}
    model = Pair(name, Shift(2.0, True), Shift(0.1, False))
    _, report = shrink_layers(model, [batch], 0.5, layers=f"{name}.blocks", compensate=None)
    assert f"{name}.blocks: without the blocks 0" in report.changed


class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = Shifted(Shift(2.0, True), Shift(0.1, False))

    def forward(self, x, attention_mask=None, labels=None):
        return self.decoder(x)


def test_labels_do_not_change_which_blocks_of_a_decoder_alone_leave():
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    x = torch.randn(2, 4, 8)
    x[..., 0] = 1 - mask
    batch = {"x": x, "attention_mask": mask, "labels": torch.ones_like(mask)}
    _, report = shrink_layers(Alone(), [batch], 0.5, compensate=None)
    assert "decoder.blocks: without the blocks 0" in report.changed
