"""`shrink_vocabulary` removes tokens from the embedding, the output layer, the config and the tokenizer of a model."""

import contextlib
import copy
import itertools
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SparsityError, checked_model, warn
from ..models.running import seeded, tensors_in
from ..removal.compaction import check_comparable, compare_models
from ..removal.removal_report import KeptUnits, ShrinkReport, size_of
from ..removal.sizes import has_config, read_again
from ..removal.verify import Reference

WHERE = "shrink_vocabulary: "
# Names of ids, in configs and modules.
_IDS = re.compile(r"(?!(n|num|max)_).*(token_ids?|token_index|suppress_tokens)|(bos|eos|pad|unk|mask)_index")
# In these text models eos_token_id=2 is a flag and no token: the hidden state of the largest id is taken.
_WITH_LARGEST = ("clip_text_model", "clipseg_text_model", "groupvit_text_model", "xclip_text_model")
_SIZES = re.compile(r"(?!.*type_vocab).*vocab_size.*|n_words")  # the entries that hold the number of tokens
# Entries of generation configs that hold ids in other forms.
_OTHER_IDS = ("bad_words_ids", "force_words_ids", "forced_decoder_ids", "sequence_bias", "lang_to_id", "task_to_id")
_OF_LANGUAGE = re.compile(r"cur_lang_code\w*|(prefix|suffix)_tokens")  # attributes of tokenizers that hold ids
_LENGTH = 12  # tokens of the text on which outputs are compared
_SINGLE = re.compile(r"(##)?.|<0x[0-9A-F]{2}>", re.DOTALL)  # a character, one inside of a word, or a byte


