"""Token masks of encoder-decoders: each layer counts the tokens that it reads, also where both halves have as many."""

import copy

import hf_models
import pytest
import torch
import transformers
from grids import grid
from networks import Net
from torch import nn

from sparsekit_ao import ScopeSparsifier, one_shot, prune, recover, shrink

ROWS, LENGTH, ENCODED, DECODED = 3, 8, 15, 12  # how many tokens count in the encoder's mask and in the decoder's
SMALL = {"d_model": 16, "vocab_size": 32, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
HALVES = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, **SMALL}
HALVES |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 16}
T5 = {**SMALL, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
BERT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
CROSS = ("EncDecAttention", "encoder_attn", "crossattention", "multihead_attn", "cross_")


def of_transformers(name, config):
    kind = getattr(transformers, name)
    return kind(kind.config_class(**config))


def two_berts():
    """A decoder of another width, to which a projection outside of both halves brings the encoder's outputs."""
    decoder = transformers.BertConfig(**{**BERT, "hidden_size": 8}, is_decoder=True, add_cross_attention=True)
    encoder = transformers.BertModel(transformers.BertConfig(**BERT), add_pooling_layer=False)
    return transformers.EncoderDecoderModel(encoder=encoder, decoder=transformers.BertLMHeadModel(decoder))


def of_torch():
    def run(m, input_ids, attention_mask, decoder_input_ids, decoder_attention_mask=None):
        memory, hidden = m.table(input_ids), m.decoder_table(decoder_input_ids)
        for layer in m.encoder:
            memory = layer(memory, src_key_padding_mask=attention_mask == 0)
        padding = None if decoder_attention_mask is None else decoder_attention_mask == 0
        for layer in m.decoder:
            hidden = layer(hidden, memory, None, None, padding, attention_mask == 0)
        return m.decoder_head(hidden)

    options = {"d_model": 16, "nhead": 2, "dim_feedforward": 24, "batch_first": True}
    return Net(
        run,
        table=nn.Embedding(32, 16),
        decoder_table=nn.Embedding(32, 16),
        encoder=nn.ModuleList(nn.TransformerEncoderLayer(**options) for _ in range(2)),
        decoder=nn.ModuleList(nn.TransformerDecoderLayer(**options) for _ in range(2)),
        decoder_head=nn.Linear(16, 32),
    )


def recurrent():
    """Weights of GRUs, and the order of factors k q^T in place of q k^T."""

    def run(m, input_ids, attention_mask, decoder_input_ids, decoder_attention_mask=None):
        hidden = m.decoder_rnn(m.decoder_table(decoder_input_ids))[0]
        memory = m.rnn(m.table(input_ids))[0]
        scores = (m.cross_k(memory) @ m.decoder_q(hidden).mT).masked_fill(attention_mask[..., None] == 0, -1e9)
        read = torch.zeros(hidden.shape)
        read[:] = scores.softmax(1).mT @ m.cross_v(memory)
        return m.decoder_head(torch.where(hidden > 9, hidden, hidden + m.decoder_o(read)))

    layers = {name: nn.Linear(16, 16) for name in ("cross_k", "cross_v", "decoder_q", "decoder_o")}
    return Net(
        run,
        table=nn.Embedding(32, 16),
        decoder_table=nn.Embedding(32, 16),
        rnn=nn.GRU(16, 16, 2, batch_first=True),
        decoder_rnn=nn.GRU(16, 16, 2, batch_first=True),
        decoder_head=nn.Linear(16, 32),
        **layers,
    )


def plain():
    """Linear layers alone."""

    def run(m, input_ids, attention_mask, decoder_input_ids, decoder_attention_mask=None):
        memory, hidden = m.mlp(m.table(input_ids)), m.decoder_mlp(m.decoder_table(decoder_input_ids))
        scores = (m.decoder_q(hidden) @ m.cross_k(memory).mT).masked_fill(attention_mask[:, None] == 0, -1e9)
        return m.decoder_head(hidden + scores.softmax(-1) @ m.cross_v(memory))

    layers = {name: nn.Linear(16, 16) for name in ("cross_k", "cross_v", "decoder_q")}
    mlps = {name: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for name in ("mlp", "decoder_mlp")}
    tables = {name: nn.Embedding(32, 16) for name in ("table", "decoder_table")}
    return Net(run, decoder_head=nn.Linear(16, 32), **tables, **mlps, **layers)


MODELS = {
    "plain": plain,
    "T5": lambda: of_transformers("T5ForConditionalGeneration", T5),
    "T5, eager": lambda: of_transformers("T5ForConditionalGeneration", {**T5, "attn_implementation": "eager"}),
    "Bart": lambda: of_transformers("BartForConditionalGeneration", HALVES),
    "Marian, eager": lambda: of_transformers("MarianMTModel", {**HALVES, "attn_implementation": "eager"}),
    "two Berts": two_berts,
    "of torch": of_torch,
    "recurrent": recurrent,
}


def batch_of(length=LENGTH, is_masked=True, is_shared=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids, decoder_ids = (torch.randint(3, 32, (ROWS, n), generator=generator) for n in (LENGTH, length))
    batch = {"input_ids": ids, "attention_mask": torch.arange(LENGTH).expand(ROWS, -1) < ENCODED // ROWS}
    batch = {key: x.long() for key, x in batch.items()}
    batch["decoder_input_ids"] = batch["input_ids"] if is_shared else decoder_ids
    if is_masked:
        batch["decoder_attention_mask"] = (torch.arange(length).expand(ROWS, -1) < DECODED // ROWS).long()
    return batch


def model_of(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


def wanted(name, decoded):
    """How many tokens the layer of a weight reads."""
    is_cross = any(word in name for word in CROSS)
    of_encoder = is_cross and name.rpartition(".")[0].endswith(
        (".k", ".v", "k_proj", "v_proj", "key", "value", "s_k", "s_v")
    )
    words = name.replace("encoder_attn", "").split(".")
    is_decoder = any(word.startswith(("decoder", "lm_head")) for word in words)
    return decoded if is_decoder and not of_encoder else ENCODED


class Counting:
    """A score that notes how many tokens were recorded."""

    needs = ("input_square",)

    def __init__(self):
        self.tokens = {}

    def __call__(self, weight, statistics):
        self.tokens[statistics.name] = statistics.tokens
        return weight.abs()


def by_calibrate(model, batches, **options):
    sparsifier = ScopeSparsifier(0.5, score="wanda")
    sparsifier.prepare(copy.deepcopy(model))
    sparsifier.calibrate(batches, **options)
    return {name: one.tokens for name, one in sparsifier.statistics.items()}


def by(call):
    def tokens(model, batches, **options):
        score = Counting()
        call(model, batches, score, **options)
        return score.tokens

    return tokens


def one_shot_of_a_copy(model, batches, score, **options):
    sparsifier = ScopeSparsifier(0.5, score=score)
    sparsifier.prepare(copy.deepcopy(model))
    one_shot(sparsifier, batches, compensate=None, **options)


CALLS = {
    "calibrate": by_calibrate,
    "prune": by(lambda m, b, score, **o: prune(m, 0.5, batches=b, score=score, compensate=None, **o)),
    "prune, on files": by(
        lambda m, b, score, **o: prune(m, 0.5, batches=b, score=score, compensate=None, stream_memory=0, **o)
    ),
    "one_shot": by(one_shot_of_a_copy),
}
# {what: (the batch, how many tokens of the decoder count)}
BATCHES = {
    "as many": (batch_of, DECODED),
    "as many, no mask of the decoder": (lambda: batch_of(is_masked=False), ROWS * LENGTH),
    "the same tokens": (lambda: batch_of(is_masked=False, is_shared=True), ROWS * LENGTH),
    "fewer": (lambda: batch_of(6), DECODED),
    "more, no mask of the decoder": (lambda: batch_of(9, is_masked=False), ROWS * 9),
    "the tokenizer's": (lambda: transformers.BatchEncoding(batch_of(is_shared=True)), DECODED),
}


def check(tokens, decoded):
    tokens = {name: n for name, n in tokens.items() if "in_proj" not in name or "multihead" not in name}
    # `in_proj_weight` of cross-attention reads both, and tables of positions read no tokens.
    tokens = {
        name: n for name, n in tokens.items() if "position" not in name and "embed" not in name and "shared" not in name
    }
    assert tokens and tokens == {name: wanted(name, decoded) for name in tokens}


WITH_CALLS = ["calibrate", "prune"]
COUNTED = grid(BATCHES, ["plain", "of torch"], WITH_CALLS)
OTHERS = [name for name in MODELS if name not in ("plain", "of torch")]
COUNTED += grid(["as many", "as many, no mask of the decoder"], OTHERS, WITH_CALLS)


@pytest.mark.parametrize(("what", "name", "call"), COUNTED)
def test_each_layer_counts_the_tokens_that_it_reads(what, name, call):
    make, decoded = BATCHES[what]
    check(CALLS[call](model_of(name), [make()]), decoded)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["T5", "Bart", "of torch"])
def test_every_call_does(call, name):
    tokens = CALLS[call](model_of(name), [batch_of(seed=k) for k in range(2)])
    check({key: n // 2 for key, n in tokens.items()}, DECODED)


@pytest.mark.parametrize("call", CALLS)
def test_an_argument_gives_one_mask_for_all(call):
    model, batch = model_of("Bart"), batch_of()
    for token_mask, count in (
        (False, ROWS * LENGTH),
        ("attention_mask", ENCODED),
        (lambda b: b["attention_mask"], ENCODED),
    ):
        tokens = CALLS[call](model, [batch], token_mask=token_mask)
        assert {n for name, n in tokens.items() if "embed" not in name} == {count}


@pytest.mark.parametrize("call", ["calibrate", "prune"])
def test_labels_are_tokens_of_the_decoder(call):
    batch = {key: batch_of()[key] for key in ("input_ids", "attention_mask")}
    check(CALLS[call](model_of("T5"), [{**batch, "labels": batch_of()["decoder_input_ids"]}]), ROWS * LENGTH)
    model = of_transformers("LlamaForCausalLM", {**BERT, "num_key_value_heads": 2}).eval()
    tokens = CALLS[call](model, [{**batch, "labels": batch["input_ids"]}])
    assert {n for name, n in tokens.items() if "embed" not in name} == {ENCODED}


@pytest.mark.parametrize("call", ["calibrate", "prune"])
def test_a_mask_that_does_not_fit_what_the_encoder_reads_counts_all(call):
    model = of_transformers(
        "WhisperForConditionalGeneration", {**HALVES, "num_mel_bins": 8, "max_source_positions": 8}
    ).eval()
    batch = {key: x for key, x in batch_of().items() if key.startswith("decoder_")}
    batch |= {"input_features": torch.randn(ROWS, 8, 16), "attention_mask": torch.ones(ROWS, 16, dtype=torch.long)}
    tokens = CALLS[call](model, [batch])
    tokens = {name: n for name, n in tokens.items() if "embed" not in name and "conv" not in name}
    assert tokens == {name: {ENCODED: 8 * ROWS}.get(wanted(name, DECODED), DECODED) for name in tokens}


def changed(batch):
    """The batch with other ids where the masks are 0."""
    keys = (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask"))
    return {**batch, **{ids: torch.where(batch[mask] == 0, 34 - batch[ids], batch[ids]) for ids, mask in keys}}


PADDED = {
    "prune": lambda m, b: prune(m, "2:4", batches=b)[0],
    "recovered": lambda m, b: prune(m, "2:4", batches=b, compensate=None, recover=2)[0],
    "recover": lambda m, b: _recovered(m, b),
    "outputs": lambda m, b: _recovered(m, b, outputs="mse", forward=lambda model, x: logits(model(**x))),
    "shrink": lambda m, b: shrink(m, b[0], 0.5, batches=b, score="obs", recover=2, exclude=["width"])[0],
}


def logits(output):
    return output if isinstance(output, torch.Tensor) else output.logits


def _recovered(model, batches, **options):
    pruned = prune(model, "2:4")[0]
    recover(pruned, model, batches, passes=2, **options)
    return pruned


@pytest.mark.parametrize(
    ("name", "call"),
    [
        *(("T5", "prune"), ("of torch", "recovered"), ("Bart", "recover")),
        *(("of torch", "outputs"), ("plain", "shrink")),
    ],
)
def test_what_padding_holds_changes_nothing(name, call):
    model, batches = model_of(name), [batch_of(seed=k) for k in range(3)]
    first, second = (PADDED[call](copy.deepcopy(model), b) for b in (batches, [*map(changed, batches)]))
    for (key, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=key)


def test_a_batch_of_any_class_of_mappings_may_have_labels_that_are_its_inputs():
    class Batch(dict):
        def __init__(self, ids):
            super().__init__(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)

    model, batch = hf_models.make("Llama")[0], Batch(torch.randint(3, 50, (3, 9)))
    pruned, _ = prune(model, 0.5, batches=[batch])
    same, _ = prune(model, 0.5, batches=[dict(batch)])
    assert batch["labels"] is batch["input_ids"]
    assert all(torch.equal(a, b) for a, b in zip(pruned.parameters(), same.parameters(), strict=True))
