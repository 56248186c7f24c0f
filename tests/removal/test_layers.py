"""shrink_layers and shrink_experts: what is removed is exactly absent, and what is saved is loaded again."""

import dataclasses
import json

import hf_models
import pytest
import torch
import transformers
from discovered import fill
from grids import nightly_except, turns
from torch import nn

from sparsekit_ao import SparsityError, recover, shrink_vocabulary
from sparsekit_ao.coupling import expert_couplings, expert_scores
from sparsekit_ao.export import load_pretrained, save_pretrained
from sparsekit_ao.removal import cut_to, shrink, shrink_experts, shrink_layers


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def deep(name, layers=4, **keys):
    model, inputs = hf_models.deep(name, layers, **keys)
    return model.double(), inputs


def tiny(name, **keys):
    """A float64 model of a class of transformers."""
    common = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    common |= {"intermediate_size": 48, "vocab_size": 50, "max_position_embeddings": 64, "pad_token_id": 0}
    common |= {"experts_implementation": "batched_mm"}  # which takes float64
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    return fill(model_class(model_class.config_class(**(common | keys)))).double()


def test_blocks_whose_config_has_lists_by_layer_are_saved(tmp_path):
    model, inputs = deep("SmolLM3", 5)
    model.model.layers[3].self_attn.o_proj.weight *= 1e-3  # the one without rotation
    model.model.layers[3].mlp.down_proj.weight *= 1e-3
    small, report = shrink_layers(model, [inputs], 0.2)
    assert small.config.no_rope_layers == [1, 1, 1, 1] and report.not_in_config == ""
    save_pretrained(small, report, tmp_path / "config")
    again = type(model).from_pretrained(tmp_path / "config").double()
    assert torch.equal(again(**inputs).logits, small(**inputs).logits)
    report = dataclasses.replace(report, not_in_config="it was not tried")  # the dense config is written then
    save_pretrained(small, report, tmp_path / "manifest")
    written = json.loads((tmp_path / "manifest/config.json").read_text())
    assert written["no_rope_layers"] == [1, 1, 1, 0, 1] and len(written["layer_types"]) == 5
    again = load_pretrained(tmp_path / "manifest", type(model), dtype=torch.float64)
    assert torch.equal(again(**inputs).logits, small(**inputs).logits)
    assert small.config.no_rope_layers == [1, 1, 1, 1] and len(small.config.layer_types) == 4


def test_what_cannot_be_loaded_again_leaves_the_folder_as_it_was(tmp_path):
    model, inputs = deep("Llama", 2)
    once, report = shrink(model, inputs, 0.25, keep_config=False, budget="parameters")
    save_pretrained(once, report, tmp_path / "new")
    before = {file.name: file.read_bytes() for file in (tmp_path / "new").iterdir()}
    twice, second = shrink(once, inputs, 0.25, keep_config=False, budget="parameters")
    with pytest.raises(SparsityError, match="model cannot be loaded, so .*new is left as it was: .* smaller twice"):
        save_pretrained(twice, second, tmp_path / "new")
    assert {file.name: file.read_bytes() for file in (tmp_path / "new").iterdir()} == before
    assert [*tmp_path.iterdir()] == [tmp_path / "new"]


def test_blocks_of_a_config_that_computes_their_types_leave_at_the_end():
    keys = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 4, "mamba_dt_rank": 4}
    model, ids = tiny("JambaForCausalLM", **keys, expert_layer_period=2, expert_layer_offset=1), torch.arange(3, 12)
    for part in (model.model.layers[2].mamba.out_proj, model.model.layers[2].feed_forward.down_proj):
        part.weight *= 1e-3
    small, report = shrink_layers(model, [ids[None]], 0.25)
    assert "layers.2 stays, and another block leaves instead: without it JambaConfig computes" in report.left_out[0]
    assert small.config.layer_types == ["linear_attention", "full_attention", "linear_attention"]
    assert report.manifest["groups"][0]["kept"] == [[0, 1, 2]]


