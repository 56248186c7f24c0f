"""`shrink_experts` and `shrink_layers` remove experts or blocks, which changes outputs."""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ..calibration import token_rows
from ..calibration.products import Products
from ..coupling import BoundCoupling, Member, expert_couplings
from ..coupling.bound import is_list
from ..coupling.experts import packed_experts, rated_experts
from ..distributed import is_sharded, of_all_ranks
from ..errors import SparsityError, checked_model
from ..models.loading import loaded, refuse_unloadable, refuse_valueless, remove_copied_values
from ..models.names import owner_of
from ..models.progress import progress_bar, public_call, text_of_call
from ..models.running import Forward, TokenMask, eval_mode, first_tensor, kept_generators
from ..oneshot.chain import CalibrationData, calls_of
from ..oneshot.walk import Walk
from ..selection import keep_mask
from ..structure import AxisPattern, checked_level, sparsity_to_nnz
from .block_fitting import fit_blocks
from .compaction import verify_removal
from .config_fields import ConfigFields
from .modules import config_of
from .removal_report import ShrinkReport
from .remove import Removal, check_multiple, kept_elements, plain_tensor, round_up
from .sizes import Change, has_config
from .verify import Reference, light_copy

_MAKE_LOGITS = ("linear", "matmul", "__matmul__", "mm", "einsum", "add", "__add__", "__radd__")  # a bias is added