@torch.no_grad()
def shrink_vocabulary(
    model: nn.Module,
    keep: Iterable[int] | Iterable[str],
    tokenizer: Any = None,
    *,
    example_inputs: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> tuple[nn.Module, Any, ShrinkReport]:
    """Remove the tokens that texts do not use from a transformers model.

    The rows of the removed tokens leave the input embedding and the output layer, tied or not, and the configs follow.
    Special tokens, and those that configs name, always stay. So do all ids below that of padding where the model
    counts positions from it, as RoBERTa and M2M100 do. What the model computes from other tokens stays the same: as
    `shrink` does, it compares hidden states, and the logits of the kept tokens, with those of the dense model.

    The vocabulary of a fast tokenizer (WordPiece, WordLevel, Unigram or BPE) follows. BPE keeps the merges that make
    kept tokens, and the tokens in between. Single characters and bytes stay too, so that other texts can be encoded.
    Texts of kept tokens are encoded as before, which is verified on the given ones.

    Args:
        model: A model with `get_input_embeddings`, which is not changed.
        keep: Ids of tokens to keep, or texts whose tokens are kept.
        tokenizer: The model's tokenizer, which is not changed. Texts need it.
        example_inputs: Keyword arguments of the forward, with kept tokens and without labels, on which outputs are
            compared; only for models that need more than tokens, such as images.
        dry_run: If True, return the model and the tokenizer as they are, and the report.

    Returns:
        The smaller model; the smaller tokenizer, or None; and a `ShrinkReport` with `new_ids`, {old id: new id} of the
        kept tokens. A warning says why there is no tokenizer if one was given.

    Raises:
        SparsityError: An argument does not fit, a tensor that is no parameter has a row for each token, the model has
            two vocabularies, its generation config has ids that cannot follow, or a text is encoded, or a token
            computed, otherwise.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> small, _, report = shrink_vocabulary(LlamaForCausalLM(LlamaConfig(**sizes)), [5, 7, 31999])
    >>> small.config.vocab_size, report.new_ids  # the config names the tokens 1 and 2
    (5, {1: 0, 2: 1, 5: 2, 7: 3, 31999: 4})
    """
    start, dense_tokenizer = time.perf_counter(), tokenizer
    _check_arguments(model, tokenizer, example_inputs)
    small: Any = copy.deepcopy(model)
    tokenizer, count = copy.deepcopy(tokenizer), len(small.get_input_embeddings().weight)  # calls change its settings
    asked, encoded = _read(keep, tokenizer, count)
    owners: list[Any] = [getattr(module, "config", None) for module in small.modules()]
    owners += [config.get_text_config() for config in owners if hasattr(config, "get_text_config")]
    owners.append(getattr(small, "generation_config", None))
    owners = [*{id(one): one for one in owners if one is not None}.values()]
    configs = [vars(config) for config in owners]
    # Modules may hold ids that their config had when they were made.
    with_ids = [*owners, *small.modules()]
    kept = {*asked, *(at for owner in with_ids for ids in _ids_in(owner).values() for at in ids if type(at) is int)}
    kept |= {getattr(layer, "padding_idx", None) for layer in _tables_of(small)} - {None}
    if found := [name for name in _OTHER_IDS for config in configs if config.get(name)]:
        raise SparsityError(f"{WHERE}the generation config has ids in {found[0]}, which cannot follow; set it to None")
    sizes = {(name, size) for config in configs for name, size in config.items() if _SIZES.fullmatch(name) and size}
    sizes |= {("the output layer", len(layer.weight)) for layer in [small.get_output_embeddings()] if layer is not None}
    if others := [f"{name} is {size}" for name, size in sorted(sizes) if size != count]:
        raise SparsityError(f"{WHERE}the input embedding has {count} rows, but {others[0]}: these are other tokens")
    data, reason = None, ""
    if tokenizer is not None:
        if (last := max(tokenizer.get_vocab().values())) >= count:
            raise SparsityError(
                f"{WHERE}the tokenizer has a token with the id {last}, but the input embedding has {count} rows; call "
                f"model.resize_token_embeddings({last + 1}) first"
            )
        kept |= {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder, *tokenizer("")["input_ids"]}
        data, reason = _data_of(tokenizer)
        kept |= set() if data is None else _needed(data["model"], kept)
    kept |= {*range(max(_first_positions(small), default=0))}
    new = {token: at for at, token in enumerate(sorted(token for token in kept if 0 <= token < count))}
    if data is not None:
        _renumber_tables(tokenizer, new)
        tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(_renumbered(data, new)))
    for text, ids in encoded.items() if data is not None else ():
        if tokenizer(text, truncation=False, padding=False)["input_ids"] != [new[token] for token in ids]:
            raise SparsityError(f"{WHERE}the smaller tokenizer encodes this text otherwise: {text[:80]!r}")
    for owner in with_ids:
        for name, ids in _ids_in(owner).items():
            value, followed = vars(owner)[name], [new.get(at, at) if type(at) is int else at for at in ids]
            vars(owner)[name] = type(value)(followed) if isinstance(value, (list, tuple)) else followed[0]
    _cut_model(small, configs, count, new)
    report = _verified(model, small, new, asked, example_inputs)
    if reason:
        warn(f"{WHERE}the tokenizer cannot be made smaller exactly, since {reason}")
    if dry_run:
        seconds, memory = time.perf_counter() - start, report.before.bytes + report.after.bytes
        return model, dense_tokenizer, replace(report, seconds=seconds, memory=memory)
    return small, None if data is None else tokenizer, report


def _read(keep: Any, tokenizer: Any, count: int) -> tuple[list[Any], dict[str, list[int]]]:
    """Return the ids of the tokens that `keep` names, and {text: its ids}, which is empty if it has ids."""
    given: Any = [keep] if isinstance(keep, str) else keep.tolist() if isinstance(keep, Tensor) else keep
    items = [*given] if hasattr(given, "__iter__") or hasattr(given, "__getitem__") else []
    texts = items if tokenizer is not None and all(isinstance(item, str) for item in items) else []
    if tokenizer is None and any(isinstance(item, str) for item in items):
        raise SparsityError(f"{WHERE}keep has texts, which need the tokenizer of the model; pass it too")
    if not items or not (texts or all(type(item) is int and 0 <= item < count for item in items)):
        raise SparsityError(
            f"{WHERE}keep must be ids from 0 to {count - 1}, or with a tokenizer texts, got {items[:3] or keep!r}"
        )
    encoded = {text: tokenizer(text, truncation=False, padding=False)["input_ids"] for text in texts}
    asked: list[Any] = [*itertools.chain(*encoded.values())] if texts else items
    if not asked:
        raise SparsityError(f"{WHERE}the texts have no tokens, got {texts[:3]}; give texts that are not empty")
    return asked, encoded


