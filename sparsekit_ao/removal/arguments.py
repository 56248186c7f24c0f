"""`ShrinkCall`: the arguments of `shrink`, checked, and the models and data that follow from them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree

from ..calibration import GRADIENTS
from ..coupling import Coupling
from ..errors import SparsityError, checked_model
from ..masking.normalized import plain_copy, refuse_uncopyable, undo_weight_norms
from ..models.names import Exclusion, names_in_place_of_modules
from ..models.running import Forward, TokenMask, check_example, token_masks_of
from ..oneshot.chain import CalibrationData
from ..oneshot.teacher import passes_of
from ..scores import Score, needs_of, parse_score
from ..structure import checked_level
from .compaction import check_comparable
from .config_fields import ConfigFields
from .plan import MAX_SPARSITY
from .score import NORM, Cost, cost_function
from .sizes import has_config
from .verify import Reference

_ROWS, _TOKENS = 2, 64  # of the inputs of trials, at most


@dataclass(kw_only=True, eq=False)
class ShrinkCall:
    """The arguments of a call of `shrink`, checked, and what follows from them.

    Attributes:
        whole: The model of the user.
        model: The same with plain weights in place of normalized or computed ones.
        all_data: The batches, or the example inputs.
        data: The same, but in a dry run one batch alone.
        trial_inputs: A few rows and tokens of the example inputs.
        cost_of: A function of plans and the units that they keep, or None if each layer has a budget of its own.
        reference_of: A function of a model that returns it as a reference with the example inputs.
        trial_reference_of: The same with the trial inputs.
    """

    model: nn.Module
    example_inputs: Any
    ratio: float | Mapping[str, float]
    score: Score | str | None
    exclude: Sequence[Exclusion]
    batches: Iterable[Any] | None
    token_mask: TokenMask
    compensate: str | None
    recover: bool | int
    budget: str | Cost
    couplings: Sequence[Coupling] | None
    forward: Forward | None
    max_sparsity: float | Mapping[str, float] | None
    multiple_of: int | Mapping[str, int] | None
    keep_config: bool | None
    dry_run: bool

    def __post_init__(self) -> None:
        check_comparable("shrink: ", checked_model(self.model, "shrink"))
        refuse_uncopyable(self.model, "shrink")
        self.all_data = self._checked_data()
        self.data = self.all_data.one_batch()[0] if self.dry_run else self.all_data
        needs = needs_of(None if self.score == NORM else parse_score(self.score, "shrink: "))
        self._check_compensation(bool({*needs} & {*GRADIENTS}))
        self.whole, self.model = self.model, plain_copy(self.model)
        self.cost_of = cost_function(self.budget, self.model, self.example_inputs)
        self._check_ratio()
        normed, inputs = undo_weight_norms(self.model), self.example_inputs
        self.trial_inputs = _shortened(self.model, inputs)
        self.reference_of = partial(Reference, inputs=inputs, normed=normed)
        self.trial_reference_of = partial(Reference, inputs=self.trial_inputs, normed=normed)
        self.max_sparsity = MAX_SPARSITY if self.max_sparsity is None else self.max_sparsity
        self.exclude = names_in_place_of_modules(self.whole, self.exclude)

    @cached_property
    def fields(self) -> ConfigFields | None:
        """The fields of the model's config, or None if it has no config."""
        return ConfigFields.of(self.model)

    @property
    def names(self) -> set[str] | None:
        """The names in `ratio` and `max_sparsity`, or None if the call gives the couplings themselves."""
        by_name = [numbers for numbers in (self.ratio, self.max_sparsity) if isinstance(numbers, Mapping)]
        return set[str]().union(*by_name) if self.couplings is None else None

    @property
    def is_open(self) -> bool:
        """Whether the call leaves open what is dropped from a model of transformers."""
        any_kind = not isinstance(self.ratio, Mapping) or "*" in self.ratio
        return self.couplings is None and has_config(self.model) and any_kind

    def _checked_data(self) -> CalibrationData:
        """Return the data that scores and compensation read, whose first batch may become the example inputs."""
        if self.batches is None:
            mask = token_masks_of(self.example_inputs, None, "shrink")
            batches = [self.example_inputs]
            data = CalibrationData(model=self.model, batches=batches, forward=self.forward, token_masks=[mask])
        else:
            data = CalibrationData.checked(self.model, self.batches, self.forward, self.token_mask, "shrink")
        self.example_inputs = data.batches[0] if self.example_inputs is None else self.example_inputs
        if self.example_inputs is None:
            raise SparsityError("shrink: give example_inputs (one batch of inputs), or batches, whose first is taken")
        check_example(self.model, self.example_inputs, "shrink")
        return data

    def _check_compensation(self, has_gradients: bool) -> None:
        """Raise an error if `compensate` or `recover` is unknown or lacks data."""
        if self.compensate not in (None, "least_squares"):
            raise SparsityError(f"shrink: compensate must be 'least_squares' or None, got {self.compensate!r}")
        self.passes = passes_of(self.recover, "shrink")
        if self.batches is None and (self.recover or self.token_mask is not None):
            raise SparsityError("shrink: recover and token_mask need batches; give unlabelled inputs as batches=")
        if self.recover and has_gradients:
            raise SparsityError(
                "shrink: the score needs a forward that returns the loss, but recover needs one that returns "
                "outputs; call shrink with exclude=['width'], and then recover(small, model, batches)"
            )

    def _check_ratio(self) -> None:
        """Raise an error if a ratio is wrong, or an argument that may not be given with it."""
        ratio = self.ratio
        by_name = ratio if isinstance(ratio, Mapping) and self.couplings is None else {}
        for kind in by_name.keys() & {"layers", "experts"}:
            how = f"removal.shrink_{kind}(model, [example_inputs], {by_name[kind]})"
            raise SparsityError(f"shrink: ratio names {kind!r}, but removing whole {kind} changes outputs; use {how}")
        if self.max_sparsity is not None and self.cost_of is None:
            raise SparsityError(
                f"shrink: max_sparsity={self.max_sparsity!r} needs one budget for all layers, but here the ratio "
                "applies to each layer by itself; give budget=, or lower the ratio"
            )
        if isinstance(ratio, Mapping) and (self.cost_of is not None or not ratio):
            raise SparsityError(
                f"shrink: a dict of ratios, {ratio!r}, sets a ratio for each name. It needs at least one name, and it "
                "cannot be combined with a budget= of the whole model; call shrink "
                "twice, the second time with exclude=[these names]"
            )
        if self.keep_config and not has_config(self.model):
            kind = type(self.model).__name__
            raise SparsityError(f"shrink: keep_config=True needs a model of transformers, got {kind}")
        for level in ratio.values() if isinstance(ratio, Mapping) else [ratio]:
            checked_level(level, "shrink: ratio: ")


def _shortened(model: nn.Module, inputs: Any) -> Any:
    """Return inputs with fewer rows and tokens, or the same ones if a model cannot be compared on fewer."""
    plain = dict(inputs) if isinstance(inputs, Mapping) else inputs
    tensors = [leaf for leaf in _pytree.tree_leaves(plain) if isinstance(leaf, Tensor) and leaf.ndim]
    tokens = {tensor.shape[1] for tensor in tensors if tensor.ndim == 2 and not tensor.is_floating_point()}

    def shorten(tensor: Tensor) -> Tensor:
        tensor = tensor[:_ROWS] if tensor.ndim and len(tensor) == len(tensors[0]) else tensor
        return tensor[:, :_TOKENS] if tensor.ndim > 1 and tensor.shape[1] in tokens else tensor

    short = _pytree.tree_map_only(Tensor, shorten, plain)
    if [t.shape for t in _pytree.tree_leaves(short) if isinstance(t, Tensor) and t.ndim] == [t.shape for t in tensors]:
        return inputs
    try:
        Reference(model, short)
    except SparsityError:  # such as: the model takes this number of rows alone, or all of these tokens are padding
        return inputs
    return short