@kept_generators()
@public_call
def shrink_experts(
    model: nn.Module,
    batches: Sequence[Any],
    ratio: float = 0.5,
    *,
    multiple_of: int = 1,
    forward: Forward | None = None,
    scores: Mapping[str, Tensor] | None = None,
    token_mask: TokenMask = None,
    dry_run: bool = False,
    progress: bool = True,
) -> tuple[nn.Module, ShrinkReport]:
    """Remove a fraction of the experts of every layer: those with the lowest `expert_scores` (REAP, arXiv 2510.13999).

    Every layer keeps the same number of experts, so that the config can hold it. If routers choose among groups of
    experts, every group keeps the same number too.

    The result gives the outputs of the dense model whose routers give the removed experts logits of minus infinity. On
    the first batch this is verified, as strictly as by `compact`; `difference` in the report is what was found, and
    `error_to_dense` is the error to the outputs of the dense model as it is. So a softmax spreads over the kept
    experts, whether or not the gates of the chosen ones are then divided by their sum (`norm_topk_prob`). A sigmoid
    gives each kept expert the gate that it had, and a bias that corrects the choice cannot choose a removed one. Groups
    are chosen by their kept experts. Shared experts stay.

    Args:
        model: A model whose experts `expert_couplings` finds, packed as in transformers 5. It is not changed. It may be
            offloaded by accelerate, because all batches pass one block before the next one is loaded. The result is
            then offloaded too.
        batches, forward: As for `expert_scores`.
        ratio: The fraction of the experts that is removed. It is rounded so that a multiple of `multiple_of` is kept.
        multiple_of: Each group, or each layer if there are no groups, keeps a multiple of this number of experts, or
            all of them.
        scores: What `expert_scores` has returned for this model, so that several ratios need one pass over the data;
            only the first of `batches` is then used. None (default) computes them.
        token_mask: Which tokens of the batches count, as for `one_shot`.
        dry_run: If True, return the model itself and a report of what would be left, which is verified all the same.
            It lacks `error_to_dense` and what becomes of the config. False by default.
        progress: If True (default), show progress, as `one_shot` does.

    Returns:
        The smaller model, and a `ShrinkReport`.

    Raises:
        SparsityError: As for `expert_scores`; or `scores` are not of this model's experts; or a token needs more
            experts than are kept; or no token reaches a layer's experts; or a table chooses experts, as the hash layers
            of DeepSeek-V4 do; or weights are sharded; or outputs are not those that are described above.

    >>> small, report = shrink_experts(model, batches, 0.25)  # doctest: +SKIP
    """
    _check_model(model, "shrink_experts")
    if any(map(is_sharded, model.parameters())):
        raise SparsityError("shrink_experts: weights are sharded over ranks; remove experts before fully_shard")
    refuse_unloadable(model, "shrink_experts")
    level = checked_level(ratio, "shrink_experts: ratio: ")
    data = CalibrationData.checked(model, batches, forward, token_mask, "shrink_experts")
    check_multiple(multiple_of, "shrink_experts: ")
    bounds = list[BoundCoupling]()
    for path in packed_experts(dict(model.named_parameters())) or (None,):  # layers of several kinds may have experts
        if not any(member.fqn.startswith(f"{path}.") for bound in bounds for member in bound.members):
            coupling = expert_couplings(model, path).get("experts")
            if coupling is None:
                raise SparsityError("shrink_experts: the model has no router, a matrix with a row for each expert")
            bounds += coupling.bind(model)
    if len({bound.grid for bound in bounds}) > 1:  # which no single number describes
        attrs = [{path: axes for path, axes in bound.attrs.items() if "*" in path} for bound in bounds]
        bounds = [replace(bound, attrs=of) for bound, of in zip(bounds, attrs, strict=True)]
    scores, removals = _expert_scores(data, bounds) if scores is None else scores, []
    for bound in bounds:
        units, names = bound.scope_units, [member.fqn.rpartition(".")[0] for member in bound.members]
        found = next((scores[name] for name in names if name in scores), None) if isinstance(scores, Mapping) else None
        if not isinstance(found, Tensor) or found.numel() != bound.units:
            raise SparsityError(
                f"shrink_experts: scores must be what expert_scores returns for this model, with a tensor of "
                f"{bound.units} for {names[0]!r}, got {tuple(found.shape) if isinstance(found, Tensor) else found}"
            )
        if not found.isfinite().all():
            raise SparsityError(
                f"shrink_experts: scores of {names[0]} are not finite; leave out inputs with NaN or inf"
            )
        if not found.any():
            raise SparsityError(f"shrink_experts: no token reached {names[0]}, so its experts cannot be rated")
        kept = round_up(sparsity_to_nnz(level, units, "shrink_experts: ratio: "), units, multiple_of)
        keep = keep_mask(found.reshape(-1, units), kept).reshape(bound.grid)
        removals.append(Removal(bound=bound, keep=keep))
    least = getattr(model.config.get_text_config(), "num_experts_per_tok", 1) if has_config(model) else 1  # type: ignore
    if (kept := min(int(removal.keep.sum()) for removal in removals)) < least:
        raise SparsityError(f"shrink_experts: a token needs {least} experts, but {ratio=} keeps {kept}")
    return _Oracle(data, _never_choosing).smaller(removals, (), dry_run)


class _WithoutLogits(TorchFunctionMode):
    """Gives the logits of a router minus infinity for experts that are not kept."""

    def __init__(self, keep: Tensor) -> None:
        super().__init__()
        self.keep = keep

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _MAKE_LOGITS and out.is_floating_point() and out.ndim:
            return out.masked_fill(~self.keep.to(out.device), -torch.inf) if out.shape[-1] == len(self.keep) else out
        return out


def _never_choosing(model: nn.Module, removals: Sequence[Removal]) -> None:
    """Let the routers of a model never choose the removed experts, in place."""
    for removal, member in ((r, member) for r in removals for member in r.bound.members):
        router, name = owner_of(model, member.fqn)
        tensor = getattr(router, name)
        keep = kept_elements(member, removal, tuple(tensor.shape))
        if tensor.numel() == len(keep.flatten()) == removal.bound.units:  # a bias of the scores, added after a sigmoid
            tensor.data.masked_fill_(~keep.to(tensor.device), -torch.inf)
        elif name == "weight" and tensor.ndim == 2:
            if tables := [key for key, t in router.named_buffers() if not t.is_floating_point()]:
                raise SparsityError(
                    f"shrink_experts: {member.fqn.rpartition('.')[0]} assigns tokens to experts by a table "
                    f"({tables[0]}), not by its logits, so nothing takes the place of a removed expert; this model "
                    "keeps all of its experts"
                )
            mode = _WithoutLogits(keep[:, 0])
            router.register_forward_pre_hook(lambda *_, mode=mode: mode.__enter__() and None)
            router.register_forward_hook(lambda *_, mode=mode: mode.__exit__(None, None, None), always_call=True)