def _check_arguments(model: nn.Module, tokenizer: object, example_inputs: object) -> None:
    """Raise an error unless a model has an embedding of tokens, and its values and the other arguments fit."""
    check_comparable(WHERE, checked_model(model, "shrink_vocabulary"))
    table = None
    with contextlib.suppress(AttributeError, NotImplementedError):  # no model of transformers, or one without tokens
        table = model.get_input_embeddings().weight  # type: ignore[operator]
    if not isinstance(table, Tensor) or table.ndim != 2:
        sizes = {name: len(m.weight) for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
        largest = max(sizes, key=sizes.__getitem__, default="") if has_config(model) else ""
        advice = f"; if {largest} is this embedding, set {type(model).__name__}.get_input_embeddings = lambda model: "
        raise SparsityError(
            f"{WHERE}needs a model of transformers whose get_input_embeddings returns the embedding of tokens, got "
            f"{type(model).__name__}" + (f"{advice}model.get_submodule({largest!r})" if largest else "")
        )
    if torch.is_inference_mode_enabled():
        raise SparsityError(f"{WHERE}weights made in inference mode cannot be trained; call it outside, or use no_grad")
    if name := next((name for name, p in model.named_parameters() if p.is_inference()), ""):
        raise SparsityError(
            f"{WHERE}{name} was made in inference mode, and such weights cannot be trained; load the model outside of "
            "torch.inference_mode()"
        )
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "get_vocab")):
        raise SparsityError(f"{WHERE}tokenizer must be a tokenizer of transformers, got {type(tokenizer).__name__}")
    inputs = {} if example_inputs is None else example_inputs
    if not isinstance(inputs, Mapping) or any(
        name.endswith("input_ids") and not isinstance(value, Tensor) for name, value in inputs.items()
    ):
        raise SparsityError(
            f"{WHERE}example_inputs must be a dict of keyword arguments with tensors of ids, such as "
            f'{{"input_ids": ids}}, got {example_inputs!r:.80}'
        )


class _Kept(nn.Module):
    """A model that gives the logits of some tokens, `columns`, alone; `ids` are its own ids of all tokens it reads."""

    ids: Tensor
    columns: Tensor

    def __init__(self, model: nn.Module, **tables: Iterable[int]) -> None:
        super().__init__()
        self.model, device = model, next(model.parameters()).device
        for name, table in tables.items():
            self.register_buffer(name, torch.tensor([*table], device=device))

    def forward(self, **inputs: Any) -> dict[str, Tensor]:
        """Run the model, and return the tensors in its output."""
        inputs |= {name: self.ids[tokens] for name, tokens in inputs.items() if name.endswith("input_ids")}
        found = dict(tensors_in("", self.model(**inputs, output_hidden_states=True)))
        layer = self.model.get_output_embeddings()  # type: ignore[operator]
        shape = () if layer is None else layer.weight.shape[:1]
        names = [name for name, tensor in found.items() if "logits" in name and tensor.shape[-1:] == shape]
        return found | {name: found[name][..., self.columns] for name in names}


def _verified(model: Any, small: nn.Module, new: Mapping[int, int], asked: Sequence[int], given: Any) -> ShrinkReport:
    """Return the report of a smaller model if it computes the same from some of the tokens that were asked for."""
    generator, weight = torch.Generator().manual_seed(0), model.get_input_embeddings().weight
    order = torch.randperm(len(asked), generator=generator).repeat(_LENGTH)[:_LENGTH]
    ids = torch.tensor([asked])[:, order].to(weight.device)
    ends = getattr(model.config, "eos_token_id", None)  # where a model may take the embedding of a text
    ends = [end for end in (ends if isinstance(ends, list) else [ends]) if end in new]
    ids[0, _LENGTH - len(ends) :] = torch.tensor(ends, dtype=ids.dtype)
    inputs: dict[str, Any] = {"input_ids": ids}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids.flip(1)
        if model.main_input_name != "input_ids":  # then no token is read by the encoder
            states = torch.randn(1, _LENGTH, model.get_encoder().config.hidden_size, generator=generator)
            inputs = {"decoder_input_ids": ids, "encoder_outputs": (states.to(weight),)}
    inputs = inputs if given is None else {**given}
    if any(not {*ids.flatten().tolist()} <= new.keys() for name, ids in inputs.items() if name.endswith("input_ids")):
        raise SparsityError(f"{WHERE}example_inputs have tokens that are not kept; give kept ones")
    try:
        reference = Reference(_Kept(model, ids=range(len(weight)), columns=new), inputs)
    except SparsityError as error:
        raise SparsityError(f"{WHERE}{error}; if it needs more than tokens, give example_inputs") from error
    new_ids = (new.get(token, 0) for token in range(len(weight)))
    comparison = compare_models(reference, _Kept(small, ids=new_ids, columns=range(len(new))))
    if comparison.problem:
        reference.check_repeats()
        raise SparsityError(f"{WHERE}the smaller model {comparison.problem}")
    return ShrinkReport(
        couplings=(KeptUnits(name="vocabulary", kind="tokens", kept=len(new), of=len(weight)),),
        before=size_of(model, reference.flops),
        after=size_of(small, comparison.flops),
        difference=comparison.difference,
        in_float64=comparison.in_float64,
        uncounted=reference.uncounted,
        not_in_config="",
        call="shrink_vocabulary(..., keep=...)",
        new_ids=new,
        manifest={},
    )


