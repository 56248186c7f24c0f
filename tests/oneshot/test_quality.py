"""quality: what it reports of logits, tokens and other outputs is what plain formulas give, by kind and in the mean."""

import copy
import itertools
import math

import hf_models
import pytest
import torch
import transformers
from discovered import fill
from torch import nn
from torch.nn import functional as F

from sparsekit_ao import SparsityError, mixed, prune, quality, shrink_vocabulary, spliced


def both(name):
    """A tiny model, and the same one at 2:4."""
    dense, inputs = hf_models.make(name)
    return dense.eval(), prune(dense.eval(), "2:4", progress=False)[0], inputs


def nats(dense, model, **inputs):
    """The divergence of each token, and whether its first choice is the same."""
    p, q = (torch.softmax(one(**inputs).logits.double(), -1) for one in (dense, model))
    return (p * (p / q).log()).sum(-1), p.argmax(-1) == q.argmax(-1)


def losses(model, targets, **inputs):
    """The loss of each next token, [batch, tokens - 1]."""
    logits = model(**inputs).logits.double()[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


def ids_of(*shape, seed=0):
    return torch.randint(3, 50, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_of_a_decoder_does_not_count(side):
    dense, pruned, _ = both("Llama")
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, 6:] = mask[2, 2:] = 0
    mask = mask if side == "right" else mask.flip(1)
    batch = {"input_ids": ids_of(3, 9), "attention_mask": mask}
    counts, both_count = mask.bool(), (mask[:, 1:] * mask[:, :-1]).bool()
    assert pruned.train() and dense.config.use_cache
    row = quality(dense, pruned, [batch]).mean
    assert pruned.training and not dense.training and dense.config.use_cache
    pruned.eval()
    divergence, same = nats(dense, pruned, **batch)
    assert row.count == int(counts.sum()) and row.kind == "all"
    assert row.divergence == pytest.approx(divergence[counts].mean().item(), rel=1e-4)
    assert row.agreement == same[counts].double().mean().item() and math.isnan(row.cosine + row.error)
    for name, model in (("dense_perplexity", dense), ("perplexity", pruned)):
        loss = losses(model, batch["input_ids"][:, 1:], **batch)[both_count].mean()
        assert getattr(row, name) == pytest.approx(loss.exp().item(), rel=1e-5)
    unmasked = quality(dense, pruned, [batch], token_mask=False).mean
    assert unmasked.count == 27 and unmasked.divergence == pytest.approx(divergence.mean().item(), rel=1e-4)
    first = quality(dense, pruned, [batch], token_mask=lambda batch: torch.arange(9).expand(3, 9) < 1).mean
    assert first.count == 3 and math.isnan(first.perplexity)  # no two tokens in a row


@torch.no_grad()
def test_each_kind_counts_the_same_and_the_worst_one_is_named():
    dense, pruned, _ = both("GPT-2")
    kinds = {"few": [ids_of(1, 4)], "many": [{"input_ids": ids_of(3, 8, seed=seed)} for seed in (1, 2)], "tuple": None}
    kinds["tuple"] = iter([(ids_of(2, 6, seed=3),)])
    report = quality(dense, pruned, kinds)
    assert [row.kind for row in report] == [*kinds, "mean"] and report.mean is report["mean"] is report[-1]
    assert [row.count for row in report] == [4, 48, 12, 64]
    rows = report[:-1]
    for name in ("divergence", "agreement"):
        assert getattr(report.mean, name) == pytest.approx(sum(getattr(row, name) for row in rows) / 3)
    for name in ("dense_perplexity", "perplexity"):
        assert getattr(report.mean, name) == pytest.approx(math.prod(getattr(row, name) for row in rows) ** (1 / 3))
    assert report["few"] == quality(dense, pruned, {"few": [ids_of(1, 4)]})["few"]
    assert report.worst is max(rows, key=lambda row: row.divergence)
    head, *lines, last = str(report).splitlines()
    assert head.split() == ["kind", "count", "divergence", "agreement", "dense_perplexity", "perplexity"]
    assert len(lines) == 4 and last == f"farthest from the dense model: {report.worst.kind}"
    assert report.log_dict("q/")["q/divergence/mean"] == report.mean.divergence
    assert not any(name.startswith("cosine") for name in report.metrics())


@torch.no_grad()
def test_the_dense_model_itself_has_lost_nothing():
    dense, _, inputs = both("Llama")
    row = quality(dense, dense, [inputs]).mean
    assert (row.divergence, row.agreement) == (0, 1) and row.perplexity == row.dense_perplexity
    row = quality(both("BERT")[0], both("BERT")[0], [{"input_ids": ids_of(2, 5)}]).mean
    assert row.error == 0 and row.cosine == pytest.approx(1)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForMaskedLM", "BertForTokenClassification"])
@torch.no_grad()
def test_a_token_that_later_ones_help_to_predict_has_no_perplexity(name):
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    dense = model_class(model_class.config_class(**hf_models._COMMON)).eval()  # weights as they are initialized
    pruned = prune(dense, "2:4", progress=False)[0]
    batch = {"input_ids": ids_of(2, 7), "attention_mask": (torch.arange(7) < torch.tensor([[7], [4]])).long()}
    row = quality(dense, pruned, [batch]).mean
    divergence, _ = nats(dense, pruned, **batch)
    assert math.isnan(row.perplexity + row.dense_perplexity) and row.count == 11
    assert row.divergence == pytest.approx(divergence[batch["attention_mask"].bool()].mean().item(), rel=1e-4)


@pytest.mark.parametrize(("dtype", "is_filled"), [("bfloat16", True), ("bfloat16", False), ("float32", False)])
@torch.no_grad()
def test_no_length_and_no_rounding_makes_an_encoder_predict_the_next_token(dtype, is_filled):
    torch.manual_seed(0)
    keys = hf_models._COMMON | {"max_position_embeddings": 256}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**keys)).eval()
    model = (fill(model) if is_filled else model).to(getattr(torch, dtype))
    for length in (16, 64, 256):
        assert math.isnan(quality(model, model, [ids_of(2, length)]).mean.perplexity)