@torch.no_grad()
def _expert_scores(data: CalibrationData, bounds: Sequence[BoundCoupling]) -> dict[str, Tensor]:
    """Return `expert_scores`, computed block by block: all batches pass a block before the next one is loaded."""
    owners = [owner_of(data.model, member.fqn)[0] for bound in bounds for member in bound.members]
    walk = Walk(data, (), layers=owners)
    with rated_experts(data.model, data.token_masks) as scores, eval_mode(data.model):
        if walk.outside:  # a walk over the blocks would not reach all experts
            for index in range(len(data.batches)):
                data.output(index)
        for at, block in enumerate(() if walk.outside else progress_bar(walk.blocks, "shrink_experts", "block")):
            if walk.chain_of[at] == len(walk.streams):
                walk.begin_stream(walk.chain_of[at])
            with loaded(data.model, [block]):
                walk.advance(at)
    return scores


@kept_generators()
@public_call
def shrink_layers(
    model: nn.Module,
    batches: Sequence[Any],
    ratio: float = 0.25,
    *,
    layers: str | None = None,
    forward: Forward | None = None,
    token_mask: TokenMask = None,
    compensate: str | None = "least_squares",
    progress: bool = True,
    dry_run: bool = False,
) -> tuple[nn.Module, ShrinkReport]:
    """Remove the runs of repeated blocks that change their input least; the blocks before them make up for them.

    The influence of a run of blocks is one minus the cosine of its input and its output, averaged over tokens (arXiv
    2403.17887, and ShortGPT, arXiv 2403.03853, for single blocks). The runs whose influences have the smallest sum are
    removed, with at least one block between two of them.

    The result gives the outputs of the dense model in which the removed blocks return their input. On the first batch
    this is verified, as strictly as by `compact`; `difference` in the report is what was found, and `error_to_dense` is
    the error to the outputs of the dense model as it is. Blocks that remain are renumbered (`layer_idx`) and counted
    anew (`num_layers`), also in the config of a transformers model. Parts of other tensors that belong to a removed
    block, such as its embeddings in Gemma 3n, leave with it. A block that others need stays, and another one leaves
    instead: the first block of a T5 has the bias of positions, and some blocks of Gemma 3n the keys and values, that
    others use. The report says so in `left_out`.

    The last matrix of the block before each run of removed blocks, and its bias, are then fitted to the dense model's
    hidden states after the run, in closed form, with the inputs that they have in the smaller model (ReplaceMe, arXiv
    2505.02819, folds a linear map into the same matrix; Prune&Comp, arXiv 2507.18212, rescales weights). The more kinds
    of text the batches have, the more the result gains on others. All batches pass one block before the next one.
    `report.compensation` has the relative error of each of these blocks' outputs before and after. Nothing is fitted if
    the first blocks are removed, if the output of the block is not the sum of a product and something else (a norm
    comes last, or the experts of a mixture), or if another module shares the weight; `report.left_out` says so.

    Args:
        model: The model, which is not changed.
        batches, forward: As for `expert_scores`.
        ratio: The fraction of the blocks that is removed.
        layers: The name of the `nn.ModuleList` of the blocks; None (default) takes the one with the most parameters.
        token_mask: Which tokens count, as for `one_shot`.
        compensate: `"least_squares"` (default) fits blocks; None leaves all weights as they are. Zeros, such as those
            of a pruned model, stay zero.
        progress: If True (default), show progress, as `one_shot` does.
        dry_run: As for `shrink_experts`.

    Returns:
        The smaller model, and a `ShrinkReport`.

    Raises:
        SparsityError: Parameters have no values; or there is no such list; or a block returns no tensor of its input's
            shape; or an argument does not fit; or outputs are not those that are described above, whichever blocks
            leave.

    >>> small, report = shrink_layers(model, batches, 0.25)  # doctest: +SKIP
    """
    _check_model(model, "shrink_layers")
    refuse_valueless(model, "shrink_layers")
    if compensate not in (None, "least_squares"):
        raise SparsityError(f"shrink_layers: compensate must be 'least_squares' or None, got {compensate!r}")
    level = checked_level(ratio, "shrink_layers: ratio: ")
    data = CalibrationData.checked(model, batches, forward, token_mask, "shrink_layers")
    lists: dict[str, Any] = {name: m for name, m in model.named_modules() if is_list(m)}
    if not lists or layers not in (None, *lists):
        what = "no nn.ModuleList" if not lists else f"no nn.ModuleList {layers!r}, but {', '.join(map(repr, lists))}"
        raise SparsityError(f"shrink_layers: the model has {what}; its blocks must be modules of an nn.ModuleList")
    path = layers or max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()))
    units = len(lists[path])
    if len({*lists[path]}) < units:
        raise SparsityError(
            f"shrink_layers: a module stands twice in {path}, so it cannot be removed for one of its calls"
        )
    if (kept := sparsity_to_nnz(level, units, "")) == 0:
        raise SparsityError(f"shrink_layers: ratio={ratio} keeps none of the {units} blocks in {path}")
    influences = _Influences(data, path, max(units - kept, 1)).measure()
    oracle = _Oracle(data, _passing_on)
    small, report, remaining = _without_least(oracle, path, influences, units - kept, dry_run)
    if compensate is not None and not dry_run:
        of_small = replace(data, model=small)
        report = fit_blocks(of_small, report, model, path, remaining)
        report = replace(report, error_to_dense=of_small.error_to(oracle.dense_output))
    return small, report


