"""`quality` compares a pruned model with the dense one by kind of data; `mixed` and `spliced` make batches for both."""

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import SparsityError, checked_model
from ..models.loading import refuse_valueless
from ..models.running import (
    Forward,
    TokenMask,
    check_batches,
    checked_list,
    copied_tensors,
    eval_mode,
    kept_states,
    tensors_in,
)
from ..tables import Table
from .chain import CalibrationData

MEAN = "mean"  # the last row of a report by kind
_PART = 1 << 22  # at most so many elements of an output are computed with at a time
_NO_LABEL = -100


@dataclass(frozen=True, kw_only=True)
class QualityRow:
    """How close a model is to the dense one on one kind of data. What was not measured is NaN.

    Attributes:
        kind: The kind; "mean" is the mean over all kinds, "all" that of batches without kinds.
        count: The number of tokens (or of rows, such as images) that were compared.
        divergence: The Kullback-Leibler divergence KL(dense || model) of the logits, in nats per token.
        agreement: The share of tokens whose most likely class is that of the dense model.
        dense_perplexity, perplexity: exp of the mean loss of each next token, for the dense model and for the model.
        cosine: The mean cosine of the outputs to those of the dense model, where these are no logits.
        error: The relative error of such outputs Y, ||Y - Y_dense|| / ||Y_dense - mean of Y_dense over all rows||.

    >>> QualityRow(kind="code", count=512, divergence=0.31, agreement=0.82).agreement
    0.82
    """

    kind: str
    count: int
    divergence: float = math.nan
    agreement: float = math.nan
    dense_perplexity: float = math.nan
    perplexity: float = math.nan
    cosine: float = math.nan
    error: float = math.nan


@dataclass(frozen=True, kw_only=True)
class QualityReport(Table[QualityRow]):
    """What `quality` measured; prints as a table of the columns that were measured.

    Attributes:
        rows: A `QualityRow` for each kind and, below several, their mean.

    >>> rows = [QualityRow(kind=kind, count=9, error=error) for kind, error in (("a", 0.8), ("b", 0.9), ("mean", 0.85))]
    >>> print(QualityReport(rows=tuple(rows)))
    kind  count   error
    a         9  0.8000
    b         9  0.9000
    mean      9  0.8500
    farthest from the dense model: b
    """

    rows: tuple[QualityRow, ...]
    bars = ("divergence", "error")

    @property
    def mean(self) -> QualityRow:
        """The mean over the kinds, each of which counts the same, whatever its count; geometric for perplexities.

        Without kinds it is the row "all".
        """
        return self.rows[-1]

    @property
    def worst(self) -> QualityRow:
        """The kind with the largest divergence or, where there are no logits, the largest error."""
        name = "error" if math.isnan(self.mean.divergence) else "divergence"
        return max(self.rows[:-1] or self.rows, key=lambda row: getattr(row, name))

    def cells(self, folds: bool = False) -> list[tuple[str, ...]]:
        """Return the names of the fields that were measured, and the rows as text."""
        columns = zip(*super().cells(folds), strict=True)
        return [*zip(*(column for column in columns if {*column[1:]} != {"-"}), strict=True)]

    def below(self) -> list[str]:
        """Return which kind is farthest from the dense model."""
        return [f"farthest from the dense model: {self.worst.kind}"] if len(self.rows) > 2 else []