@torch.no_grad()
def test_a_decoder_has_a_perplexity_with_images_masked_classes_rounding_and_equal_tokens():
    llava, inputs = hf_models.make("LLaVA")
    inputs["input_ids"][0, -1] = 48  # the next id is that of an image
    assert quality(llava, copy.deepcopy(llava), [inputs]).mean.perplexity > 1
    llama = hf_models.make("Llama")[0].eval()
    calls = itertools.count(1000)  # no two give quite the same, as if products were rounded otherwise

    def after(layer, args, logits):
        return (logits * (next(calls) / 1000)).index_fill(-1, torch.tensor(2), -math.inf)

    llama.lm_head.register_forward_hook(after)
    for ids in (ids_of(2, 9), torch.full((2, 9), 7)):
        assert 1 < quality(llama, llama, [ids]).mean.perplexity < math.inf


@torch.no_grad()
def test_an_input_that_admits_no_other_tokens_has_no_perplexity():
    llama = hf_models.make("Llama")[0].eval()
    ids = ids_of(1, 8)

    def forward(model, batch):
        return model(batch) if torch.equal(batch, ids) else 1 / 0

    row = quality(llama, llama, [ids], forward).mean
    assert math.isnan(row.perplexity) and row.agreement == 1


@torch.no_grad()
def test_a_model_of_fewer_tokens_is_compared_by_the_forward_that_an_error_advises():
    llama = hf_models.make("Llama")[0].eval()
    small, _, report = shrink_vocabulary(llama, range(3, 30))
    new, batch = report.new_ids, ids_of(2, 8) % 27 + 3
    with pytest.raises(
        SparsityError, match=r"the model does not, since it has \d+ tokens, and the batch has the id 49"
    ):
        quality(llama, small, [torch.full((1, 4), 49)])
    table = torch.zeros(50, dtype=torch.long)
    table[[*new]] = torch.tensor([*new.values()])

    def forward(model, ids):
        if model is small:
            return model(table[ids])
        return {"logits": model(ids).logits[..., [*new]]}

    row = quality(llama, small, [batch], forward).mean
    assert row.divergence < 1e-6 and row.agreement == 1


