"""Where weights and streams lie changes nothing: in memory, on another device, offloaded to the CPU or to disk."""

import copy
import logging

import accelerate
import pytest
import torch
from grids import nightly_except
from networks import Net
from pruned_models import interrupted
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from sparsekit_ao import ScopeSparsifier, SparsityError, one_shot, prune, recover, removal
from sparsekit_ao.models import loading, progress
from sparsekit_ao.models.loading import is_offloaded, loaded

LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama that transformers saved, in bfloat16."""
    torch.manual_seed(0)
    keys = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 50}
    config = LlamaConfig(**keys, num_hidden_layers=LAYERS, initializer_range=0.1, tie_word_embeddings=False)
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


BATCHES = [torch.randint(50, (4, 8), generator=torch.Generator().manual_seed(k)) for k in range(4)]


def in_memory(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)


def on_disk(folder, tmp_path):
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {f"model.layers.{k}": "disk" for k in range(LAYERS)}
    return in_memory(folder, device_map=places, offload_folder=tmp_path / "offloaded")


def all_on_disk(folder, tmp_path):
    return accelerate.disk_offload(in_memory(folder), tmp_path / "all", execution_device="cpu")


def on_cpu(folder, tmp_path):
    return accelerate.cpu_offload(in_memory(folder), execution_device="cpu")


def dispatched(folder, tmp_path):
    with accelerate.init_empty_weights():
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    places = {"model": "disk", "lm_head": "cpu"}
    keys = {"offload_folder": tmp_path / "dispatched", "dtype": torch.bfloat16}
    return accelerate.load_checkpoint_and_dispatch(model, folder, places, **keys)


PLACES = {"disk": on_disk, "all on disk": all_on_disk, "cpu": on_cpu, "dispatched": dispatched}


def values(model):
    """{name: value} of a model, wherever its weights are."""
    found = {}
    for prefix, module in model.named_modules():
        with loaded(model, [module] if module._parameters else []):
            found |= {f"{prefix}.{name}": p.detach().clone() for name, p in module.named_parameters(recurse=False)}
    return found


def need_same(model, expected):
    for name, value in values(model).items():
        assert torch.equal(value, expected[name]), name


OPTIONS = {"sparsity_level": "2:4", "batches": BATCHES, "recover": True, "inplace": True}


@pytest.fixture(scope="module")
def expected(folder):
    model, report = prune(in_memory(folder), **OPTIONS)
    return values(model), [row.after for row in report], [row.after for row in report.recovery]


def test_a_device_and_streams_in_files_give_the_same_bits(folder, expected):
    for options in ({"stream_memory": 0}, {"stream_memory": 5000, "device": "cpu"}):
        model, report = prune(in_memory(folder), **OPTIONS, **options)
        need_same(model, expected[0])
        assert [row.after for row in report] == expected[1]
    for p in model.model.layers.parameters():
        assert p.ndim < 2 or (p.view(-1, 4) == 0).sum(1).eq(2).all()


@pytest.mark.parametrize("place", PLACES)
def test_an_offloaded_model_is_pruned_and_recovered_to_the_same_bits(place, folder, expected, tmp_path):
    model = PLACES[place](folder, tmp_path)
    before = model(BATCHES[0]).logits
    with pytest.raises(SparsityError, match="give inplace=True"):
        prune(model, "2:4")
    same, report = prune(model, **OPTIONS)
    assert same is model and is_offloaded(model)
    assert [row.after for row in report] == expected[1] and [row.after for row in report.recovery] == expected[2]
    need_same(model, expected[0])
    with torch.no_grad():
        after = model(BATCHES[0]).logits
        assert not torch.equal(before, after)
    if place == "disk":  # the others transformers does not save, changed or not
        model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
        again = in_memory(tmp_path / "saved")
        need_same(again, expected[0])
        assert torch.equal(again(BATCHES[0]).logits, after)


@pytest.mark.parametrize("recover", [False, True])
def test_blocks_of_16_bits_compute_in_float32_on_a_cpu_without_instructions_for_them(recover, folder, monkeypatch):
    model, seen = in_memory(folder), []
    inside, block = (lambda _, args: seen.append(args[0].dtype)), (lambda _, args, output: seen.append(output.dtype))
    model.model.layers[0].mlp.down_proj.register_forward_pre_hook(inside)
    found = {}
    for emulated in (frozenset(), frozenset({torch.bfloat16})):
        monkeypatch.setattr(loading, "_emulated", lambda emulated=emulated: emulated)
        seen.clear()
        pruned, report = prune(model, "2:4", batches=BATCHES, exclude=["lm_head"], recover=recover)
        assert {p.dtype for p in pruned.parameters()} == {torch.bfloat16}
        assert (torch.float32 in seen) == bool(emulated) and report.error_to_dense == report.error_to_dense
        pruned.model.layers[0].register_forward_hook(block)
        seen.clear()
        pruned(BATCHES[0])
        assert set(seen) == {torch.bfloat16}  # nothing is left of it
        found[emulated] = report
    narrow, wide = found.values()
    assert abs(narrow.error_to_dense - wide.error_to_dense) < 0.1 * narrow.error_to_dense
    assert all(abs(a.after - b.after) < 0.02 for a, b in zip(narrow, wide, strict=True))


def test_an_offloaded_model_is_pruned_without_batches_and_by_one_budget(folder, tmp_path):
    for options in (
        {"sparsity_level": 0.5},
        {"sparsity_level": 0.5, "batches": BATCHES, "compensate": None, "score": "wanda"},
    ):
        here, _ = prune(in_memory(folder), inplace=True, **options)
        there, report = prune(on_disk(folder, tmp_path), inplace=True, **options)
        need_same(there, values(here))
        assert all(row.density == pytest.approx(0.5, abs=0.01) for row in report)


def test_recover_reads_an_offloaded_dense_model_block_by_block(folder, tmp_path):
    pruned, _ = prune(in_memory(folder), "2:4", inplace=True)
    here, there = copy.deepcopy(pruned), pruned
    rows = recover(here, in_memory(folder), BATCHES)
    assert recover(there, on_disk(folder, tmp_path), BATCHES).rows[0].after == rows.rows[0].after
    need_same(there, values(here))
    with pytest.raises(SparsityError, match="is trained as a whole, so its weights must be in memory"):
        recover(on_disk(folder, tmp_path / "other"), here, BATCHES, outputs="kl")


def test_an_error_in_the_middle_leaves_an_offloaded_block_as_it_was_and_the_call_goes_on(folder, expected, tmp_path):
    model = on_disk(folder, tmp_path)
    with interrupted([model.model.layers[1].mlp], 1, is_training=True) as error:
        prune(model, **OPTIONS, checkpoint=tmp_path / "call")
    text = f"1 of {LAYERS} steps are finished. Load the model as it was before and make the same call"
    assert text in error.value.__notes__[0]
    now, dense = values(model), values(in_memory(folder))
    for name, value in now.items():
        is_finished = name.startswith("model.layers.0.")
        assert torch.equal(value, (expected[0] if is_finished else dense)[name]), name
    with pytest.raises(SparsityError, match="model.layers.0 has other weights than when the interrupted call began"):
        prune(model, **OPTIONS, checkpoint=tmp_path / "call")
    again, report = prune(on_disk(folder, tmp_path / "again"), **OPTIONS, checkpoint=tmp_path / "call")
    need_same(again, expected[0])
    assert [row.after for row in report] == expected[1] and [row.after for row in report.recovery] == expected[2]


def test_what_cannot_be_loaded_or_written_is_refused_with_what_to_do(folder, tmp_path):
    model = on_disk(folder, tmp_path)
    sparsifier = ScopeSparsifier(0.5)
    sparsifier.prepare(model)
    with pytest.raises(SparsityError, match="has no values|accelerate offloads weights of this model, and masks"):
        one_shot(sparsifier, BATCHES)
    with torch.device("meta"):
        nowhere = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(SparsityError, match=r"0.weight has no values: it is on the meta device.*from_pretrained"):
        prune(nowhere, inplace=True)


def test_signs_of_life_without_a_terminal(folder, caplog, capsys, monkeypatch):
    monkeypatch.setattr("sparsekit_ao.models.progress.AFTER", 0)
    with caplog.at_level(logging.INFO, logger="sparsekit_ao"):
        prune(in_memory(folder), **OPTIONS)
    assert len(caplog.messages) == LAYERS  # the output embedding stays dense
    assert caplog.messages[1].startswith("prune: block 2 of 3, model.layers.1, error 0.")
    assert "s left, peak " in caplog.messages[1] and "GiB" in caplog.messages[1]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="sparsekit_ao"):
        prune(in_memory(folder), **OPTIONS, progress=False)
    assert not caplog.messages and "prune:" not in capsys.readouterr().err


def test_layers_after_the_blocks_are_recorded_without_running_the_blocks_where_that_is_the_same():
    def block(m, x):
        m.calls += 1
        return x + m.layer(x).relu()

    def run(m, x):
        hidden = [x]
        for one in m.blocks:
            hidden.append(one(hidden[-1]))
        return m.head(hidden[-1] + hidden[1] if m.reads_middle else hidden[-1])

    batches, calls = [torch.randn(16, 8) for _ in range(4)], {}
    for reads_middle in (False, True):
        blocks = nn.ModuleList(Net(block, layer=nn.Linear(8, 8), calls=0) for _ in range(3))
        model = Net(run, blocks=blocks, head=nn.Linear(8, 4), reads_middle=reads_middle)
        _, report = prune(model, 0.5, batches=batches, inplace=True)
        calls[reads_middle] = sum(one.calls for one in model.blocks)
        assert report.blocks == 3 and all(row.after < row.before for row in report)
    assert calls[True] - calls[False] == 3 * 4


def test_units_of_an_offloaded_model_are_not_removed_and_layers_are(folder, tmp_path):
    with pytest.raises(SparsityError, match="load the weights first, without accelerate's offloading"):
        removal.shrink(on_disk(folder, tmp_path / "other"), BATCHES[0], 0.5)
    small, _ = removal.shrink_layers(on_disk(folder, tmp_path / "third"), BATCHES, 0.34)
    here, _ = removal.shrink_layers(in_memory(folder), BATCHES, 0.34)
    assert torch.equal(small(BATCHES[0]).logits, here(BATCHES[0]).logits)


def test_a_smaller_model_on_disk_has_files_of_its_own(folder, tmp_path):
    dense = all_on_disk(folder, tmp_path)
    before = values(dense)
    small, _ = removal.shrink_layers(dense, BATCHES, 0.34)
    recover(small, dense, BATCHES, progress=False)
    need_same(dense, before)
    recovered = values(small)
    prune(dense, "2:4", inplace=True)
    need_same(small, recovered)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A small mixture of experts that transformers saved, in bfloat16."""
    torch.manual_seed(0)
    keys = {"hidden_size": 32, "moe_intermediate_size": 24, "num_attention_heads": 4, "vocab_size": 50, "head_dim": 8}
    keys |= {"num_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 2, "initializer_range": 0.3}
    path = tmp_path_factory.mktemp("mixture")
    config = Qwen3MoeConfig(**keys, num_hidden_layers=LAYERS, tie_word_embeddings=False)
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(path)
    return path


@pytest.mark.parametrize("place", nightly_except(["disk", "all on disk", "cpu"], "disk"))
def test_experts_of_an_offloaded_model_are_removed_in_one_walk_and_recovered(place, mixture, tmp_path):
    here, report = removal.shrink_experts(in_memory(mixture), BATCHES, 0.5)
    dense = PLACES[place](mixture, tmp_path)
    before = values(dense)
    small, found = removal.shrink_experts(dense, BATCHES, 0.5)
    assert is_offloaded(small)
    assert found.difference == report.difference and found.before.parameters == report.before.parameters
    assert found.after == report.after and found.changed == report.changed and found.not_in_config == ""
    need_same(small, values(here))
    need_same(dense, before)  # which reads its own files still
    with torch.no_grad():
        assert torch.equal(small(BATCHES[0]).logits, here(BATCHES[0]).logits)
    rows = [recover(one, dense, BATCHES, passes=2, progress=False).rows for one in (small, here)]
    assert [row.after for row in rows[0]] == [row.after for row in rows[1]]
    assert all(row.after < row.before for row in rows[0])
    need_same(small, values(here))
    need_same(dense, before)
    if place == "disk":
        small.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
        again = in_memory(tmp_path / "saved")
        assert again.config.num_experts == 3
        need_same(again, values(here))


def test_experts_are_loaded_as_often_for_one_batch_as_for_many(mixture, tmp_path, monkeypatch):
    hooks, counts = pytest.importorskip("accelerate").hooks.AlignDevicesHook, []
    load = hooks.pre_forward

    def counted(hook, module, *args, **kwargs):
        counts[-1] += type(module).__name__.endswith("Experts")
        return load(hook, module, *args, **kwargs)

    monkeypatch.setattr(hooks, "pre_forward", counted)
    for batches in (BATCHES[:1], BATCHES):
        model = on_disk(mixture, tmp_path / str(len(batches)))
        counts.append(0)
        removal.shrink_experts(model, batches, 0.5)
    assert counts[0] == counts[1] > 0


def test_messages_go_to_standard_error_if_logging_is_not_configured(capsys, monkeypatch):
    monkeypatch.setattr(progress.logger, "propagate", False)
    progress.say("a message")
    monkeypatch.setattr(progress.logger, "level", logging.WARNING)
    progress.say("another one")
    assert capsys.readouterr().err == "a message\n"
