"""shrink_vocabulary: what a model computes from kept tokens stays the same, and texts of them are encoded as before."""

import copy
import json
from pathlib import Path

import hf_models
import pytest
import torch
import transformers
from discovered import fill
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn

from sparsekit_ao import SparsityError, export, shrink_vocabulary

KEEP = [7, 3, 4, 33, 49, 20]
PAGES = sorted((Path(__file__).parent.parent.parent / "docs").glob("*.md"))
TRAINERS = {"BPE": trainers.BpeTrainer, "WordPiece": trainers.WordPieceTrainer}
TRAINERS |= {"Unigram": trainers.UnigramTrainer, "WordLevel": trainers.WordLevelTrainer}
SPECIAL = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]


def made(name):
    if name in ("BertForMaskedLM", "RobertaForMaskedLM"):
        model_class = getattr(transformers, name)
        torch.manual_seed(0)
        return fill(model_class(model_class.config_class(**hf_models._COMMON)))
    return hf_models.make(name)[0]


@pytest.mark.parametrize(
    "name", ["Llama", "GPT-2", "T5", "BART", "OPT", "BERT", "DistilBERT", "BertForMaskedLM", "RobertaForMaskedLM"]
)
@torch.no_grad()
def test_outputs_for_kept_tokens_stay_the_same_and_from_pretrained_loads_them(name, tmp_path):
    model = made(name).double().eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    small, tokenizer, report = shrink_vocabulary(model, torch.tensor(KEEP))
    new = report.new_ids
    assert tokenizer is None and {*KEEP} <= new.keys() and list(new.values()) == list(range(len(new))) and len(new) < 12
    assert small.config.vocab_size == len(new) == small.get_input_embeddings().num_embeddings
    tokens = {"input_ids": [KEEP, KEEP[::-1]]}
    tokens |= {"decoder_input_ids": [KEEP[:3]] * 2} if model.config.is_encoder_decoder else {}
    want = model(**{key: torch.tensor(ids) for key, ids in tokens.items()}, output_hidden_states=True)
    small.save_pretrained(tmp_path)
    for smaller in (small, type(model).from_pretrained(tmp_path).eval()):
        ids = {key: torch.tensor([[new[token] for token in row] for row in rows]) for key, rows in tokens.items()}
        got = smaller(**ids, output_hidden_states=True)
        states = "decoder_hidden_states" if model.config.is_encoder_decoder else "hidden_states"
        torch.testing.assert_close(got[states], want[states], rtol=1e-13, atol=1e-13)
        assert smaller is not small or all(map(torch.equal, got[states], want[states]))
        if model.get_output_embeddings() is not None:  # a product may be rounded otherwise if it has fewer columns
            torch.testing.assert_close(got.logits, want.logits[..., list(new)], rtol=1e-13, atol=1e-13)
            for key in ("weight", "bias"):
                old_rows, rows = (getattr(one.get_output_embeddings(), key) for one in (model, smaller))
                assert rows is old_rows is None or torch.equal(rows, old_rows[list(new)])
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for kind in ("config", "generation_config"):
        config, other = (getattr(one, kind, None) for one in (model, small))
        for key in ("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id"):
            was = getattr(config, key, None)
            assert getattr(other, key, None) == (new[was] if was is not None and was < 50 else was)