@torch.no_grad()
def test_an_encoder_is_compared_by_its_hidden_states():
    dense, pruned, _ = both("BERT")
    mask = (torch.arange(7) < torch.tensor([[7], [4]])).long()
    batches = [{"input_ids": ids_of(2, 7, seed=seed), "attention_mask": mask} for seed in range(3)]
    row = quality(dense, pruned, batches).mean
    wanted, got = (
        torch.cat([model(**batch).last_hidden_state[mask.bool()] for batch in batches]).double()
        for model in (dense, pruned)
    )
    assert row.count == 33 and math.isnan(row.divergence)
    assert row.cosine == pytest.approx(F.cosine_similarity(wanted, got).mean().item(), rel=1e-6)
    assert row.error == pytest.approx(((got - wanted).norm() / (wanted - wanted.mean(0)).norm()).item(), rel=1e-6)


@pytest.mark.parametrize("has_labels", [True, False])
@torch.no_grad()
def test_an_encoder_decoder_is_measured_where_its_decoder_predicts(has_labels):
    torch.manual_seed(0)
    config = transformers.T5Config(**hf_models._T5, num_layers=1, decoder_start_token_id=0)
    dense = fill(transformers.T5ForConditionalGeneration(config)).eval()
    pruned = prune(dense, "2:4", progress=False)[0]
    labels = ids_of(2, 5, seed=1)
    labels[1, 3:] = -100
    starts = torch.cat([torch.zeros(2, 1, dtype=torch.long), labels[:, :-1].clamp(min=0)], 1)
    # The mask of the encoder, as large as that of the decoder, is none of the decoder's.
    inputs = {"input_ids": ids_of(2, 5), "attention_mask": torch.tensor([[1] * 5, [1, 0, 0, 0, 0]])}
    counts = labels >= 0 if has_labels else torch.ones(2, 5, dtype=torch.bool)
    row = quality(dense, pruned, [inputs | ({"labels": labels} if has_labels else {"decoder_input_ids": starts})]).mean
    divergence, same = nats(dense, pruned, **inputs, decoder_input_ids=starts)
    assert row.count == int(counts.sum()) and row.agreement == same[counts].double().mean().item()
    assert row.divergence == pytest.approx(divergence[counts].mean().item(), rel=1e-4)
    own = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]])  # of the decoder, by a function
    few = quality(dense, pruned, [inputs | {"labels": labels}], token_mask=lambda batch: own).mean
    assert few.count == 3 and few.divergence == pytest.approx(divergence[own == 1].mean().item(), rel=1e-4)
    for length in (5, 7) if has_labels else ():
        given = {"input_ids": ids_of(2, length), "attention_mask": torch.ones(2, length).long(), "labels": labels}
        masks = (None, "attention_mask", lambda batch: batch["attention_mask"])
        assert [quality(dense, pruned, [given], token_mask=mask).mean.count for mask in masks] == [8, 8, 8]
        assert quality(dense, pruned, [given], token_mask=False).mean.count == 10
    logits = pruned(**inputs, decoder_input_ids=starts).logits.double()
    loss = F.cross_entropy(logits.transpose(1, 2), labels) if has_labels else None
    loss = losses(pruned, starts[:, 1:], **inputs, decoder_input_ids=starts).mean() if loss is None else loss
    assert row.perplexity == pytest.approx(loss.exp().item(), rel=1e-5)


@pytest.mark.parametrize("is_named", [True, False])
@torch.no_grad()
def test_classifiers_of_images_are_compared_row_by_row(is_named):
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    pruned = prune(dense, 0.5, progress=False)[0]
    images = [torch.randn(6, 3, 8, 8), torch.randn(2, 3, 8, 8)]
    a, b = (torch.cat([model(batch) for batch in images]).double() for model in (dense, pruned))
    if is_named:
        report = quality(dense, pruned, images, lambda model, batch: {"logits": model(batch)})
        p, q = a.softmax(-1), b.softmax(-1)
        assert report.mean.divergence == pytest.approx((p * (p / q).log()).sum(-1).mean().item(), rel=1e-4)
        assert report.mean.agreement == (p.argmax(-1) == q.argmax(-1)).double().mean().item()
        assert report.mean.count == 8 and math.isnan(report.mean.perplexity)
    else:
        report = quality(dense, pruned, images)
        assert report.mean.error == pytest.approx(((b - a).norm() / (a - a.mean(0)).norm()).item(), rel=1e-6)
        assert math.isnan(report.mean.divergence)
    *models, inputs = both("ViT")
    row = quality(*models, [inputs]).mean
    divergence, _ = nats(*models, **inputs)
    assert row.divergence == pytest.approx(divergence.mean().item(), rel=1e-4) and row.count == len(divergence)


