"""`shrink_experts` and `shrink_layers` remove experts, blocks, or parts of blocks, which changes outputs."""

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..coupling import BoundCoupling, expert_couplings, expert_scores
from ..coupling.bound import Part, is_list
from ..coupling.experts import rated_experts
from ..distributed import is_sharded
from ..errors import SparsityError
from ..models.loading import loaded, refuse_unloadable
from ..models.progress import progress_bar
from ..models.running import Forward, call, check_batches, checked_list, eval_mode, first_tensor, kept_generators
from ..oneshot.chain import CalibrationData
from ..oneshot.walk import Walk
from ..selection import keep_mask
from ..structure import checked_level, sparsity_to_nnz
from .compaction import verified
from .modules import Zeros, attention_by_type, config_of
from .remove import Removal, check_multiple, rounded
from .report import Compaction
from .sizes import fitting_engines, has_config
from .verify import Reference

# {kind: a regular expression that is found in the name that a module of this kind has in its block}
_NAMES = {"mlp": "mlp|ffn|feed_?forward|moe|expert", "attention": "attn|attention"}


@kept_generators()
def shrink_experts(
    model: nn.Module,
    batches: Sequence[Any],
    ratio: float = 0.5,
    *,
    multiple_of: int = 1,
    forward: Forward | None = None,
) -> tuple[nn.Module, Compaction]:
    """Remove a fraction of the experts of every layer: those with the lowest `expert_scores` (REAP, arXiv 2510.13999).

    Every layer keeps the same number of experts, so that the config can hold it. If routers choose among groups of
    experts, every group keeps the same number too. The result acts as if routers never chose the removed experts. The
    report's `difference` says how much the outputs on the first batch differ from those of the given model; outputs are
    not compared otherwise.

    Args:
        model: A model whose experts `expert_couplings` finds, packed as in transformers 5. It is not changed. It may be
            offloaded by accelerate, because all batches pass one block before the next one is loaded. The result is
            then offloaded too.
        batches, forward: As for `expert_scores`.
        ratio: The fraction of the experts that is removed. It is rounded so that a multiple of `multiple_of` is kept.
        multiple_of: Each group, or each layer if there are no groups, keeps a multiple of this number of experts, or
            all of them.

    Returns:
        The smaller model, and a `Compaction`.

    Raises:
        SparsityError: As for `expert_scores`; or a token needs more experts than are kept; or weights are sharded.

    >>> small, report = shrink_experts(model, batches, 0.25)  # doctest: +SKIP
    """
    if any(map(is_sharded, model.parameters())):
        raise SparsityError("shrink_experts: weights are sharded over ranks; remove experts before fully_shard")
    refuse_unloadable(model, "shrink_experts")
    level, batches = checked_level(ratio, "shrink_experts: ratio: "), checked_list(batches, forward, "shrink_experts")
    check_multiple(multiple_of, "shrink_experts: ")
    coupling = expert_couplings(model).get("experts")
    if coupling is None:
        raise SparsityError("shrink_experts: the model has no router, a matrix with a row for each expert")
    bounds = coupling.bind(model)
    if len({bound.grid for bound in bounds}) > 1:  # which no field of a config describes
        attrs = {path: axes for path, axes in coupling.attrs.items() if not path.startswith("config.")}
        bounds = replace(coupling, attrs=attrs).bind(model)
    owners = [model.get_submodule(member.fqn.rpartition(".")[0]) for bound in bounds for member in bound.members]
    scores, removals = _expert_scores(model, owners, batches, forward), []
    for bound in bounds:
        units, names = bound.grid[-1], [member.fqn.rpartition(".")[0] for member in bound.members]
        path = next(name for name in names if name in scores)
        kept = rounded(sparsity_to_nnz(level, units, "shrink_experts: ratio: "), units, multiple_of)
        keep = keep_mask(scores[path].reshape(-1, units), kept).reshape(bound.grid)
        removals.append(Removal(bound=bound, keep=keep))
    least = getattr(model.config.get_text_config(), "num_experts_per_tok", 1) if has_config(model) else 1  # type: ignore
    if (kept := min(int(removal.keep.sum()) for removal in removals)) < least:
        raise SparsityError(f"shrink_experts: a token needs {least} experts, but {ratio=} keeps {kept}")
    return _without(model, removals, batches, forward)


