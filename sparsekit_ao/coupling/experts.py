"""The couplings and scores of a mixture of experts, which a trace of one forward pass cannot find.

Which experts run depends on values, so `discover` leaves them as they are. Here they are found by names and shapes.
"""

import functools
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import of_all_ranks
from ..errors import SparsityError, checked_model
from ..models.names import by_pattern, named_tensors
from ..models.running import Forward, TokenMask, TokenMasks, call, check_batches, eval_mode, token_masks_of
from .bound import is_list
from .coupling import Coupling

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "experts_per_rank")
_LISTED_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(gate_proj|w1)\.weight")
_UP_AND_DOWN = {"gate_proj": (("gate_proj", "up_proj"), "down_proj"), "w1": (("w1", "w3"), "w2")}


def expert_couplings(model: nn.Module, experts_fqn: str | None = None) -> dict[str, Coupling]:
    """Return the couplings of a mixture of experts: `"expert_units"`, and `"experts"` where there is a router.

    `"expert_units"` are the hidden units of each expert; `"experts"` are whole experts with their rows of the router.
    To remove whole experts is not exact: a router may still choose an expert whose weights are zero, but not one whose
    row is removed. So `compact` takes them only with a larger `tolerance`, such as 10, and reports the difference.

    Two kinds of experts are known. Packed experts are the parameters `gate_up_proj` (experts, 2 * hidden, width) and
    `down_proj` (experts, width, hidden), as in Mixtral, Qwen-MoE and DeepSeek of transformers. Llama 4 stores the
    transposed matrices, and so does GPT-OSS, with biases and alternating gate and up. Listed experts are modules
    `experts.0`, ... of an `nn.ModuleList`, with `gate_proj`, `up_proj` and `down_proj`, or `w1`, `w3` and `w2`.

    `attrs` of the couplings has the integers of modules and the config that count experts or hidden units, so that
    `compact` updates them. Use `joint_entries` for couplings that share a tensor, and `discover` to find all other
    units of the model, such as heads and the hidden size.

    Args:
        model: The model, before or after `prepare`; it is not changed.
        experts_fqn: The name of a module of packed experts, or of a list of experts, for a model that has several kinds
            of layers with experts. None (default) takes the first, if there are any the first packed ones.

    Raises:
        SparsityError: There are no experts with these names, or `experts_fqn` is none of them.

    >>> def expert():
    ...     return torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in ("w1", "w3", "w2")})
    >>> experts = torch.nn.ModuleList([expert(), expert()])
    >>> couplings = expert_couplings(torch.nn.ModuleDict({"experts": experts, "gate": torch.nn.Linear(4, 2)}))
    >>> couplings["expert_units"].members
    {'experts.*.w1.weight': 'u i', 'experts.*.w3.weight': 'u i', 'experts.*.w2.weight': 'o u'}
    >>> couplings["experts"].members
    {'gate.weight': 'u i', 'gate.bias': 'u'}
    """
    tensors = {**dict(named_tensors(checked_model(model, "expert_couplings"))), **dict(model.named_buffers())}
    packed, listed = packed_experts(tensors), dict[str, re.Match[str]]()
    for match in filter(None, map(_LISTED_EXPERT.fullmatch, tensors)):
        listed.setdefault(match[1], match)
    paths = [*packed, *listed]
    if paths and experts_fqn not in (*paths, None):
        raise SparsityError(
            f"expert_couplings: experts_fqn must be the name of a module or list of experts, got {experts_fqn!r}; the "
            f"model has {', '.join(by_pattern(paths))}"
        )
    path = experts_fqn if experts_fqn in paths else next(iter(paths), "")
    name, experts = _starred(path), model.get_submodule(path)
    if path in packed:
        sizes = [key for key in ("intermediate_dim", "intermediate_size") if type(getattr(experts, key, None)) is int]
        attrs = {f"{name}.{key}": "u" for key in sizes}
        up, down = tensors[f"{path}.gate_up_proj"], tensors[f"{path}.down_proj"]
        members = {"gate_up_proj": "s (g u) i", "down_proj": "s o u"}
        if up.shape[1] != 2 * down.shape[2]:
            alternates = not getattr(experts, "is_concatenated", f"{path}.gate_up_proj_bias" not in tensors)
            both = "(u g)" if alternates else "(g u)"
            members = {"gate_up_proj": f"s i {both}", "gate_up_proj_bias": f"s {both}", "down_proj": "s u o"}
        members = {f"{name}.{key}": axes for key, axes in members.items() if f"{path}.{key}" in tensors}
        units = Coupling(members, scope="s", sizes={"g": 2}, attrs=attrs, name="expert_units")
        packs = {fqn: t for fqn, t in tensors.items() if fqn.rpartition(".")[0] == path and len(t) == len(down)}
        whole = _whole_experts(model, tensors, path, len(down), {_starred(fqn): t.ndim for fqn, t in packs.items()})
    elif path in listed:
        ups, name_of_down = _UP_AND_DOWN[listed[path][3]]
        axes = {f"{up}.weight": "u i" for up in ups} | {f"{up}.bias": "u" for up in ups}
        axes[f"{name_of_down}.weight"], first = "o u", f"{path}.{listed[path][2]}"
        members = {f"{name}.*.{key}": text for key, text in axes.items() if f"{first}.{key}" in tensors}
        units = Coupling(members, name="expert_units")
        whole = _whole_experts(model, tensors, path, len(experts), {}, lists=(name,)) if is_list(experts) else {}  # type: ignore
    else:
        others = [f"{fqn} {tuple(t.shape)}" for fqn, t in tensors.items() if t.ndim == 3 and re.search("moe|mlp", fqn)]
        raise SparsityError(
            f"expert_couplings: {type(model).__name__} has no experts: no '*.gate_up_proj' (experts, 2 * hidden, "
            "width) beside '*.down_proj', and no '*.experts.0.gate_proj.weight' or '*.experts.0.w1.weight'. "
            f"{f'Experts may be packed in {others[0]}, which is not supported. ' if others else ''}Use "
            "coupling.discover(model, example_inputs), which suggests couplings for any model, or write them by hand "
            "(Coupling)."
        )
    return {"expert_units": units} | whole