@torch.no_grad()
def quality(
    dense: nn.Module,
    model: nn.Module,
    batches: Iterable[Any] | Mapping[str, Iterable[Any]],
    forward: Forward | None = None,
    token_mask: TokenMask = None,
) -> QualityReport:
    """Measure how close a model is to the dense model that it was made from, without labels.

    For logits, which are what an output calls `logits`, it reports the divergence, and how often the most likely class
    is the same. If the inputs are tokens of which each is predicted from those before it, it also reports the
    perplexity of both models. For other outputs, such as the hidden states of an encoder, it reports the cosine and the
    relative error of the first tensor.

    A model loses less on texts like those that it was calibrated on than on others. So measure several kinds, none of
    whose batches were used, and look at the mean and at the worst kind.

    Args:
        dense: The model before it was pruned or made smaller; accelerate may have offloaded it, and the other one too.
        model: The pruned or smaller model. Both run in eval mode, and neither changes.
        batches: Batches as for `prune`, or {kind: batches}. They are read once, one after the other.
        forward: A function `(model, batch) -> output`. If a model returns its logits without a name, give it as
            `lambda model, batch: {"logits": model(batch)}`.
        token_mask: Which tokens count, as for `prune`; padding does not by default.

    Raises:
        SparsityError: There are no batches of a kind; parameters have no values; outputs have other shapes than those
            of the dense model, no tensor of floats, or values that are not finite; the model does not run on a
            batch; or a token mask does not fit.

    >>> dense = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    >>> pruned, _ = sparsekit_ao.prune(dense, "2:4")
    >>> batches = {"small": [torch.randn(32, 8)], "large": [100 * torch.randn(32, 8)]}
    >>> report = quality(dense, pruned, batches, lambda model, batch: {"logits": model(batch)})
    >>> [row.kind for row in report], report["small"].divergence > 0, report.worst.kind
    (['small', 'large', 'mean'], True, 'large')
    """
    for one in (dense, model):
        refuse_valueless(checked_model(one, "quality"), "quality")
    by_kind: Mapping[str, Any] = batches if isinstance(batches, Mapping) else {"all": batches}
    names = [*map(str, by_kind)]
    if (
        not by_kind
        or MEAN in names
        or len({*names}) < len(names)
        or (by_kind is batches and any(isinstance(b, Tensor) for b in by_kind.values()))
    ):
        what = f"a dict with {', '.join(map(repr, by_kind)) or 'nothing'}"
        raise SparsityError(
            f"quality: batches must be a list of batches, or {{kind: batches}} with kinds of different names, none of "
            f"them {MEAN!r}, got {what}; if this is one batch, give [batch]"
        )
    for kind, of_kind in by_kind.items():
        check_batches(of_kind, token_mask, forward, "quality" if by_kind is not batches else f"quality: kind {kind!r}")
    comparison = _Comparison(dense, model, forward, token_mask)
    with eval_mode(dense), eval_mode(model), kept_states(dense), kept_states(model):
        rows = [comparison.row(str(kind), of_kind) for kind, of_kind in by_kind.items()]
    if len(rows) > 1:
        columns = {field.name: [getattr(row, field.name) for row in rows] for field in fields(QualityRow)[2:]}
        means = {name: sum(values) / len(rows) for name, values in columns.items()}
        for name in ("dense_perplexity", "perplexity"):
            means[name] = math.prod(value ** (1 / len(rows)) for value in columns[name])
        rows.append(QualityRow(kind=MEAN, count=sum(row.count for row in rows), **means))
    return QualityReport(rows=tuple(rows))