def _without_least(
    oracle: "_Oracle", path: str, influences: Tensor, asked: int, dry_run: bool
) -> tuple[nn.Module, ShrinkReport, list[int]]:
    """Return the model without blocks of least influence that others do not need, its report, and what remains."""
    units, stays = len(influences), dict[int, str]()
    together = [  # blocks that cannot leave alone may do so together, such as those of a period
        [*range(first, first + length)]
        for length in range(asked, 1, -1)
        for first in influences[: units - length + 1, length - 1].argsort().tolist()
    ]
    follows = ([], {}) if oracle.fields is None else oracle.fields.of_blocks(path)
    without = partial(_without_blocks, oracle, path, *follows)

    @cache
    def why_not(*gone: int) -> str:
        """Return what is wrong with the model without some blocks, or "" if nothing is."""
        try:
            without(torch.tensor([at not in gone for at in range(units)], device="cpu"), True)
        except SparsityError as error:
            return str(error)
        return ""

    while True:
        gone = _of_least_influence(influences, asked)
        if len(gone) < asked:
            longer = itertools.islice((run for run in together if len(run) > len(gone)), 2 * units)  # each is a trial
            gone = next((run for run in longer if not why_not(*run)), gone)
        keep = torch.tensor([at not in gone for at in range(units)], device="cpu")
        try:
            small, report = without(keep, dry_run)
            break
        except SparsityError as error:
            oracle.check_repeats()
            # Blocks without which alone the model gives other outputs own what other blocks use, and stay.
            failed = {at: why for at in gone if (why := why_not(at))}
            if not failed.keys() - stays.keys() or len(stays | failed) == units:
                raise SparsityError(
                    f"shrink_layers: {path} without the blocks {gone}: {error}. Remove fewer blocks, or shrink the "
                    "units of all blocks instead (`shrink`)."
                ) from error
            stays |= failed
            for at in failed:
                for first in range(at + 1):
                    influences[first, at - first :] = torch.inf
    instead = "another block leaves instead" if len(gone) == asked else f"only {len(gone)} of {asked} blocks leave"
    others = [f"{path}.{at} stays, and {instead}: without it {why}" for at, why in stays.items() if at not in gone]
    blocks = [f"{path}: without the blocks {', '.join(map(str, gone))}"] if gone else []
    report = replace(report, left_out=(*report.left_out, *others), changed=(*blocks, *report.changed))
    return small, report, keep.nonzero().flatten().tolist()