@torch.no_grad()
def test_pixels_have_logits_each_and_classes_of_no_probability_add_nothing():
    class Masked(nn.Conv2d):
        def forward(self, x):
            logits = super().forward(x)
            logits[:, 0] = -math.inf
            return {"loss": logits.new_ones(()), "logits": logits}

    torch.manual_seed(0)
    dense, model = Masked(3, 4, 1), Masked(3, 4, 1)
    images = torch.randn(2, 3, 5, 5)
    row = quality(dense, model, [images]).mean
    p, q = (one(images)["logits"][:, 1:].double().softmax(1) for one in (dense, model))
    assert row.count == 50
    assert row.divergence == pytest.approx((p * (p / q).log()).sum(1).mean().item(), rel=1e-4)


def test_a_dense_model_that_accelerate_keeps_on_disk_is_read_where_it_lies(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    dense, pruned, inputs = both("Llama")
    expected = quality(dense, pruned, [inputs])
    accelerate.disk_offload(dense, tmp_path, execution_device="cpu")
    assert quality(dense, pruned, [inputs]).rows == expected.rows


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "there are no batches of 'all'"),
        (iter([]), "there are no batches of 'all'"),
        ({}, "got a dict with nothing"),
        ({"code": [ids_of(1, 4)], "german": []}, "there are no batches of 'german'"),
        ({"input_ids": ids_of(1, 4)}, r"a dict with 'input_ids'; if this is one batch, give \[batch\]"),
        (ids_of(1, 4), "got one tensor"),
        ({"code": 3}, "quality: kind 'code': batches must be a list of batches"),
        ({"mean": [ids_of(1, 4)]}, "kinds of different names, none of them 'mean', got"),
        ({3: [ids_of(1, 4)], "3": [ids_of(1, 4)]}, "of different names, none of them 'mean', got a dict with 3, '3'"),
    ],
)
def test_batches_that_are_none_are_refused(batches, message):
    dense = hf_models.make("Llama")[0].eval()
    with pytest.raises(SparsityError, match=message):
        quality(dense, dense, batches)


def test_what_cannot_be_compared_is_refused():
    dense, inputs = hf_models.make("Llama")
    other = transformers.LlamaForCausalLM(transformers.LlamaConfig(**hf_models._DECODER | {"vocab_size": 60}))
    with pytest.raises(SparsityError, match=r"batch 0 of 'all': the outputs .* \(2, \d+, 50\) and \(2, \d+, 60\)"):
        quality(dense, other, [inputs])
    with pytest.raises(SparsityError, match="no tensor of floats"):
        quality(dense, dense, [inputs], lambda model, batch: batch["input_ids"])
    with pytest.raises(SparsityError, match=r"the token mask is \(2, 3\), but the outputs are"):
        quality(dense, dense, [inputs], token_mask=lambda batch: torch.ones(2, 3))
    with pytest.raises(SparsityError, match=r"model must be a torch\.nn\.Module"):
        quality(dense, None, [inputs])
    broken = hf_models.make("Llama")[0]
    for value in (math.nan, math.inf):
        broken.lm_head.weight.data[3] = value
        for models, whose in (((dense, broken), "the model"), ((broken, broken), "the dense model and the model")):
            with pytest.raises(
                SparsityError, match=f"batch 0 of 'code': outputs of {whose} that count have values that"
            ):
                quality(*models, {"code": [inputs]})
    with pytest.raises(SparsityError, match=r"has no values"):
        quality(dense, broken.to("meta"), [inputs])