_D, _C, _S, _T5 = hf_models._DECODER, hf_models._COMMON, hf_models._SEQUENCES | {"pad_token_id": 5}, hf_models._T5
_SPEECH = {"input_feat_per_channel": 8, "conv_channels": 8, "max_source_positions": 64, "max_target_positions": 64}
_FSMT = {key: value for key, value in _S.items() if key != "vocab_size"} | {"src_vocab_size": 50, "tgt_vocab_size": 50}
_MOE = {"num_experts": 2, "encoder_sparse_step": 0, "decoder_sparse_step": 0}
EQUAL_SIZES = {  # the number of tokens equals another size, several times
    "hidden": ("LlamaForCausalLM", {**_D, "hidden_size": 56, "vocab_size": 56}),
    "units": ("LlamaForCausalLM", {**_D, "intermediate_size": 50}),
    "units of a tied model": ("LlamaForCausalLM", {**_D, "intermediate_size": 50, "tie_word_embeddings": True}),
    "keys": ("LlamaForCausalLM", {**_D, "head_dim": 50, "num_key_value_heads": 1}),
    "units of BERT": ("BertForMaskedLM", {**_C, "intermediate_size": 50}),
    "positions of BERT": ("BertForMaskedLM", {**_C, "max_position_embeddings": 50}),
    "positions of GPT-2": ("GPT2LMHeadModel", {**hf_models._GPT, "n_positions": 50}),
    "units of T5": ("T5ForConditionalGeneration", {**_T5, "num_layers": 1, "d_ff": 50, "decoder_start_token_id": 0}),
    "units of BART": ("BartForConditionalGeneration", {**_S, "encoder_ffn_dim": 50, "decoder_ffn_dim": 50}),
}
PADDED = {  # the id of padding is 5, and ids below it leave unless positions are counted from it
    "BART": ("BartForConditionalGeneration", _S),
    "Marian": ("MarianMTModel", {**_S, "decoder_vocab_size": 50}),
    "Pegasus": ("PegasusForConditionalGeneration", _S),
    "M2M100": ("M2M100ForConditionalGeneration", _S),
    "NLLB": ("NllbMoeForConditionalGeneration", {**_S, **_MOE}),
    "Speech2Text": ("Speech2TextForConditionalGeneration", {**_S, **_SPEECH}),
    "FSMT": ("FSMTForConditionalGeneration", {**_FSMT, "langs": ["de", "en"]}),
    "FSMT, tied": ("FSMTForConditionalGeneration", {**_FSMT, "langs": ["de", "en"], "tie_word_embeddings": True}),
    "RoBERTa": ("RobertaForMaskedLM", {**_C, "pad_token_id": 5}),
    "XLM-RoBERTa": ("XLMRobertaForMaskedLM", {**_C, "pad_token_id": 5}),
}
COUNTED = ("M2M100", "NLLB", "Speech2Text", "FSMT", "FSMT, tied", "RoBERTa", "XLM-RoBERTa")


@pytest.mark.parametrize("case", [*EQUAL_SIZES, *PADDED])
@torch.no_grad()
def test_the_vocabulary_is_found_by_its_layers_and_positions_stay_where_they_were(case, tmp_path):
    name, keys = (EQUAL_SIZES | PADDED)[case]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = fill(model_class(model_class.config_class(**keys))).double()
    model.save_pretrained(tmp_path / "dense")
    model = model_class.from_pretrained(tmp_path / "dense").eval()  # computes the positions of Marian again
    small, _, report = shrink_vocabulary(model, KEEP)
    new = report.new_ids
    assert {*KEEP} <= new.keys() and len(new) < 14 and (case not in PADDED or (new[5] == 5) >= (case in COUNTED))
    tokens, inputs = {"input_ids": [KEEP, [*KEEP[:4], 5, 5] if case in PADDED else KEEP[::-1]]}, {}
    if model.config.is_encoder_decoder:
        tokens["decoder_input_ids"] = [KEEP[:3], KEEP[3:]]
    if case == "Speech2Text":
        del tokens["input_ids"]
        inputs["input_features"] = torch.randn(2, 16, 8, dtype=torch.float64)
    want = model(**{key: torch.tensor(ids) for key, ids in tokens.items()}, **inputs).logits[..., list(new)]
    small.save_pretrained(tmp_path)
    for smaller in (small, model_class.from_pretrained(tmp_path).eval()):
        ids = {key: torch.tensor([[new[token] for token in row] for row in rows]) for key, rows in tokens.items()}
        torch.testing.assert_close(smaller(**ids, **inputs).logits, want, rtol=1e-12, atol=1e-12)
        assert smaller.get_input_embeddings().num_embeddings == len(new)