@pytest.mark.parametrize("asked", [3, 4])
def test_blocks_leave_together_that_cannot_leave_alone(asked):
    model = tiny("RecurrentGemmaForCausalLM", num_hidden_layers=6, lru_width=32, attention_window_size=8, head_dim=8)
    for parts in ((model.model.layers[at].temporal_block, model.model.layers[at].mlp_block) for at in (1, 3)):
        for p in (p for part in parts for p in part.parameters()):
            p *= 1e-2  # blocks of least influence, of which none can leave: the config repeats three types
    _, report = shrink_layers(model, [torch.arange(3, 12)[None]], asked / 6)
    (group,) = (group for group in report.manifest["groups"] if group["lists"])
    kinds = [model.config.layer_types[at] for at in group["kept"][0]]
    assert kinds == model.config.layer_types[:3] and report.not_in_config == ""
    assert any("only 3 of 4" in text for text in report.left_out) == (asked == 4)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("GPT-2", "heads"),
        ("BERT", "heads"),
        ("GPT-J", "heads"),
        ("OPT", "heads"),
        ("Llama", "mlp"),
        ("GPT-NeoX", "heads"),
    ],
)
def test_blocks_leave_a_model_that_lost_half_of_other_units_before(name, kind):
    model, inputs = deep(name, 4)
    half, report = shrink(model, inputs, {kind: 0.5}, keep_config=False, score="norm")
    small, second = shrink_layers(half, [inputs], 0.5)
    assert report.after.parameters < report.before.parameters and second.difference <= 1e-5
    shapes = [{key: p.shape for key, p in m.named_parameters()} for m in (half, small)]
    assert all(shapes[0][key] == shape for key, shape in shapes[1].items())  # no other dimension was cut


def test_shrink_says_what_removes_layers_and_experts():
    model, example_inputs = hf_models.make("Mixtral")
    for kind, rows in (("layers", "layers"), ("experts", "experts 0")):
        with pytest.raises(SparsityError, match=f"removing whole {kind} changes outputs; use removal") as error:
            shrink(model, example_inputs, {kind: 0.5})
        advice = str(error.value).partition("removal.")[2]
        known = {"shrink_layers": shrink_layers, "shrink_experts": shrink_experts}
        _, report = eval(advice, known, {"model": model, "example_inputs": example_inputs})
        assert report.couplings[0].name == rows and report.couplings[0].kept * 2 == report.couplings[0].of


def test_experts_whose_router_has_a_bias_of_one_row_are_removed(tmp_path):
    keys = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
    model, ids = tiny("Ernie4_5_MoeForCausalLM", **keys, num_hidden_layers=2), torch.arange(3, 12)[None]
    small, report = shrink_experts(model, [ids], 0.25)
    assert report.couplings[0].kept == 3 and report.not_in_config == ""
    save_pretrained(small, report, tmp_path)
    again = type(model).from_pretrained(tmp_path, experts_implementation="batched_mm")
    assert torch.equal(again.double()(ids).logits, small(ids).logits)


@pytest.mark.parametrize(
    ("name", "ratio", "kept"),
    turns(["MixtralForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM"], [(0.5, (2, 2)), (0.7, (2, 1))]),
)
def test_layers_that_differ_in_their_number_of_experts_lose_a_fraction_of_their_own(name, ratio, kept):
    keys = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    model, ids = tiny(name, **keys, num_hidden_layers=2), torch.arange(3, 12)[None]
    experts, router = model.model.layers[1].mlp.experts, model.model.layers[1].mlp.gate
    for module, names in ((experts, ("gate_up_proj", "down_proj")), (router, ("weight",))):
        for tensor in names:
            setattr(module, tensor, nn.Parameter(getattr(module, tensor)[:3].detach().clone()))
        vars(module).update({key: 3 for key, value in vars(module).items() if key.endswith("experts") and value == 4})
    small, report = shrink_experts(model, [ids], ratio)
    assert tuple(len(layer.mlp.experts.down_proj) for layer in small.model.layers) == kept
    assert report.not_in_config and small(ids).logits.isfinite().all()  # no config described the model before either


def test_nothing_is_said_of_what_is_removed_where_groups_are_too_small_to_lose_an_expert():
    keys = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = tiny("DeepseekV3ForCausalLM", **keys, num_hidden_layers=1, num_key_value_heads=4, first_k_dense_replace=0)
    report = shrink_experts(model, [torch.arange(3, 12)[None]], 0.25)[1]
    assert report.difference == 0 and not report.notes and "drops none of 2" in report.left_out[0]


def test_experts_packed_in_other_tensors_are_named():
    model = tiny("JetMoeForCausalLM", kv_channels=8, num_local_experts=4, num_hidden_layers=1)
    with pytest.raises(SparsityError, match=r"may be packed in model.layers.0.mlp.input_linear.weight \(4, 96, 32\)"):
        expert_couplings(model)


def test_a_forward_may_give_positional_and_keyword_arguments_together():
    model, _ = deep("Llama")
    batch = {"input_ids": torch.randint(3, 50, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    batch["attention_mask"][0, :4] = 0
    small, report = shrink_layers(
        model, [batch], 0.25, forward=lambda m, b: m(b["input_ids"], attention_mask=b["attention_mask"])
    )
    other, wanted = shrink_layers(model, [batch], 0.25)
    assert report.difference == wanted.difference and torch.equal(small(**batch).logits, other(**batch).logits)

    class Starred(nn.Sequential):
        def forward(self, *xs, scale):
            return self[0][1](self[0][0](*xs)) * scale

    with pytest.raises(SparsityError, match="calls Starred with both keyword arguments and positional .*; name all"):
        shrink_layers(
            Starred(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])),
            [torch.ones(2, 4)],
            0.5,
            forward=lambda m, x: m(x, scale=2),
        )