@torch.no_grad()
def _expert_scores(
    model: nn.Module, owners: Sequence[nn.Module], batches: Sequence[Any], forward: Forward | None
) -> dict[str, Tensor]:
    """Return `expert_scores`, computed block by block: all batches pass a block before the next one is loaded."""
    data = CalibrationData.checked(model, batches, forward, False, "shrink_experts")
    walk = Walk(data, (), layers=owners)
    inside = {module for block in walk.blocks for module in block.modules()}
    if not inside.issuperset(owners):  # a walk over the blocks would not reach all experts
        return expert_scores(model, batches, forward)
    with rated_experts(model) as scores, eval_mode(model):
        stream = walk.new_stream(data, walk.blocks[0])
        for block in progress_bar(walk.blocks, "shrink_experts", "block"):
            with loaded(model, [block]):
                stream.advance(block)
    return scores


@kept_generators()
def shrink_layers(
    model: nn.Module,
    batches: Sequence[Any],
    ratio: float = 0.25,
    *,
    kinds: Sequence[str] = ("blocks",),
    blocks: str | None = None,
    forward: Forward | None = None,
) -> tuple[nn.Module, Compaction]:
    """Remove the repeated blocks, or the attention and MLPs of blocks, that change their input least.

    The influence of a block is one minus the cosine of its input and its output, averaged over tokens (ShortGPT,
    arXiv 2403.03853). The influence of an attention or MLP is computed from the hidden states before and after its
    output is added to them. The report's `difference` says how much the outputs on the first batch change.

    Blocks that remain are renumbered (`layer_idx`), also in the config of a transformers model. A removed attention or
    MLP gives zeros, as the config says in `per_layer_config`: `{3: {"skip": ["mlp"]}}`. If the model's class does not
    read this key, `report.not_in_config` says so, and `export.load_pretrained` loads what `save_pretrained` writes.

    Args:
        model: The model, which is not changed.
        batches, forward: As for `expert_scores`.
        ratio: The fraction of the blocks that is removed, or of all modules of the given kinds. At least one attention
            of each type (full, sliding) is kept, because caches count tokens by it.
        kinds: `("blocks",)` (default), or one or both of `("attention", "mlp")`. Attention and MLPs are modules of a
            block whose names say so, and whose outputs are added to the hidden states. No norm may follow the sum.
        blocks: The name of the `nn.ModuleList` of the blocks; None (default) takes the one with the most parameters.

    Returns:
        The smaller model, and a `Compaction`.

    Raises:
        SparsityError: There is no such list or module; or a block returns no tensor of its input's shape; or a norm
            follows the sum, as in BERT; or the config computes the types of blocks, as Jamba's does, and cannot hold
            those that remain.

    >>> small, report = shrink_layers(model, batches, 0.25)  # doctest: +SKIP
    >>> small, report = shrink_layers(model, batches, 0.25, kinds=("attention", "mlp"))  # doctest: +SKIP
    """
    check_batches(batches, None, forward, "shrink_layers")
    level, of_blocks = checked_level(ratio, "shrink_layers: "), tuple(kinds) == ("blocks",)
    if isinstance(kinds, str) or not (of_blocks or (kinds and {*kinds} <= _NAMES.keys())):
        raise SparsityError(f"shrink_layers: kinds must be ('blocks',) or some of ('attention', 'mlp'), got {kinds!r}")
    lists: dict[str, Any] = {name: m for name, m in model.named_modules() if is_list(m) and blocks in (None, name)}
    if not lists:
        raise SparsityError(f"shrink_layers: the model has no nn.ModuleList{f' {blocks!r}' if blocks else ''}")
    path = max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()))
    batches = list(batches)
    influence_of = _influences(model, path, of_blocks, batches, forward)
    units = tuple(part for part in influence_of if part.kind in kinds)
    if absent := sorted({*kinds} - {part.kind for part in units}):
        first: dict[str, str] = {}  # {name in a block: the first module with this name}
        for part in influence_of:
            first.setdefault(part.name.rpartition(".")[2], part.name)
        what = " or ".join(map(repr, absent))
        raise SparsityError(f"shrink_layers: none of {', '.join(first.values())} has a name of the kind {what}")
    kept, influences = sparsity_to_nnz(level, len(units), ""), torch.stack([influence_of[part] for part in units])
    if kept == 0:
        what = "blocks" if of_blocks else f"modules of {' and '.join(kinds)}"
        raise SparsityError(f"shrink_layers: ratio={ratio} keeps none of the {len(units)} {what} in {path}")
    for same_type in attention_by_type(model, units).values():  # the most influential one of each type is kept
        influences[units.index(max(same_type, key=lambda part: float(influence_of[part])))] = torch.inf
    keep = keep_mask(influences[None], max(kept, int(influences.isinf().sum())))[0]
    if of_blocks:
        _check_blocks(model, path, keep.nonzero().flatten().tolist())
    keys: dict[str, Any] = {"captured": (), "members": (), "scope": (), "attrs": {}}
    keys |= {"name": "layers", "lists": (path,)} if of_blocks else {"name": " and ".join(kinds), "parts": units}
    coupling = BoundCoupling(unit="u", sizes={"u": len(units)}, **keys)
    return _without(model, [Removal(bound=coupling, keep=keep)], batches, forward)