_EMBEDDED = {**_C, "embedding_size": 16}
FAMILIES = {
    "BERT": ("BertForMaskedLM", _C),
    "RoBERTa": ("RobertaForMaskedLM", _C),
    "ALBERT": ("AlbertForMaskedLM", _EMBEDDED),
    "ELECTRA": ("ElectraForMaskedLM", _EMBEDDED),
    "ELECTRA's discriminator": ("ElectraForPreTraining", _EMBEDDED),
    "DeBERTa": ("DebertaForMaskedLM", _C),
    "DeBERTa-v2": ("DebertaV2ForMaskedLM", _C),
    "T5": ("T5ForConditionalGeneration", {**_T5, "num_layers": 1, "decoder_start_token_id": 0}),
    "mBART": ("MBartForConditionalGeneration", _S),
    "M2M100": ("M2M100ForConditionalGeneration", _S),
    "Marian": ("MarianMTModel", {**_S, "decoder_vocab_size": 50}),
    "Whisper": ("WhisperForConditionalGeneration", hf_models._FAMILIES["Whisper"][1]),
    "Llama": ("LlamaForCausalLM", _D),
    "Llama, tied": ("LlamaForCausalLM", {**_D, "tie_word_embeddings": True}),
    "Gemma": ("GemmaForCausalLM", hf_models._HEADS_OF_8),
    "Gemma 3": ("Gemma3ForCausalLM", hf_models._HEADS_OF_8),
    "Qwen2": ("Qwen2ForCausalLM", _D),
    "Qwen3": ("Qwen3ForCausalLM", hf_models._HEADS_OF_8),
}


def ties(model):
    """The names of parameters that are one tensor with the first of them."""
    first = {}
    names = [(n, first.setdefault(id(p), n)) for n, p in model.named_parameters(remove_duplicate=False)]
    return {(name, other) for name, other in names if name != other}