def _whole_experts(
    model: nn.Module, tensors: Mapping[str, Tensor], path: str, experts: int, packed: Mapping[str, int], **keys: Any
) -> dict[str, Coupling]:
    """Return `"experts"`; {} without a router, a module beside them whose `weight` has a row for each of them."""
    parent = path.rpartition(".")[0]
    beside = re.compile(re.escape(f"{parent}." if parent else "") + r"[^.]+(\.gate)?\.weight")
    weights = [fqn for fqn, t in tensors.items() if beside.fullmatch(fqn) and t.ndim == 2 and len(t) == experts]
    routers = [fqn.removesuffix(".weight") for fqn in weights]
    if not routers:
        return {}
    # Some routers choose among groups of experts first.
    ints = [getattr(model.get_submodule(router), key, 1) for router in routers for key in ("num_group", "n_group")]
    groups = max(n for n in ints if isinstance(n, int))
    rows, axes = ("(s u)", "s u") if groups > 1 else ("u", "u")
    members = {name: " ".join([rows, *"ab"[: dims - 1]]) for name, dims in packed.items()}
    for fqn in (fqn for fqn, t in tensors.items() if fqn.rpartition(".")[0] == parent and t.shape == (experts,)):
        members[_starred(fqn)] = rows  # a bias of the scores, beside the router
    for fqn, tensor in tensors.items():
        if fqn.startswith(tuple(f"{router}." for router in routers)):
            if tensor.shape[:1] == (experts,):
                members[_starred(fqn)] = rows + " i" * (tensor.ndim - 1)
            elif tensor.numel() == tensor.shape[-1] == experts:  # (1, experts)
                members[_starred(fqn)] = "i " * (tensor.ndim - 1) + rows
    modules = [router.removesuffix(".gate") for router in routers]  # which may hold the matrix as their `gate`
    around = dict.fromkeys(["", *itertools.accumulate(path.split("."), "{}.{}".format), *modules, *routers])
    holders = {f"{_starred(name)}.".lstrip("."): vars(model.get_submodule(name)) for name in around}
    configs = {id(of): (f"{name}config.", of) for name, ints in [*holders.items()][::-1] if (of := ints.get("config"))}
    holders |= {name: vars(config) for name, config in configs.values()}
    counting = [f"{name}{key}" for name, ints in holders.items() for key in _EXPERT_COUNTS if ints.get(key) == experts]
    keys |= {"scope": "s", "sizes": {"s": groups}} if groups > 1 else {}
    return {"experts": Coupling(members, attrs=dict.fromkeys(counting, axes), name="experts", **keys)}