class _Comparison:
    """Two models that run on the same batches."""

    def __init__(self, dense: nn.Module, model: nn.Module, forward: Forward | None, token_mask: TokenMask) -> None:
        self.dense, self.model, self.forward, self.token_mask = dense, model, forward, token_mask
        self.is_causal: bool | None = None  # whether each token is predicted from those before it; None: not known yet

    def row(self, kind: str, batches: Iterable[Any]) -> QualityRow:
        """Compare the models on the batches of one kind."""
        sums = Counter[str]()  # of floats, and of one tensor
        for at, batch in enumerate(batches):
            sums.update(self._sums(batch, f"quality: batch {at} of {kind!r}"))
        if not (count := sums["count"]):
            raise SparsityError(f"quality: there are no batches of {kind!r}; an iterator that was used up gives none")
        found = {name: sums[name] / count for name in ("divergence", "agreement", "cosine") if name in sums}
        for name in ("dense_perplexity", "perplexity") if sums["labels"] else ():
            loss = sums[name] / sums["labels"]
            found[name] = math.exp(loss) if loss < 700 else math.inf
        if "cosine" in sums:
            mean: Any = sums["sum"] / count if count > 1 else torch.zeros(1)
            spread = sums["squares"] - count * float(mean.square().sum())
            is_constant = spread <= 1e-12 * sums["squares"]  # up to rounding
            found["error"] = math.sqrt(sums["lost"] / spread) if not is_constant else math.inf if sums["lost"] else 0.0
        return QualityRow(kind=kind, count=count, **found)

    def _sums(self, batch: Any, where: str) -> dict[str, Any]:
        """Run both models on a batch, and return sums over its rows."""
        data = CalibrationData.checked(self.dense, [batch], self.forward, self.token_mask, where)
        wanted, is_logits = _compared(data.output(0))
        got = _compared(self._output(data, where))[0]
        if wanted is None or got is None or wanted.shape != got.shape:
            shapes = " and ".join("no tensor of floats" if t is None else str(tuple(t.shape)) for t in (wanted, got))
            raise SparsityError(
                f"{where}: the outputs of the dense model and of the model are {shapes}; give models that return "
                "tensors of one shape, or a forward that returns what is to be compared"
            )
        labels, mask = self._labels(data, wanted) if is_logits else (None, data.token_masks[0].masks[2])
        if mask is not None and mask.shape != wanted.shape[:-1]:
            if self.token_mask and wanted.ndim > mask.ndim:
                sizes = f"{tuple(mask.shape)}, but the outputs are {tuple(wanted.shape)}"
                raise SparsityError(f"{where}: the token mask is {sizes}; give one that fits, or token_mask=False")
            mask = None  # the outputs have no tokens
        a, b = (_rows(tensor.to(wanted.device), mask) for tensor in (wanted, got))
        known = torch.full((len(a), 1), _NO_LABEL) if labels is None else _rows(labels[..., None], mask)
        sums = Counter[str](count=len(a))
        for parts in zip(*(t.split(max(1, _PART // a.shape[1])) for t in (a, b, known.to(a.device))), strict=True):
            sums.update((_of_logits if is_logits else _of_states)(*parts))
        if any(math.isnan(value) for value in sums.values() if not isinstance(value, Tensor)):
            # Logits may be -inf, unless all of a row are.
            totals = [rows.double().logsumexp(-1) if is_logits else rows.double().sum(-1) for rows in (a, b)]
            names = zip(("the dense model", "the model"), totals, strict=True)
            whose = " and ".join(name for name, total in names if not total.isfinite().all())
            raise SparsityError(
                f"{where}: outputs of {whose} that count have values that are not finite; leave out such rows, or mend "
                "the model"
            )
        return sums

    def _output(self, data: CalibrationData, where: str) -> Any:
        """Run the model on a batch that the dense model runs on."""
        try:
            return replace(data, model=self.model).output(0)
        except torch.OutOfMemoryError:
            raise
        except (IndexError, RuntimeError, ValueError, TypeError) as error:
            ids, table = _ids_of(data.batches[0]), None
            with contextlib.suppress(NotImplementedError, AttributeError):
                table = self.model.get_input_embeddings().weight  # type: ignore[operator]
            hint = ""
            if ids is not None and table is not None and int(ids.max()) >= len(table):
                hint = (
                    f", since it has {len(table)} tokens, and the batch has the id {int(ids.max())}. After "
                    "shrink_vocabulary, give a forward that translates ids by new_ids of its report for the smaller "
                    "model, and returns the logits of the kept tokens of the dense one"
                )
            raise SparsityError(
                f"{where}: the dense model runs on it, but the model does not{hint}: {error}"
            ) from error

    def _labels(self, data: CalibrationData, logits: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return what each of the logits [batch, tokens, classes] predicts, or None, and which tokens count."""
        batch, mask = data.batches[0], data.token_masks[0].masks[2]
        is_shifted = getattr(getattr(self.dense, "config", None), "is_encoder_decoder", False)  # by the model itself
        labels = batch.get("labels") if is_shifted and isinstance(batch, Mapping) else None
        if labels is not None and "decoder_input_ids" not in batch and logits.ndim == 3:
            counts = labels != _NO_LABEL
            if mask is not None and mask.shape == labels.shape and self.token_mask not in (None, "attention_mask"):
                counts &= mask.to(counts)  # other masks are the encoder's
            return labels, None if self.token_mask is False else counts
        ids = _ids_of(batch)
        if ids is None or ids.shape != logits.shape[:-1] or int(ids.max()) >= logits.shape[-1]:
            return None, mask
        counts = (torch.ones_like(ids) if mask is None or mask.shape != ids.shape else mask.to(ids.device)).bool()
        if self.is_causal is None and bool((counts.sum(-1) > 1).any()):
            self.is_causal = _predicts_next(data, logits, counts)
        labels = ids.masked_fill(~counts, _NO_LABEL).roll(-1, -1)
        labels[:, -1] = _NO_LABEL
        return labels if self.is_causal else None, mask


def _predicts_next(data: CalibrationData, logits: Tensor, counts: Tensor) -> bool | None:
    """Return whether logits of the first half of a row stay the same if tokens of the second half are others.

    None is returned if it is not known, as no token can be another one.
    """
    row = int(counts.sum(-1).argmax())
    places = counts[row].nonzero().flatten()
    first, second = places[: len(places) // 2], places[len(places) // 2 :]
    batch = copied_tensors(data.batches[0])
    ids: Any = _ids_of(batch)
    # Tokens that a config names stay where they are: images, for example, must have as many as before.
    configs = {
        id(c): vars(c) for m in data.model.modules() if (c := getattr(m, "config", None)) and hasattr(c, "__dict__")
    }
    named = [at for c in configs.values() for name, at in c.items() if "token_i" in name and type(at) is int]
    is_text = counts & ~torch.isin(ids, torch.tensor(named, dtype=ids.dtype, device=ids.device))
    if not is_text[row, second].any():
        return None
    texts = ids[is_text].unique()
    texts = texts if len(texts) > 1 else torch.cat([texts, (texts + 1) % logits.shape[-1]]).sort().values
    changed = second[is_text[row, second]]
    ids[row, changed] = texts.roll(-1)[torch.searchsorted(texts, ids[row, changed])]
    try:
        again: Any = _compared(replace(data, batches=[batch]).output(0))[0]
    except Exception:  # such as where a token means something else than a text
        return None
    # Logits of classes that no token has are -inf in both.
    change = (again[row].float() - logits[row].float()).nan_to_num(0).norm(dim=-1).to(ids.device)
    # If other tokens take other experts, products round otherwise: by 2e-6 in float32 but 1e-3 in float16, as little as
    # tokens of an untrained encoder change others. So more is allowed only where a model says that it generates.
    limit = 2e-2 if getattr(data.model, "can_generate", bool)() else 1e-5
    return float(change[first].mean()) <= limit * float(change[second].mean())


def _ids_of(batch: Any) -> Tensor | None:
    """Return the tokens that a decoder reads, integers [batch, tokens], or None."""
    ids = batch[0] if isinstance(batch, (tuple, list)) else batch
    if isinstance(batch, Mapping):
        ids = batch.get("decoder_input_ids", batch.get("input_ids"))
    is_ids = isinstance(ids, Tensor) and ids.ndim == 2 and ids.dtype in (torch.int32, torch.int64)
    return ids if is_ids else None


def _compared(output: Any) -> tuple[Tensor | None, bool]:
    """Return the logits of an output and True, or its first tensor of floats that is no loss, if any, and False."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, Tensor) and logits.ndim > 1 and logits.shape[1 if logits.ndim > 3 else -1] > 1:
        return logits, True
    return next((t for _, t in tensors_in("", output) if t.is_floating_point() and t.ndim), None), False


def _rows(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Return an output as rows [tokens, features] of those tokens that count; the features of images are channels."""
    tensor = tensor[:, None] if tensor.ndim == 1 else tensor
    rows = tensor.movedim(1 if tensor.ndim > 3 else -1, -1).flatten(0, -2)
    return rows if mask is None else rows[mask.to(rows.device).bool().flatten()]


def _of_logits(wanted: Tensor, got: Tensor, labels: Tensor) -> dict[str, float]:
    """Return sums over rows of logits, and the losses of labels [rows, 1]."""
    p, q = (rows.float().log_softmax(-1) for rows in (wanted, got))
    known = labels != _NO_LABEL
    dense_loss, loss = (-_sum(rows.gather(1, labels.clamp(min=0))[known]) for rows in (p, q))
    divergence = _sum((p.exp() * (p - q)).masked_fill_(p == -math.inf, 0))
    sums = {"divergence": divergence, "agreement": _sum(wanted.argmax(-1) == got.argmax(-1)), "labels": _sum(known)}
    return sums | {"dense_perplexity": dense_loss, "perplexity": loss}


def _of_states(wanted: Tensor, got: Tensor, _: Tensor) -> dict[str, Any]:
    """Return sums over rows of other outputs."""
    a, b = wanted.double(), got.double()
    is_zero = (a == 0).all(-1) & (b == 0).all(-1)  # in both models, which is no difference
    cosine = F.cosine_similarity(a, b, dim=-1).masked_fill(is_zero, 1)
    sums = {"cosine": cosine, "lost": (a - b).square(), "squares": a.square()}
    return {name: _sum(values) for name, values in sums.items()} | {"sum": a.sum(0)}


def _sum(values: Tensor) -> float:
    return float(values.sum(dtype=torch.float64))


def mixed(batches: Mapping[str, Iterable[Any]]) -> list[Any]:
    """Deal the batches of several kinds evenly, to calibrate on: one of each kind, then the next of each.

    With as many tokens in all, a model loses a little more on one kind than if it had been calibrated on that alone,
    and less on all others; see `quality`.

    Args:
        batches: {kind: batches}, as many of each.

    Raises:
        SparsityError: There are no batches, or of some kinds more than of others.

    >>> mixed({"code": ["code 1", "code 2"], "letters": ["letter 1", "letter 2"]})
    ['code 1', 'letter 1', 'code 2', 'letter 2']
    """
    if not isinstance(batches, Mapping) or not batches:
        raise SparsityError(f"mixed: batches must be {{kind: batches}}, got {batches!r:.80}")
    for kind, of_kind in batches.items():
        check_batches(of_kind, None, None, f"mixed: kind {kind!r}")
    lists = {kind: list(of_kind) for kind, of_kind in batches.items()}
    counts = {kind: len(of_kind) for kind, of_kind in lists.items()}
    if (fewest := min(counts.values())) != max(counts.values()) or not fewest:
        advice = f"give batches[:{fewest}] of each" if fewest else "leave out kinds without batches"
        raise SparsityError(f"mixed: there must be as many batches of each kind, got {counts}; {advice}")
    return [batch for one_of_each in zip(*lists.values(), strict=True) for batch in one_of_each]


def spliced(batches: Iterable[Any], copies: int = 3, length: int = 32, *, seed: int = 0) -> list[Any]:
    """Return batches of text, and copies of them in which pieces of all windows follow each other in another order.

    The dense model says what is right for any text, also for such a one. Recovery on more of it fits the windows
    themselves less closely, and leaves the model closer to the dense one on other text.

    Args:
        batches: Windows of equally many tokens without padding: tensors of ids [rows, tokens], or dicts with such a
            tensor as "input_ids" and at most an attention mask (a tensor) beside it.
        copies: How many copies there are, each in an order of its own.
        length: The number of tokens of a piece. Windows have a multiple of it, at least twice as many.
        seed: What determines the orders.

    Raises:
        SparsityError: A batch has something else, or a number does not fit.

    >>> ids = torch.arange(8).reshape(2, 4)
    >>> [batch.tolist() for batch in spliced([ids], copies=1, length=2)]
    [[[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3], [6, 7, 4, 5]]]
    """
    for name, number, least in (("copies", copies, 1), ("length", length, 1), ("seed", seed, 0)):
        if type(number) is not int or number < least:
            raise SparsityError(f"spliced: {name} must be an integer of at least {least}, got {number!r}")
    given, windows = checked_list(batches, None, "spliced"), list[Tensor]()
    for batch in given:
        entries = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
        ids, mask = entries.pop("input_ids", None), entries.pop("attention_mask", None)
        is_text = isinstance(ids, Tensor) and ids.ndim == 2 and ids.dtype in (torch.int32, torch.int64)
        is_full = mask is None or (isinstance(mask, Tensor) and bool(mask.all()))
        if not is_text or entries or not is_full:
            raise SparsityError(
                "spliced: batches must be tensors of ids [rows, tokens], or dicts with such a tensor as 'input_ids' "
                f"and at most an 'attention_mask', a tensor without padding, got {batch!r:.80}"
            )
        windows.append(ids)
    tokens = {ids.shape[1] for ids in windows}
    if len(tokens) > 1 or min(tokens) % length or min(tokens) == length:
        raise SparsityError(
            f"spliced: all windows must have equally many tokens, two or more times {length=}, got {sorted(tokens)}"
        )
    pieces, generator = torch.cat([ids.reshape(-1, length) for ids in windows]), torch.Generator().manual_seed(seed)
    made = [*given]
    for _ in range(copies):
        order = torch.randperm(len(pieces), generator=generator, device="cpu").to(pieces.device)
        parts = pieces[order].reshape(-1, min(tokens)).split([len(ids) for ids in windows])
        for batch, ids, part in zip(given, windows, parts, strict=True):
            part = part.to(ids.dtype)
            made.append(copy.copy(batch) if isinstance(batch, Mapping) else part)  # of its own class
            if isinstance(batch, Mapping):
                made[-1]["input_ids"] = part
    return made