@pytest.mark.parametrize("case", FAMILIES)
def test_kept_columns_are_those_of_the_dense_model_and_ties_stay_ties(case, tmp_path):
    name, keys = FAMILIES[case]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    fill(model_class(model_class.config_class(**keys))).save_pretrained(tmp_path / "dense")
    model = model_class.from_pretrained(tmp_path / "dense").eval()  # computes the positions of Marian again
    small, _, report = shrink_vocabulary(model, KEEP)
    new, ids = report.new_ids, torch.tensor([[*KEEP, *KEEP[:3]]])
    assert {*KEEP} <= new.keys() and (report.difference <= 1e-5 or report.in_float64 <= 1e-5)
    assert report.before.parameters - report.after.parameters >= 8 * (50 - len(new)) > 0
    inputs = {"input_ids": ids}
    inputs |= {"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}
    features = {"input_features": torch.randn(1, 8, 16)} if case == "Whisper" else {}
    inputs = {"decoder_input_ids": ids} if features else inputs
    renumbered = {key: torch.tensor([[new[at] for at in value[0].tolist()]]) for key, value in inputs.items()}
    export.save_pretrained(small, report, tmp_path / "saved")
    again = model_class.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        want = model.double()(**inputs, **{k: v.double() for k, v in features.items()}, output_hidden_states=True)
        for smaller in (small, again):
            smaller = copy.deepcopy(smaller).double()
            got = smaller(**renumbered, **{k: v.double() for k, v in features.items()}, output_hidden_states=True)
            columns = want.logits if case == "ELECTRA's discriminator" else want.logits[..., list(new)]
            torch.testing.assert_close(got.logits, columns, rtol=1e-9, atol=1e-9)
            for states in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
                torch.testing.assert_close(
                    getattr(got, states, None), getattr(want, states, None), rtol=1e-9, atol=1e-9
                )
    assert "shrink_vocabulary(..., keep=...)" in (tmp_path / "saved/README.md").read_text()
    assert ties(model) == ties(small) == ties(again)
    optimizer = torch.optim.Adam(again.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        again(**renumbered, **features).logits.square().mean().backward()
        optimizer.step()
    assert ties(model) == ties(again)
    tables = [
        layer.weight for layer in (again.get_input_embeddings(), again.get_output_embeddings()) if layer is not None
    ]
    assert all(len(table) == len(new) for table in tables)
    dense = [
        layer.weight for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer is not None
    ]
    assert (tables[0] is tables[-1]) == (dense[0] is dense[-1])


class OddTokens(transformers.LlamaForCausalLM):
    """A model that computes with the number of a token itself."""

    def forward(self, input_ids=None, **keys):
        output = super().forward(input_ids=input_ids, **keys)
        output.logits = output.logits + (input_ids % 2)[..., None]
        return output


def test_a_model_that_computes_otherwise_from_new_ids_is_refused():
    torch.manual_seed(0)
    model = fill(OddTokens(transformers.LlamaConfig(**_D))).eval()
    with pytest.raises(SparsityError, match="shrink_vocabulary: the smaller model gives other outputs: a relative"):
        shrink_vocabulary(model, KEEP)
    assert shrink_vocabulary(model, range(50))[2].difference == 0


def test_a_dry_run_changes_nothing_and_its_report_is_no_result(tmp_path):
    tokenizer = trained("WordLevel")
    model = decoder_of(tokenizer)
    same, own, report = shrink_vocabulary(model, ["some text"], tokenizer, dry_run=True)
    assert same is model and own is tokenizer and len(model.get_input_embeddings().weight) == report.couplings[0].of
    small = shrink_vocabulary(model, ["some text"], tokenizer)[0]
    assert report.after.parameters == sum(p.numel() for p in small.parameters()) < report.before.parameters
    assert str(report).startswith("dry run: nothing was removed") and "vocabulary" in str(report)
    with pytest.raises(SparsityError, match="such as a dry run"):
        export.save_pretrained(small, report, tmp_path)
    with pytest.raises(SparsityError, match="there is no manifest"):
        report.save(tmp_path / "manifest.json")


def test_a_model_that_needs_more_than_tokens_is_compared_on_given_inputs():
    model, inputs = hf_models.make("CLIP")
    model.get_input_embeddings = model.text_model.get_input_embeddings
    with pytest.raises(
        SparsityError, match=r"does not run on example_inputs.*if it needs more than tokens, give exampl"
    ):
        shrink_vocabulary(model, KEEP)
    given = {**inputs, "input_ids": torch.tensor([KEEP, KEEP[::-1]]), "attention_mask": torch.ones(2, 6)}
    small, _, report = shrink_vocabulary(model, KEEP, example_inputs=given)
    assert report.difference <= 1e-5 and small.config.text_config.vocab_size == len(report.new_ids)
    with pytest.raises(SparsityError, match="example_inputs have tokens that are not kept"):
        shrink_vocabulary(model, KEEP, example_inputs={**given, "input_ids": torch.tensor([[8, 7]])})


def trained(kind):
    """A tokenizer that was trained on the pages of the documentation."""
    model, special = getattr(models, kind), {"special_tokens": SPECIAL}
    tokenizer = Tokenizer(model() if kind in ("BPE", "Unigram") else model(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind == "BPE":
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        special["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    if kind == "Unigram":
        special["unk_token"] = "[UNK]"
    trainer = TRAINERS[kind](vocab_size=1500, show_progress=False, **special)
    tokenizer.train([str(path) for path in PAGES], trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = dict(zip(("unk_token", "cls_token", "sep_token", "pad_token"), SPECIAL, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def decoder_of(tokenizer):
    keys = hf_models._DECODER | {"vocab_size": len(tokenizer) + 100}
    return fill(transformers.LlamaForCausalLM(transformers.LlamaConfig(**keys, tie_word_embeddings=True)))


@pytest.mark.parametrize("kind", ["BPE", "WordPiece", "Unigram", "WordLevel"])
def test_texts_of_kept_tokens_are_encoded_as_before(kind, tmp_path):
    tokenizer = trained(kind)
    lines = [line for path in PAGES for line in path.read_text().splitlines() if len(line) > 20 and "[UNK]" not in line]
    used, others = lines[::8], lines[1::2]
    settings = tokenizer.backend_tokenizer.to_str()
    small, smaller, report = shrink_vocabulary(decoder_of(tokenizer), used, tokenizer)
    new = report.new_ids
    assert tokenizer.backend_tokenizer.to_str() == settings and len(smaller) == len(new) < len(tokenizer)
    small.save_pretrained(tmp_path)
    smaller.save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == len(again) == len(new)
    compared = 0
    for line in (*used, *others):
        ids = tokenizer(line)["input_ids"]
        if {*ids} <= new.keys() and (line in used or tokenizer.unk_token_id not in ids):
            compared += line not in used
            assert smaller(line)["input_ids"] == again(line)["input_ids"] == [new[token] for token in ids]
        if kind == "BPE":  # any text can still be encoded
            assert smaller.decode(smaller(line)["input_ids"], skip_special_tokens=True) == " " * (line[0] != " ") + line
    assert compared > 50 and smaller.pad_token_id == new[tokenizer.pad_token_id]
    merges = json.loads(smaller.backend_tokenizer.to_str())["model"].get("merges", ())
    assert kind != "BPE" or len(merges) == len(new) - 256 - len(SPECIAL)  # one for each token of several bytes


def test_a_tokenizer_that_cannot_be_cut_exactly_is_left_out_with_a_warning():
    tokenizer = trained("BPE")
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    data["model"]["end_of_word_suffix"] = "</w>"
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(data))
    with pytest.warns(UserWarning, match="its BPE marks words by '</w>'"):
        small, none, report = shrink_vocabulary(decoder_of(tokenizer), ["some text"], tokenizer)
    assert none is None and small.config.vocab_size == len(report.new_ids) < 30


WORDS = ["▁one", "▁two", "▁three", "▁four", "▁cat", "▁dog", *"▁onetwhrfucadg"]


@pytest.mark.parametrize("name", ["MBartTokenizer", "MBart50Tokenizer"])
def test_languages_keep_their_tokens(name):
    pieces = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
    pieces += [(word, -1.0 - at) for at, word in enumerate(dict.fromkeys(WORDS))]
    tokenizer = getattr(transformers, name)(vocab=pieces, src_lang="en_XX", tgt_lang="de_DE")
    code = "de_DE"
    rows = max(tokenizer.get_vocab().values()) + 1
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": rows}
    torch.manual_seed(0)
    model = transformers.MBartForConditionalGeneration(transformers.MBartConfig(**sizes))
    small, cut, report = shrink_vocabulary(model, ["one two", "cat dog"], tokenizer)
    new = report.new_ids
    assert small.config.vocab_size < rows and cut.lang_code_to_id[code] == cut.convert_tokens_to_ids(code)
    assert cut.lang_code_to_id[code] == new[tokenizer.lang_code_to_id[code]] != tokenizer.lang_code_to_id[code]
    for key in ("prefix_tokens", "suffix_tokens"):
        assert getattr(cut, key) == [new[token] for token in getattr(tokenizer, key)]
    assert cut("cat")["input_ids"] == [new[token] for token in tokenizer("cat")["input_ids"]]


@pytest.mark.parametrize("name", ["XLM", "Flaubert"])
def test_the_loss_of_a_smaller_model_counts_its_tokens(name):
    config = getattr(transformers, f"{name}Config")(vocab_size=64, emb_dim=32, n_layers=1, n_heads=2)
    small, _, report = shrink_vocabulary(getattr(transformers, f"{name}WithLMHeadModel")(config), [5, 9, 11, 20])
    ids = torch.tensor([[report.new_ids[5], report.new_ids[9]]])
    assert small(input_ids=ids, labels=ids).loss.isfinite() and small.pred_layer.n_words == len(report.new_ids)


def test_unknown_characters_cost_as_much_as_before():
    pieces = [("<unk>", 0.0), ("ab", -20.0), ("b", -15.0), ("c", -15.0), ("bc", -1.0), ("zzz", -100.0)]
    words = Tokenizer(models.Unigram(pieces, unk_id=0))  # the lowest score says what they cost
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<unk>")
    _, cut, _ = shrink_vocabulary(decoder_of(tokenizer), ["ab", "c", "bc"], tokenizer)
    assert tokenizer.tokenize("abc") == cut.tokenize("abc") == ["ab", "c"]
    words = Tokenizer(models.Unigram([("a", -5.0), *pieces[1:]]))  # no token is for unknown characters
    plain = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    _, cut, _ = shrink_vocabulary(decoder_of(plain), ["ab", "c", "bc"], plain)
    assert plain.tokenize("abc") == cut.tokenize("abc") == ["a", "bc"]


def test_a_model_that_is_none_of_transformers_gets_no_advice_for_one():
    with pytest.raises(SparsityError, match="needs a model of transformers .* got Sequential$"):
        shrink_vocabulary(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)), [1, 2])


def test_the_advice_for_missing_rows_and_embeddings_helps():
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "c": 9}, unk_token="[UNK]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[UNK]")
    config = transformers.LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = transformers.LlamaForCausalLM(config)
    with pytest.raises(SparsityError, match=r"the id 9, but .* 8 rows; call model.resize_token_embeddings\(10\)"):
        shrink_vocabulary(model, ["a"], tokenizer)
    model.resize_token_embeddings(10)
    assert shrink_vocabulary(model, ["a"], tokenizer)[0].config.vocab_size < 10
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    text |= {"vocab_size": 50, "max_position_embeddings": 20, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.OwlViTConfig(text_config=text, vision_config={**text, "image_size": 16, "patch_size": 4})

    class OwlViTModel(transformers.OwlViTModel):  # a class of this test alone, which the advice changes
        pass

    model, ids = OwlViTModel(config).eval(), torch.tensor([KEEP])
    inputs = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16)}
    with pytest.raises(SparsityError, match="if text_model.embeddings.token_embedding is this embedding, set") as error:
        shrink_vocabulary(model, KEEP, example_inputs=inputs)
    exec(str(error.value).partition(", set ")[2])  # what the advice says
    assert shrink_vocabulary(model, KEEP, example_inputs=inputs)[2].couplings[0].of == 50


def test_what_is_refused():
    model = hf_models.make("Llama")[0]
    for keep in ([], [50], [-1], [True], [1.0]):
        with pytest.raises(SparsityError, match="keep must be ids from 0 to 49, or with a tokenizer texts"):
            shrink_vocabulary(model, keep)
    for keep in ("text", ["text"], [1, "text"]):
        with pytest.raises(SparsityError, match="keep has texts, which need the tokenizer of the model"):
            shrink_vocabulary(model, keep)
    for keep in (5, None, torch.tensor(5)):
        with pytest.raises(
            SparsityError, match=r"keep must be ids from 0 to 49, or .* texts, got (tensor\(5\)|5|None)$"
        ):
            shrink_vocabulary(model, keep)
    with pytest.raises(SparsityError, match="tokenizer must be a tokenizer of transformers, got int"):
        shrink_vocabulary(model, ["text"], 5)
    for inputs in (torch.tensor([[1]]), {"input_ids": [[1]]}):
        with pytest.raises(SparsityError, match="example_inputs must be a dict of keyword arguments with tensors"):
            shrink_vocabulary(model, [1], example_inputs=inputs)
    others = [hf_models.make(name)[0] for name in ("CLIP", "Wav2Vec2", "ViT")]
    for other in (torch.nn.Linear(2, 2), *others):
        with pytest.raises(SparsityError, match=f"the embedding of tokens, got {type(other).__name__}"):
            shrink_vocabulary(other, [0])
    model.register_buffer("frequencies", torch.ones(50))
    with pytest.raises(SparsityError, match="frequencies also has a dimension of 50"):
        shrink_vocabulary(model, [0])
    # A word that was unknown as a whole becomes known if a longer piece of it leaves the vocabulary.
    pieces = {"[UNK]": 0, "a": 1, "##bz": 2, "c": 3, "ab": 4}
    words = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    assert tokenizer("abz")["input_ids"] == [0]
    with pytest.raises(
        SparsityError, match=r"the texts have no tokens, got \['', ' '\]; give texts that are not empty"
    ):
        shrink_vocabulary(decoder_of(tokenizer), ["", " "], tokenizer)
    with pytest.raises(SparsityError, match="encodes this text otherwise: 'abz'"):
        shrink_vocabulary(decoder_of(tokenizer), ["a cbz", "abz"], tokenizer)


def test_weights_that_could_not_be_trained_are_refused():
    model = made("Llama")
    with torch.inference_mode():
        with pytest.raises(
            SparsityError, match="weights made in inference mode cannot be trained; call it outside, or"
        ):
            shrink_vocabulary(model, KEEP)
        model.lm_head = torch.nn.Linear(32, 50, bias=False)
    with pytest.raises(SparsityError, match=r"lm_head\.weight was made in inference mode, and such weights cannot"):
        shrink_vocabulary(model, KEEP)


def test_models_whose_ids_cannot_follow_are_refused():
    model = made("Llama")
    model.generation_config.bad_words_ids = [[7]]
    with pytest.raises(SparsityError, match="ids in bad_words_ids, which cannot follow; set it to None"):
        shrink_vocabulary(model, KEEP)
    model.generation_config.bad_words_ids = None
    model.config.vocab_size_per_layer_input = 30
    with pytest.raises(SparsityError, match="50 rows, but vocab_size_per_layer_input is 30: these are other tokens"):
        shrink_vocabulary(model, KEEP)
    del model.config.vocab_size_per_layer_input
    model.lm_head = torch.nn.Linear(16, 60)
    with pytest.raises(SparsityError, match="has 50 rows, but the output layer is 60"):
        shrink_vocabulary(model, KEEP)


def test_ids_that_modules_hold_follow_as_those_of_the_config():
    keys = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.CLIPTextConfig(**keys, vocab_size=1000, bos_token_id=998, eos_token_id=999, pad_token_id=999)
    model = fill(transformers.CLIPTextModelWithProjection(config)).eval()
    small, _, report = shrink_vocabulary(model, [*range(0, 1000, 3), 998])
    ids = torch.tensor([[998, 3, 6, 9, 999, 999], [998, 30, 600, 999, 999, 999]])
    new = torch.tensor([[report.new_ids[token] for token in row] for row in ids.tolist()])
    torch.testing.assert_close(small(new).text_embeds, model(ids).text_embeds)
    model.text_model.mask_token_id = 500  # a token that the config does not name
    small, _, report = shrink_vocabulary(model, [3, 6, 998])
    assert small.text_model.mask_token_id == report.new_ids[500] and model.text_model.mask_token_id == 500
    model.text_model.special_token_ids, model.text_model.stop_token_ids = {"image": 40}, (500, 3)
    model.text_model.n_token_ids, model.text_model.other_token_ids = 3, [500, None]
    small, _, report = shrink_vocabulary(model, [3, 6, 998])
    assert small.text_model.special_token_ids == {"image": 40} and small.text_model.n_token_ids == 3
    assert small.text_model.other_token_ids == [report.new_ids[500], None]
    assert small.text_model.stop_token_ids == (report.new_ids[500], report.new_ids[3])


@pytest.mark.parametrize("kind", ["CLIPText", "XCLIPText", "CLIPSegText", "GroupViTText"])
def test_an_end_token_of_2_that_stands_for_the_largest_id_stays(kind, tmp_path):
    keys = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    keys |= {"vocab_size": 100, "bos_token_id": 98, "eos_token_id": 2 if kind != "XCLIPText" else 99, "pad_token_id": 1}
    make = getattr(transformers, f"{kind}Model")
    model = fill(make(getattr(transformers, f"{kind}Config")(**keys))).eval()
    small, _, report = shrink_vocabulary(model, [5, 7, 11, 99])
    ids = torch.tensor([[98, 5, 99, 7, 11], [98, 7, 7, 11, 99]])
    new = torch.tensor([[report.new_ids[token] for token in row] for row in ids.tolist()])
    small.save_pretrained(tmp_path)
    for one in (small, make.from_pretrained(tmp_path)):
        torch.testing.assert_close(one(new).pooler_output, model(ids).pooler_output)


def test_the_token_of_padding_stays_though_no_config_names_it():
    model = fill(transformers.BertModel(transformers.BertConfig(**BERT, pad_token_id=7)))
    model.config.pad_token_id = 1
    small, _, report = shrink_vocabulary(model, [*range(10, 40)])
    assert small.embeddings.word_embeddings.padding_idx == report.new_ids[7]


BERT = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