def _ids_in(owner: Any) -> dict[str, list[Any]]:
    """Return the attributes of a config or module that hold ids, such as `eos_token_id`, each as a list."""
    entries, found = vars(owner), dict[str, list[Any]]()
    kind = getattr(getattr(owner, "config", owner), "model_type", "")
    for name in filter(_IDS.fullmatch, entries):
        ids = [*entries[name]] if isinstance(entries[name], (list, tuple)) else [entries[name]]
        is_flag = kind in _WITH_LARGEST and name == "eos_token_id" and ids == [2]
        if any(type(at) is int for at in ids) and not is_flag:
            found[name] = ids
    return found


def _tables_of(small: Any) -> list[Any]:
    """Return the input embedding and, if there is one, the output layer."""
    return [layer for layer in (small.get_input_embeddings(), small.get_output_embeddings()) if layer is not None]


def _first_positions(small: Any) -> Iterator[int]:
    """Yield the ids of padding after which tables of positions begin, as those of RoBERTa and M2M100 do."""
    tokens = {id(p) for layer in _tables_of(small) for p in layer.parameters()}
    for module in small.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if tokens.isdisjoint(map(id, tensors)) and any(t.ndim == 2 and t.is_floating_point() for t in tensors):
            yield getattr(module, "padding_idx", None) or 0


def _cut_model(small: Any, configs: Sequence[dict[str, Any]], count: int, new: Mapping[int, int]) -> None:
    """Cut the tensors with a row for each token, wherever they are, and the numbers in their modules and in configs."""
    if getattr(getattr(small.config, "quantization_config", None), "quant_method", None) == "gguf":
        # The weights are floats, but transformers would refuse to save them as such.
        vars(small).pop("hf_quantizer", None)
        vars(small.config).pop("quantization_config")
    for config in configs:
        config.update({name: len(new) for name, size in config.items() if _SIZES.fullmatch(name) and size})
    old, shapes = list(new), dict[str, torch.Size]()
    tables = {id(p): p for layer in _tables_of(small) for p in layer.parameters(recurse=False)}
    tensors = {name: t for name, t in (*small.named_parameters(), *small.named_buffers()) if id(t) not in tables}
    if others := [n for n, t in tensors.items() if count in t.shape and n != "final_logits_bias"]:  # [1, tokens], BART
        with contextlib.suppress(Exception), seeded([]), torch.device("meta"):  # its config says which count tokens
            fresh = type(small)(read_again(small.config))
            shapes = {name: tensor.shape for name, tensor in (*fresh.named_parameters(), *fresh.named_buffers())}
    for name in others:
        tensor, shape = tensors[name], shapes.get(name)
        if shape == (len(old), *tensor.shape[1:]) and isinstance(tensor, nn.Parameter):
            tables[id(tensor)] = tensor
        elif shape != tensor.shape:
            raise SparsityError(f"{WHERE}{name} also has a dimension of {count}, and it is not known how to cut it")
    cut = {key: nn.Parameter(p[old], p.requires_grad) for key, p in tables.items()}
    if isinstance(bias := getattr(small, "final_logits_bias", None), Tensor):
        small.final_logits_bias = bias[:, old]
    for module in small.modules():
        keys = [key for key, p in module._parameters.items() if id(p) in cut]
        if (padding := getattr(module, "padding_idx", None)) is not None:
            module.padding_idx = new.get(padding, padding)
        for key in keys:
            setattr(module, key, cut[id(module._parameters[key])])
        for size in ("num_embeddings", "out_features") if keys else [*filter(_SIZES.fullmatch, vars(module))]:
            if getattr(module, size, None) == count:
                setattr(module, size, len(old))