def test_a_ratio_that_keeps_no_block_is_refused():
    llama, inputs = deep("Llama")
    with pytest.raises(SparsityError, match="ratio=1.0 keeps none of the 4 blocks in model.layers"):
        shrink_layers(llama, [inputs], 1.0)


LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
MIXED = {
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "DeepseekV3ForCausalLM": {**LATENT, **ROUTED, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    "Glm4MoeForCausalLM": {**ROUTED, "first_k_dense_replace": 1, "head_dim": 8},
    "Qwen2MoeForCausalLM": {"mlp_only_layers": [0], "num_experts": 4, "moe_intermediate_size": 16},
    "GPTNeoForCausalLM": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 4},
}


@pytest.mark.parametrize(
    ("name", "dropped"),
    nightly_except(turns(MIXED, [(0,), (1,)]), ("DeepseekV3ForCausalLM", 1), ("Glm4MoeForCausalLM", 0)),
)
def test_models_whose_layers_differ_are_recovered_after_their_blocks_left(name, dropped):
    model = tiny(name, **MIXED[name]).float()
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 4)
    for p in blocks[dropped].parameters():
        p *= 1e-3
    batches = [torch.randint(3, 50, (4, 9)) for _ in range(2)]
    small, report = shrink_layers(model, batches, 0.25)
    rows = recover(small, model, batches)
    assert len(rows) == 3 and max(row.before for row in rows) < 0.1
    if name == "GPTNeoForCausalLM":
        kinds = [kind for at, kind in enumerate(("global", "local") * 2) if at != dropped]
        assert small.config.attention_layers == kinds and report.not_in_config == ""
        assert [block.attn.attention.layer_id for block in small.transformer.h] == [0, 1, 2]
        again = type(small)(type(small.config)(**small.config.to_dict()))
        again.load_state_dict(small.state_dict())
        assert torch.equal(again.eval()(batches[0]).logits, small(batches[0]).logits)


@pytest.mark.parametrize("groups", [1, 2])
def test_blocks_that_are_called_several_times_are_refused(groups):
    model = tiny("AlbertModel", embedding_size=16, num_hidden_groups=groups).float()
    with pytest.raises(SparsityError, match=f"albert_layer_groups.0 is called {4 // groups} times .* share weights"):
        shrink_layers(model, [torch.randint(3, 50, (4, 9))], 0.5)


def test_scores_of_experts_serve_several_ratios():
    model, inputs = hf_models.make("Mixtral")
    batches = [inputs, {"input_ids": inputs["input_ids"].flip(1)}]
    scores = expert_scores(model, batches)
    for ratio in (0.25, 0.5):
        expected, small = (shrink_experts(model, batches, ratio, **keys)[0] for keys in ({}, {"scores": scores}))
        assert torch.equal(small(**inputs).logits, expected(**inputs).logits)
    name, first = "model.layers.0.mlp.experts", scores["model.layers.0.mlp.experts"]
    for wrong, found in ((scores | {name: first[1:]}, r"\(3,\)"), ({}, "None"), (list(scores), "None")):
        text = f"scores must be what expert_scores returns for this model, with a tensor of 4 for '{name}', got {found}"
        with pytest.raises(SparsityError, match=text):
            shrink_experts(model, batches, 0.5, scores=wrong)


def _integers(model):
    named = ((name, vars(module)) for name, module in model.named_modules())
    return {(name, key): value for name, ints in named for key, value in ints.items() if type(value) is int}


def test_a_block_that_stands_twice_in_a_list_is_named():
    blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    model = nn.ModuleDict({"blocks": nn.ModuleList([*blocks, blocks[0]])})
    with pytest.raises(SparsityError, match="a module stands twice in blocks, so it cannot be removed for one"):
        shrink_layers(model, [torch.randn(2, 8)], 0.5)