def _without_blocks(
    oracle: "_Oracle",
    path: str,
    dimensions: Sequence[tuple[str, int]],
    counted: Mapping[str, range],
    keep: Tensor,
    dry_run: bool,
) -> tuple[nn.Module, ShrinkReport]:
    """Return the model without blocks of a list, their parts of other tensors, and what else counts them."""
    model, units, kept = oracle.data.model, len(keep), keep.nonzero().flatten().tolist()
    _check_layer_types(model, path, kept)
    members = []
    for name, d in dimensions:  # such as embeddings for each block, side by side
        axes = " ".join("(u p)" if at == d else f"a{at}" for at in range(plain_tensor(model, name).ndim))
        pattern = AxisPattern(axes=axes, unit="u", sizes={"u": units})
        members.append(Member(fqn=name, pattern=pattern, is_parameter=False))
    bound = BoundCoupling(name="layers", unit="u", sizes={"u": units}, lists=(path,), members=tuple(members))
    now = {field: sum(at in blocks for at in kept) for field, blocks in counted.items()}
    changes = [Change(path=f, was=len(blocks), now=now[f]) for f, blocks in counted.items() if len(blocks) != now[f]]
    return oracle.smaller([Removal(bound=bound, keep=keep)], changes, dry_run)


def _passing_on(model: nn.Module, removals: Sequence[Removal]) -> None:
    """Let the removed blocks of a model pass their input on, in place."""
    for path, keep in ((path, removal.keep) for removal in removals for path in removal.bound.lists):
        for at in (~keep).nonzero().flatten().tolist():
            block, inputs = model.get_submodule(f"{path}.{at}"), list[Tensor]()
            block.register_forward_pre_hook(partial(_keep_input, inputs), with_kwargs=True)
            block.register_forward_hook(partial(_pass_on, inputs), prepend=True)


def _keep_input(inputs: list[Tensor], block: nn.Module, args: Any, kwargs: Any) -> None:
    """Keep a copy of a block's input, which the block may change in place."""
    inputs[:] = [tensor.clone() for tensor in [first_tensor([args, kwargs])] if tensor is not None]


def _pass_on(inputs: list[Tensor], block: nn.Module, args: Any, output: Any) -> Any:
    after = first_tensor(output)
    return tree_map_only(Tensor, lambda tensor: inputs[0] if tensor is after and inputs else tensor, output)