def test_batches_of_several_kinds_are_dealt_evenly():
    kinds = {
        "code": [ids_of(1, 4, seed=k) for k in range(3)],
        "letters": iter([ids_of(2, 5, seed=k) for k in range(3)]),
    }
    dealt = mixed(kinds)
    assert [tuple(batch.shape) for batch in dealt] == [(1, 4), (2, 5)] * 3
    assert all(torch.equal(batch, ids_of(*batch.shape, seed=at // 2)) for at, batch in enumerate(dealt))
    dense = hf_models.make("Llama")[0].eval()
    prune(dense, "2:4", batches=dealt, progress=False)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ({}, r"mixed: batches must be {kind: batches}, got {}"),
        ([1, 2], r"mixed: batches must be {kind: batches}, got \[1, 2\]"),
        ({"a": [1, 2, 3], "b": [4, 5]}, r"got {'a': 3, 'b': 2}; give batches\[:2\] of each"),
        ({"a": [1], "b": []}, r"got {'a': 1, 'b': 0}; leave out kinds without batches"),
        ({"a": ids_of(2, 3)}, "mixed: kind 'a': batches must be a list of batches, got one tensor"),
    ],
)
def test_kinds_that_cannot_be_dealt_evenly_are_refused(batches, message):
    with pytest.raises(SparsityError, match=message):
        mixed(batches)


@pytest.mark.parametrize("is_dict", [False, True])
def test_copies_have_the_pieces_of_all_windows_in_another_order(is_dict):
    windows = torch.arange(96).reshape(6, 16)
    batches = [windows[:4], windows[4:].int()]
    given = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in batches] if is_dict else batches
    state = torch.random.get_rng_state()
    made = spliced(given, copies=2, length=4)
    assert torch.equal(torch.random.get_rng_state(), state) and made[:2] == given and len(made) == 6
    copies = [batch["input_ids"] if is_dict else batch for batch in made[2:]]
    assert [len(ids) for ids in copies] == [4, 2, 4, 2]
    assert [ids.dtype for ids in copies] == [torch.int64, torch.int32] * 2
    for copy_of_both in (torch.cat(copies[:2]), torch.cat(copies[2:])):
        pieces = copy_of_both.reshape(-1, 4)
        assert torch.equal(pieces[pieces[:, 0].argsort()], windows.reshape(-1, 4))
        assert not torch.equal(copy_of_both, windows)
    assert not torch.equal(torch.cat(copies[:2]), torch.cat(copies[2:]))
    assert all(is_dict or torch.equal(*pair) for pair in zip(made, spliced(given, copies=2, length=4), strict=True))
    assert not is_dict or all(batch["attention_mask"].shape == batch["input_ids"].shape for batch in made)
    of_tokenizer = [transformers.BatchEncoding({"input_ids": ids}) for ids in batches]
    again = spliced(of_tokenizer, copies=2, length=4)
    assert all(torch.equal(batch.input_ids, ids) for batch, ids in zip(again[2:], copies, strict=True))


@pytest.mark.parametrize(
    ("batches", "keys", "text"),
    [
        ([torch.arange(8)[None]], {"copies": 0}, "copies must be an integer of at least 1, got 0"),
        ([torch.arange(8)[None]], {"length": 2.0}, "length must be an integer of at least 1, got 2.0"),
        ([torch.arange(8)[None]], {"seed": None}, "seed must be an integer of at least 0, got None"),
        ([torch.arange(8)[None]], {"length": 3}, r"two or more times length=3, got \[8\]"),
        ([torch.arange(8)[None]] * 2, {"length": 8}, r"two or more times length=8, got \[8\]"),
        ([torch.arange(8)[None], torch.arange(4)[None]], {"length": 2}, r"equally many tokens.*got \[4, 8\]"),
        ([torch.randn(2, 8)], {}, "batches must be tensors of ids"),
        ([{"input_ids": torch.ones(2, 8).long(), "labels": torch.ones(2, 8)}], {}, "at most an 'attention_mask'"),
        ([{"input_ids": torch.ones(2, 8).long(), "attention_mask": torch.eye(2, 8)}], {}, "without padding"),
        ([{"input_ids": torch.ones(2, 8).long(), "attention_mask": "none"}], {}, "without padding"),
        ([{"input_ids": torch.ones(1, 8).long(), "attention_mask": [[1] * 8]}], {}, "a tensor without padding"),
        (torch.arange(8)[None], {}, "batches must be a list of batches, got one tensor"),
    ],
)
def test_what_cannot_be_spliced_is_refused(batches, keys, text):
    with pytest.raises(SparsityError, match=text):
        spliced(batches, **keys)