EQUAL = {"n_shared_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "n_routed_experts": 4}
FAMILIES = ["Ernie4_5_MoeForCausalLM", "Glm4MoeForCausalLM"]
MIXTURES = ["Mixtral", "DeepSeek-V3", "GPT-OSS", "Qwen2-MoE", "Qwen3-MoE", *hf_models._MIXTURES]


@pytest.mark.parametrize("name", nightly_except([*MIXTURES, *FAMILIES], *MIXTURES[:3], *FAMILIES))
def test_every_integer_that_counts_experts_follows(name, tmp_path):
    if name in MIXTURES:
        model, inputs = hf_models.make(name)
    else:  # whose other integers equal the number of experts
        keys = {"moe_num_experts": 4, "moe_k": 2, **EQUAL} if name.startswith("Ernie") else {**EQUAL, "head_dim": 4}
        model = tiny(name, moe_intermediate_size=4, num_hidden_layers=2, **keys).float()
        inputs = {"input_ids": torch.randint(3, 50, (2, 7))}
    small, report = shrink_experts(model, [inputs], 0.5)
    save_pretrained(small, report, tmp_path)
    again = type(model).from_pretrained(tmp_path, experts_implementation="batched_mm")
    assert _integers(small) == _integers(again) and report.not_in_config == ""
    optimizer = torch.optim.SGD(small.parameters(), lr=1e-3)
    routed = {"output_router_logits": True} if hasattr(model.config, "output_router_logits") else {}
    with torch.enable_grad():
        for _ in range(2):
            small(**inputs, labels=inputs["input_ids"], **routed).loss.backward()
            optimizer.step()
    assert all(p.grad is None or p.grad.isfinite().all() for p in small.parameters())


def test_the_model_around_layers_with_different_numbers_of_experts_keeps_its_own():
    keys = {"num_local_experts": 4, "num_experts_per_tok": 1}
    model, ids = tiny("MixtralForCausalLM", **keys, num_hidden_layers=2).float(), torch.arange(3, 12)[None]
    experts, router = model.model.layers[1].mlp.experts, model.model.layers[1].mlp.gate
    for module, names in ((experts, ("gate_up_proj", "down_proj")), (router, ("weight",))):
        for tensor in names:
            setattr(module, tensor, nn.Parameter(getattr(module, tensor)[:2].detach().clone()))
        vars(module).update({key: 2 for key, value in vars(module).items() if key == "num_experts"})
    small, _ = shrink_experts(model, [ids], 0.5)
    assert [layer.mlp.experts.num_experts for layer in small.model.layers] == [2, 1] and small.num_experts == 4


class Counted(nn.Module):
    """Blocks that run by their number, which the module holds under this name."""

    def __init__(self, key, blocks=4):
        super().__init__()
        setattr(self, key, blocks)
        self.key, self.heads = key, blocks
        self.stack = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0) for _ in range(blocks))

    def forward(self, x):
        for at in range(getattr(self, self.key)):
            x = self.stack[at](x)
        return x.unflatten(-1, (self.heads, 2)).flatten(-2)


@pytest.mark.parametrize("key", ["depth", "num_layers", "n_layer", "n_layers", "num_blocks", "num_hidden_layers"])
def test_integers_of_modules_that_count_blocks_follow(key, tmp_path):
    torch.manual_seed(0)
    one, x = Counted(key).eval(), torch.randn(3, 5, 8)
    small, report = shrink_layers(one, [x], 0.25)
    assert getattr(small, key) == len(small.stack) == 3 and small.heads == 4
    assert getattr(one, key) == 4
    report.save(tmp_path / "manifest.json")
    again = cut_to(Counted(key).eval(), tmp_path / "manifest.json")
    again.load_state_dict(small.state_dict())
    assert torch.equal(again(x), small(x))


def test_a_number_that_may_count_either_of_two_lists_stays():
    two = nn.Sequential(Counted("num_layers"), Counted("num_layers")).eval()
    two.num_layers, two.layers_per_step, two.num_shared_layers = 4, 4, 4
    small, _ = shrink_layers(two, [torch.randn(3, 5, 8)], 0.5, layers="1.stack")
    assert [part.num_layers for part in small] == [4, 2]
    assert (small.num_layers, small.layers_per_step, small.num_shared_layers) == (4, 4, 4)


@pytest.mark.parametrize("call", ["layers", "experts", "vocabulary"])
@pytest.mark.parametrize("part", ["", "lm_head", "model.layers.0", "model.layers.1.mlp.experts", "model.embed_tokens"])
def test_models_without_values_are_refused_first(call, part):
    model, inputs = hf_models.make("Mixtral")
    model.get_submodule(part).to("meta")
    calls = {"layers": lambda: shrink_layers(model, [inputs], 0.5), "vocabulary": lambda: shrink_vocabulary(model, [7])}
    calls["experts"] = lambda: shrink_experts(model, [inputs], 0.5)
    with pytest.raises(SparsityError, match=f"shrink_{call}: {part}.* on the meta device, .* load the"):
        calls[call]()


def test_layers_leave_a_model_that_accelerate_keeps_on_disk(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, inputs = deep("Llama")
    expected = shrink_layers(model, [inputs], 0.5)[0](**inputs).logits
    accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    assert all(p.is_meta for p in model.parameters())
    same, plan = shrink_layers(model, [inputs], 0.5, dry_run=True)
    assert same is model and plan.couplings[0].kept == 2 and not [*tmp_path.glob("copy-*")]
    assert torch.equal(shrink_layers(model, [inputs], 0.5)[0](**inputs).logits, expected)