def _influences(
    model: nn.Module, path: str, of_blocks: bool, batches: Sequence[Any], forward: Forward | None
) -> dict[Part, Tensor]:
    """Return the influence of each block of a list, or of each module of a block that is added to its hidden states."""
    layers: Any = model.get_submodule(path)
    cosines: dict[str, dict[Part, list[Tensor]]] = {f"{path}.{at}": {} for at in range(len(layers))}
    outputs: dict[str, Any] = {}  # {name in the block that runs now: the output of this module}
    called: Counter[str] = Counter()

    def record(name: str, block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        called[name] += 1
        before, after = first_tensor([args, kwargs]), first_tensor(output)
        if before is None or after is None or before.shape != after.shape:
            raise SparsityError(f"shrink_layers: {name} gives no tensor of its input's shape")
        parts, states = [Part(name, "blocks", 0)], [before, after]
        if not of_blocks:
            parts = [_part(f"{name}.{child}", output) for child, output in outputs.items()]
            states = _states(block, args, kwargs, dict(outputs))
            outputs.clear()
            if not (states[0].equal(before) and states[-1].equal(after)):
                raise SparsityError(
                    f"shrink_layers: {name} does not only add {', '.join(p.name for p in parts) or 'modules'} to its "
                    "input (a norm may follow the sum, as in BERT); remove whole blocks, kinds=('blocks',)"
                )
        for part, state, changed in zip(parts, states, states[1:], strict=False):
            cosine = F.cosine_similarity(state.double(), changed.double(), dim=-1)
            cosines[name].setdefault(part, []).append(cosine.flatten())

    with ExitStack() as hooks, torch.no_grad(), eval_mode(model):
        for name, block in zip(cosines, layers, strict=True):
            hooks.enter_context(block.register_forward_hook(partial(record, name), with_kwargs=True))
            for child, module in block.named_children() if not of_blocks else ():
                if isinstance(module, nn.Linear) or [*module.children()]:  # norms and dropout are neither
                    # A hook is called with the module, its inputs and its output. `child=child` keeps this child.
                    keep = lambda *call, child=child: outputs.update({child: _changed(torch.clone, call[-1])})  # noqa: E731
                    hooks.enter_context(module.register_forward_hook(keep))
        for batch in batches:
            (forward or call)(model, batch)
    if (name := max(called, key=called.__getitem__, default="")) and called[name] > len(batches):
        raise SparsityError(
            f"shrink_layers: {name} is called {called[name] / len(batches):g} times for a batch, as in models whose "
            "layers share weights, so no block can be removed for one of these calls; lower the number of calls, such "
            "as config.num_hidden_layers"
        )
    if missing := [name for name, parts in cosines.items() if not parts]:
        why = "" if of_blocks else f", or {missing[0]} calls no module that may be an attention or an MLP"
        raise SparsityError(f"shrink_layers: not all modules of {path} were called{why}")
    return {part: 1 - torch.cat(values).mean() for parts in cosines.values() for part, values in parts.items()}


def _check_blocks(model: nn.Module, path: str, kept: Sequence[int]) -> None:
    """Raise an error unless caches of keys and values, which follow the config, fit the blocks that remain."""
    config, blocks = config_of(model, path)[1], model.get_submodule(path)
    types = getattr(config, "layer_types", None) or []
    if any(isinstance(module, Zeros) for module in blocks.modules()):
        raise SparsityError(
            f"shrink_layers: {path} lost attention or MLPs; remove blocks first, and attention or MLPs after that"
        )
    is_computed = len(types) == len([*blocks.children()]) and "layer_types" not in vars(config)
    if is_computed and types[: len(kept)] != [types[at] for at in kept]:
        raise SparsityError(
            f"shrink_layers: {type(config).__name__} computes layer_types, and cannot hold those of the blocks {kept} "
            f"of {path} alone, so caches would not fit. Remove attention or MLPs, kinds=('attention', 'mlp')"
        )


def _part(name: str, output: Any) -> Part:
    """Return a module of a block as a `Part`; its kind is "" if its name says none."""
    last = name.rpartition(".")[2].lower()
    kind = next((kind for kind, pattern in _NAMES.items() if re.search(pattern, last)), "")
    return Part(name, kind, len(output) if isinstance(output, (tuple, list)) else 0)


def _changed(change: Callable[[Tensor], Tensor], output: Any) -> Any:
    """Return an output with `change` of its first tensor: zeros, or a clone, since blocks may add to it in place."""
    if isinstance(output, (tuple, list)):
        return (_changed(change, output[0]), *output[1:])
    return change(output) if isinstance(output, Tensor) else output


def _states(block: nn.Module, args: Any, kwargs: Any, outputs: Mapping[str, Any]) -> list[Any]:
    """Return what a block gives if the first 0, 1, 2, ... of its modules in `outputs` give these, the rest zeros."""
    constants, states = {name: _changed(torch.zeros_like, output) for name, output in outputs.items()}, []
    try:
        for last in (None, *outputs):
            constants |= {last: outputs[last]} if last else {}
            for name, constant in constants.items():
                # An attribute of the instance hides the module, which `nn.Module.__getattr__` would find.
                vars(block)[name] = lambda *_, constant=constant, **__: _changed(torch.clone, constant)
            states.append(first_tensor(block.forward(*args, **kwargs)))
    finally:
        for name in outputs:
            vars(block).pop(name, None)
    return states


def _without(
    model: nn.Module, removals: Sequence[Removal], batches: Sequence[Any], forward: Forward | None
) -> tuple[nn.Module, Compaction]:
    """Return the model without units that are not zero, and a report; its difference is that on the first batch."""
    calls: list[Any] = []
    record = lambda _, args, kwargs: calls.append((args, kwargs))  # noqa: E731
    with model.register_forward_pre_hook(record, with_kwargs=True), torch.no_grad(), eval_mode(model):
        (forward or call)(model, next(iter(batches)))
    inputs = _example_inputs(model, *calls[0])
    pairs = [(part.name, r.keep.flatten()[at]) for r in removals for at, part in enumerate(r.bound.parts)]
    dropped = [name for name, kept in pairs if not kept]
    # Outputs change, so this reference accepts any finite difference, and only measures it.
    dense = Reference(model, inputs, sys.float_info.max)
    with ExitStack() as hooks:  # outputs must equal those of the model in which dropped parts give zeros
        for name in dropped:
            zeros = lambda *call: _changed(torch.zeros_like, call[-1])  # noqa: E731 (called with module, inputs, output)
            hooks.enter_context(model.get_submodule(name).register_forward_hook(zeros))
        small, report = verified(Reference(model, inputs) if dropped else dense, removals, with_config=True)
    if dropped:  # the report has the difference from the model with the hooks, which is none
        report = replace(report, difference=dense.compare(small).difference)
    if dropped and report.not_in_config:
        why = f"{type(small).__name__} constructs {', '.join(dropped)}, whatever per_layer_config says"
        report = replace(report, not_in_config=why)
    fits = fitting_engines(small) if report.not_in_config == "" else ()
    kept = (f"{r.bound.name}: the ratio, rounded, drops none of {r.scope_units}" for r in removals if r.is_empty)
    notes = ["what is removed is not zero"] if not all(removal.is_empty for removal in removals) else []
    return small, replace(report, fits=fits, notes=(*report.notes, *notes), left_out=(*report.left_out, *kept))


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