def packed_experts(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the modules that hold packed experts."""
    return [fqn.rpartition(".")[0] for fqn in tensors if _is_packed(fqn, tensors)]


def _is_packed(fqn: str, tensors: Mapping[str, Tensor]) -> bool:
    up, down = tensors[fqn], tensors.get(f"{fqn.rpartition('.')[0]}.down_proj")
    if not fqn.endswith(".gate_up_proj") or down is None or (up.ndim, down.ndim) != (3, 3):
        return False
    experts, first, second = down.shape
    return tuple(up.shape) in ((experts, 2 * second, first), (experts, second, 2 * first))


def expert_scores(
    model: nn.Module, batches: Iterable[Any], forward: Forward | None = None, token_mask: TokenMask = None
) -> dict[str, Tensor]:
    """Score the experts of a mixture by REAP: mean of gate value times norm of the output (arXiv 2510.13999).

    The mean is over the tokens for which the router chooses the expert; an expert that no token reaches scores 0.
    Experts must be packed in one module. It is called with tokens, the indices of their experts and the router's
    weights, as in transformers 5, or with the weighted tokens of every expert, as in Llama 4.

    Args:
        model: The model, which runs in eval mode and is not changed.
        batches: Calibration data, as for `one_shot`. In distributed training each rank has batches of its own, and the
            scores are those of all of them.
        forward: A function `(model, batch) -> output` that is called instead of the model.
        token_mask: Which tokens of the batches count, as for `one_shot`.

    Returns:
        {name of the module of experts: scores, float64 (experts,)}.

    Raises:
        SparsityError: There are no such experts, or no batches.

    >>> expert_scores(model, batches)["model.layers.0.mlp.experts"].shape  # doctest: +SKIP
    torch.Size([128])
    """
    check_batches(batches, token_mask, forward, "expert_scores")
    masks = list[TokenMasks]()
    with rated_experts(model, masks) as scores, torch.no_grad(), eval_mode(model):
        for batch in batches:
            masks.append(token_masks_of(batch, token_mask, "expert_scores"))
            (forward or call)(model, batch)
    return scores


@contextmanager
def rated_experts(model: nn.Module, masks: Sequence[TokenMasks]) -> Iterator[dict[str, Tensor]]:
    """Yield what `expert_scores` returns, which is filled at the end; inside, experts run once for each mask."""
    tensors = dict(named_tensors(checked_model(model, "expert_scores")))
    paths = packed_experts(tensors)
    counts = {path: len(tensors[f"{path}.down_proj"]) for path in paths}
    sums = {path: torch.zeros(2, count, dtype=torch.float64, device="cpu") for path, count in counts.items()}
    if not paths:
        raise SparsityError(f"expert_scores: {type(model).__name__} has no packed experts; see expert_couplings")
    scores: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for path, totals in sums.items():
            hook = functools.partial(_add_scores, totals, iter(masks))
            hooks.enter_context(model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True))
        yield scores
    ranks = of_all_ranks(sums)
    sums = {path: sum(own[path] for own in ranks) for path in sums}
    if not any(bool(counts.any()) for _, counts in sums.values()):
        raise SparsityError(
            "expert_scores: no token reached an expert; there are no batches, or experts are not called"
        )
    scores.update({path: total / counts.clamp(min=1) for path, (total, counts) in sums.items()})


def _add_scores(
    totals: Tensor, masks: Iterator[TokenMasks], experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """The hook before experts run: add gate values times norms, and numbers of tokens, to [2, experts]."""
    arguments, masks_of_batch = inspect.signature(experts.forward).bind(*args, **kwargs).args[:3], next(masks, None)
    if masks_of_batch is None:
        raise SparsityError("expert_scores: experts are called several times for a batch, which is not supported")
    if len(arguments) == 1:  # Llama 4: all tokens for each expert, times their gates, 0 for all but the chosen ones
        outputs, tokens = (t.unflatten(0, (totals.shape[1], -1)) for t in (experts.forward(*arguments), *arguments))
        counted = _counted(masks_of_batch.masks[0], tokens.shape[1]).to(tokens.device)
        outputs, tokens = outputs[:, counted], tokens[:, counted]
        totals += torch.stack([outputs.double().norm(dim=-1).sum(1), tokens.any(-1).sum(1)]).to(totals)
        return
    counted = _counted(masks_of_batch.masks[0], len(arguments[0].flatten(0, -2))).to(arguments[0].device)
    tokens, chosen, gates = (argument.flatten(0, -2)[counted] for argument in arguments)
    for expert in chosen.unique().tolist():
        at, slot = (chosen == expert).nonzero(as_tuple=True)
        output = experts.forward(tokens[at], chosen[at, slot, None], torch.ones_like(gates[at, :1]))
        totals[0, expert] += float((gates[at, slot].double() * output.double().norm(dim=-1)).sum())
        totals[1, expert] += len(at)


def _counted(mask: Tensor | None, tokens: int) -> Tensor:
    """Return which of the tokens that experts get count: bool (tokens,)."""
    if mask is None:
        return torch.ones(tokens, dtype=torch.bool, device="cpu")
    if tokens % mask.numel() or (mask.ndim > 1 and tokens != mask.numel()):
        raise SparsityError(
            f"expert_scores: experts get {tokens} tokens of a batch, whose token mask is {tuple(mask.shape)}; give "
            "token_mask=False to count all tokens"
        )
    return mask.bool().flatten().repeat(tokens // mask.numel())


def _starred(path: str) -> str:
    """Replace the first number of a name, that of the layer, by `*`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path, count=1)