class _Influences:
    """The influence of each run of blocks of a list: one minus the cosine of its input and its output.

    A run whose blocks do not follow each other in the model, or change the shape, has the sum of their influences.
    """

    def __init__(self, data: CalibrationData, path: str, longest: int) -> None:
        layers: Any = data.model.get_submodule(path)
        self.data, self.path, self.longest, self.layers, units = data, path, longest, layers, len(layers)
        # For each run, [first block, length - 1], the sum of its influences over tokens, and their number. Tensors of
        # each call are not kept, since the allocator could not reuse the memory between them.
        self.sums = torch.zeros(units, longest, 2, dtype=torch.float64, device="cpu")
        self.calls, self.orders, self.is_decoder = [0] * units, set[bool](), False
        self.inputs = dict[int, Tensor]()  # inputs of the last blocks that followed each other

    def measure(self) -> Tensor:
        """Run the model over the data, and return the influences, [first block, length - 1]."""
        data = self.data
        with ExitStack() as hooks, torch.no_grad(), eval_mode(data.model):
            for at, block in enumerate(self.layers):
                hooks.enter_context(block.register_forward_pre_hook(partial(self._keep_input, at), with_kwargs=True))
                hooks.enter_context(block.register_forward_hook(partial(self._add, at)))
            for self.index, self.masks in enumerate(data.token_masks):
                self.inputs.clear()
                read = partial(data.token_masks.__getitem__, self.index)
                with Products({}, lambda *_: None, read) if self.masks.marked else nullcontext():
                    data.output(self.index)
        self._check_calls()
        sums = torch.stack(of_all_ranks(self.sums)).sum(0)  # so that all ranks remove the same blocks
        influences, units = sums[..., 0] / sums[..., 1], len(sums)
        for first in range(units):
            for length in range(2, min(self.longest, units - first) + 1):
                if not sums[first, length - 1, 1]:
                    influences[first, length - 1] = influences[first : first + length, 0].sum()
        return influences

    def _keep_input(self, at: int, block: nn.Module, args: Any, kwargs: Any) -> None:
        before, inputs = first_tensor([args, kwargs]), self.inputs
        if at - 1 not in inputs or before is None or before.shape != inputs[at - 1].shape:
            inputs.clear()
        if before is not None:
            inputs[at] = _normalized(before)
        inputs.pop(at - self.longest, None)  # a run from there would be too long
        self.is_decoder = self.masks.of_decoder([args, kwargs])
        self.calls[at] += 1

    def _add(self, at: int, block: nn.Module, args: Any, output: Any) -> None:
        """Add the influences of the runs that end with this block."""
        before, after = self.inputs.get(at), first_tensor(output)
        if self.calls[at] > self.index + 1:
            return  # `_check_calls` raises an error
        if before is None or after is None or before.shape != after.shape:
            raise SparsityError(f"shrink_layers: {self.path}.{at} gives no tensor of its input's shape")
        after = _normalized(after)
        for first, before in self.inputs.items():
            halves = (before.to(after.device) - after).square().sum(-1, keepdim=True) / 2  # 1 - cosine, not rounded
            of_tokens = token_rows(halves, self.masks.masks[self.is_decoder], self.orders).double()
            if not of_tokens.isfinite().all():
                raise SparsityError(
                    f"shrink_layers: {self.path}.{at} reads or gives values that are not finite for batch "
                    f"{self.index}; leave such inputs out, or mend the model"
                )
            self.sums[first, at - first, 0] += float(of_tokens.sum())
            self.sums[first, at - first, 1] += len(of_tokens)

    def _check_calls(self) -> None:
        """Raise an error unless each block was called once for a batch."""
        calls, most = self.calls, max(self.calls, default=0)
        if not calls or 0 in calls:
            raise SparsityError(f"shrink_layers: not all modules of {self.path} were called")
        if most > len(self.data.batches):
            raise SparsityError(
                f"shrink_layers: {self.path}.{calls.index(most)} is called {most / len(self.data.batches):g} times for "
                "a batch, as in models whose layers share weights, so no block can be removed for one of these calls; "
                "lower the number of calls, such as config.num_hidden_layers"
            )


def _normalized(x: Tensor) -> Tensor:
    """Return the vectors of a tensor with length one."""
    return F.normalize(x.double(), dim=-1).to(torch.promote_types(x.dtype, torch.float32))