def _data_of(tokenizer: Any) -> tuple[Any, str]:
    """Return the JSON of a fast tokenizer, or None and why its vocabulary cannot be cut exactly."""
    if not getattr(tokenizer, "is_fast", False):
        return None, f"{type(tokenizer).__name__} is no fast tokenizer"
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    affixes = data["model"].get("continuing_subword_prefix") or data["model"].get("end_of_word_suffix")
    return (None, f"its BPE marks words by {affixes!r}") if data["model"]["type"] == "BPE" and affixes else (data, "")


def _needed(model: Any, kept: Set[int]) -> set[int]:
    """Return the tokens that kept ones need, and single characters; leave only the merges of BPE that make them."""
    if model["type"] == "Unigram":
        scores = [score for _, score in model["vocab"]]
        needed = {scores.index(min(scores))} | ({model["unk_id"]} - {None})  # the lowest: cost of unknown characters
        return needed | {at for at, (token, _) in enumerate(model["vocab"]) if _SINGLE.fullmatch(token)}
    vocabulary: dict[str, int] = model["vocab"]
    needed = {at for token, at in vocabulary.items() if _SINGLE.fullmatch(token) or token == model.get("unk_token")}
    if model["type"] == "BPE":
        merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
        rank, used = {pair: at for at, pair in enumerate(merges)}, set[int]()
        for token in [token for token, at in vocabulary.items() if at in kept]:
            parts = list(token)  # no merge crosses the ends of a token, so in a text it is made as it is alone
            while found := [(rank[p], at) for at, p in enumerate(itertools.pairwise(parts)) if p in rank]:
                merge, at = min(found)
                parts[at : at + 2] = ["".join(merges[merge])]
                used.add(merge)
                needed.add(vocabulary[parts[at]])
        model["merges"] = [list(merges[at]) for at in sorted(used)]
    return needed


def _renumber_tables(tokenizer: Any, new: Mapping[int, int]) -> None:
    """Write the new ids where the class of a tokenizer holds ids itself, as that of mBART does for its languages."""
    ids = tokenizer.get_vocab()
    tokens = {at: token for token, at in ids.items()}
    for key, value in vars(tokenizer).items():
        if isinstance(value, dict) and value.items() <= ids.items():
            vars(tokenizer)[key] = {token: new[at] for token, at in value.items() if at in new}
        elif isinstance(value, dict) and value.items() <= tokens.items():
            vars(tokenizer)[key] = {new[at]: token for at, token in value.items() if at in new}
        elif _OF_LANGUAGE.fullmatch(key):
            vars(tokenizer)[key] = [new[at] for at in value] if isinstance(value, list) else new.get(value, value)


def _renumbered(data: Any, new: Mapping[int, int]) -> Any:
    """Return the JSON of a tokenizer with the kept tokens, and their new ids wherever it has ids."""
    if isinstance(data, list):
        is_pair = len(data) == 2 and isinstance(data[0], str) and type(data[1]) is int  # ["[SEP]", 102]
        return [data[0], new[data[1]]] if is_pair else [_renumbered(part, new) for part in data]
    if not isinstance(data, dict):
        return data
    data = {key: _renumbered(part, new) if key not in ("vocab", "merges") else part for key, part in data.items()}
    for key in data.keys() & {"id", "unk_id", "pad_id"}:
        data[key] = new.get(data[key], data[key])
    if isinstance(data.get("ids"), list):
        data["ids"] = [new[at] for at in data["ids"]]
    if isinstance(vocabulary := data.get("vocab"), dict):
        data["vocab"] = {token: new[at] for token, at in vocabulary.items() if at in new}
    elif vocabulary is not None:
        data["vocab"] = [entry for at, entry in enumerate(vocabulary) if at in new]
    return data