def _of_least_influence(influences: Tensor, count: int) -> list[int]:
    """Return `count` blocks, or fewer if others have to stay, in runs whose influences have the smallest sum."""
    units, costs = len(influences), influences.tolist()
    # best[at]: for each number of blocks, the smallest sum of their influences, and the blocks, of those from `at` on.
    best = [{0: (0.0, list[int]())} for _ in range(units + 2)]
    for at in reversed(range(units)):
        best[at] = dict(best[at + 1])
        for end in range(at + 1, min(at + count, units) + 1):
            for number, (cost, gone) in best[end + 1].items():  # the block after a run remains
                whole, total = costs[at][end - at - 1] + cost, end - at + number
                if total <= count and whole < best[at].get(total, (torch.inf,))[0]:
                    best[at][total] = (whole, [*range(at, end), *gone])
    return best[0][max(best[0])][1]


def _check_layer_types(model: nn.Module, path: str, kept: Sequence[int]) -> None:
    """Raise an error unless caches of keys and values, which follow the config, fit the blocks that remain."""
    config, blocks = config_of(model, path)[1], model.get_submodule(path)
    types = getattr(config, "layer_types", None) or []
    is_computed = len(types) == len([*blocks.children()]) and "layer_types" not in vars(config)
    if is_computed and types[: len(kept)] != [types[at] for at in kept]:
        raise SparsityError(
            f"{type(config).__name__} computes layer_types, and cannot hold those of the blocks {kept} alone, so "
            "caches would not fit"
        )


class _Oracle:
    """What the dense model gives on the first batch if it acts without some units, as smaller models are to."""

    def __init__(
        self,
        data: CalibrationData,
        act_without: Callable[[nn.Module, Sequence[Removal]], None],  # changes a copy
    ) -> None:
        self.data, self.fields, self._act_without = data, ConfigFields.of(data.model), act_without
        calls = list[Any]()
        with calls_of([data.model], calls), torch.no_grad(), eval_mode(data.model):
            self.dense_output = data.output(0)
        if not calls:
            raise SparsityError(
                "forward calls a module of the model, but not the model itself, so outputs without a part of the model "
                "cannot be compared; give a forward that calls model(...)"
            )
        self._inputs = _example_inputs(data.model, *calls[0])

    def check_repeats(self) -> None:
        """Raise an error if the dense model gives other outputs when it runs once more."""
        Reference(self.data.model, self._inputs).check_repeats()

    def smaller(
        self, removals: Sequence[Removal], changes: Sequence[Change], dry_run: bool
    ) -> tuple[nn.Module, ShrinkReport]:
        """Return the model without units that are not zero, or after a dry run the dense one, if outputs are right."""
        acting = light_copy(self.data.model)
        self._act_without(acting, removals)
        reference = Reference(self.data.model, self._inputs, acting=acting)
        keys: dict[str, Any] = {"by_caller": True, "changes": changes, "single_use": dry_run}
        small, report = verify_removal(reference, removals, None if dry_run else self.fields, **keys)
        kept = (f"{r.bound.name}: the ratio, rounded, drops none of {r.scope_units}" for r in removals if r.is_empty)
        report = replace(report, left_out=tuple(kept), call=text_of_call())
        if dry_run:
            remove_copied_values(small, self.data.model)
            return self.data.model, replace(report, manifest={})
        return small, replace(report, error_to_dense=replace(self.data, model=small).error_to(self.dense_output))


def _example_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments of a call as example inputs: a tuple, or a dict of all of them if some are named."""
    if not (args and kwargs):
        return kwargs or args
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(names) < len(args):
        raise SparsityError(
            f"forward calls {type(model).__name__} with both keyword arguments and positional arguments without names; "
            "name all arguments"
        )
    return dict(zip(names, args, strict=False)) | kwargs


def _check_model(model: nn.Module, caller: str) -> None:
    """Raise an error unless a model can be made smaller here."""
    checked_model(model, caller)
    if torch.is_inference_mode_enabled():
        raise SparsityError(
            f"{caller}: in inference mode, weights of the result could not be trained; call it outside, or use no_grad"
        )
