"""Whole modules that are dropped: blocks and experts leave their lists.

What numbers or counts the modules of a list follows: `layer_idx`, `num_layers`, fields of a config by layer.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..coupling.bound import is_list
from ..errors import SparsityError
from ..models.running import tensors_in
from .remove import Removal

_COUNTS = re.compile(r"(n|num)_?(?!.*(per|shared)_)\w*(layers?|blocks?)|depth")  # attributes that count blocks
_NUMBERS = ("layer_idx", "layer_id")  # attributes that hold the number of a layer, its place in caches and lists
_BY_LAYER = re.compile(r".*layer.*|.*(pattern|types)|intermediate_size")  # fields of a config with an entry for each
_INDICES = re.compile(r"[a-z]\w*(indices|indexes|idxs|layer_ids|layers)")  # fields that list numbers of blocks
_READ = re.compile(r".*(out_|feature|deepstack).*")  # those that list blocks whose outputs are read


def check_lists(model: nn.Module, removals: Sequence[Removal], where: str) -> None:
    """Raise unless all lists of the couplings are in the model, each once and with a module for each unit."""
    modules = dict(model.named_modules(remove_duplicate=False))
    seen: dict[int, str] = {}
    for removal in removals:
        name, units = removal.bound.name, removal.bound.units
        for path in removal.bound.lists:
            module = modules.get(path)
            if module is None or not is_list(module) or len(module) != units:
                raise SparsityError(f"{where}coupling {name!r}: {path!r} is not an nn.ModuleList of {units} modules")
            if id(module) in seen:
                raise SparsityError(
                    f"{where}the couplings {seen[id(module)]!r} and {name!r} both drop modules of {path!r}"
                )
            seen[id(module)] = name


def drop_modules(model: nn.Module, removals: Sequence[Removal]) -> None:
    """Drop the modules of dropped units from their lists, in place; later ones move up, also in what numbers them."""
    # All lists are looked up first, since one list may be in a module of another.
    paths = [(path, removal) for removal in removals for path in removal.bound.lists]
    lists = [
        (*map(model.get_submodule, (p, p.rpartition(".")[0])), *_part_with_config(model, p), layer_fields(model, p))
        for p, _ in paths
    ]
    counts = _counts_of_lists(model, {path: removal.kept for path, removal in paths})
    for (_, removal), (modules, holder, inside, whole, config, fields) in zip(paths, lists, strict=True):
        kept = removal.keep.flatten().nonzero().flatten().tolist()
        for at in (~removal.keep.flatten()).nonzero().flatten().flip(0).tolist():
            del modules[at]
        before = getattr(modules, "_dense_indices", range(removal.keep.numel()))
        vars(modules)["_dense_indices"] = [before[at] for at in kept]  # `recover` pairs blocks by it
        layers = [layer for block in modules.children() for layer in block.modules()]
        # The layer_id of RWKV says whether a block is the first, which has one more norm.
        attributes = _NUMBERS if fields or 0 in kept else _NUMBERS[:1]
        for layer, key in ((layer, key) for layer in layers for key in attributes if vars(layer).get(key) in kept):
            vars(layer)[key] = kept.index(vars(layer)[key])
        for key, at in [(key, n) for key, n in vars(holder).items() if key.endswith("_layer_idx") and type(n) is int]:
            vars(holder)[key] = sum(block < at for block in kept)  # where a kind of blocks begins
        for key, value in ((field.rpartition(".")[2], value) for field, value in fields.items()):
            setattr(config, key, _of_kept(key, value, kept, removal.keep.numel()))
        stages = getattr(config, "stage_names", None) or ()
        if len(stages) == removal.keep.numel() + 1 and not re.search(r"\.\d+\.", inside):  # no blocks of one stage
            _drop_stages(whole, config, stages, kept)
    for holder, key, length in counts:
        vars(holder)[key] = length


def _drop_stages(model: nn.Module, config: Any, stages: Sequence[str], kept: Sequence[int]) -> None:
    """Drop names of stages, of which blocks after the first have one each, from the config and modules of a backbone.

    What a removed block would give is what the block before it gives.
    """
    names, read = [*stages[: len(kept) + 1]], [at % len(stages) for at in config._out_indices]
    config._out_indices = sorted({sum(block < at for block in kept) for at in read})
    config._out_features = [names[at] for at in config._out_indices]
    for holder in (config, *(module for module in model.modules() if vars(module).get("stage_names") == stages)):
        holder.stage_names = names


def _counts_of_lists(model: nn.Module, kept: Mapping[str, int]) -> list[tuple[nn.Module, str, int]]:
    """Return (module, attribute, new value) of the integers around lists that count their modules, by their names."""
    lengths = {path: len(module) for path, module in model.named_modules() if is_list(module)}
    counts = []
    for name in {".".join(path.split(".")[:depth]) for path in kept for depth in range(path.count(".") + 1)}:
        holder, prefix = model.get_submodule(name), f"{name}." if name else ""
        direct = re.compile(re.escape(prefix) + r"(?!.*\.\d+\.).*")  # lists in modules of other lists are counted there
        inside = {path: n for path, n in lengths.items() if direct.fullmatch(path)}
        for key, value in vars(holder).items():
            after = {kept.get(path, n) for path, n in inside.items() if n == value and type(value) is int}
            if _COUNTS.fullmatch(key) and len(after) == 1:  # else the number may be that of another list
                counts.append((holder, key, after.pop()))
    return counts


WIDTH = "width_of_input"  # an attribute of a module that holds the last size of its inputs as its forward reads it


class Narrow(Tensor):
    """A tensor whose Python code reads another last size; operations on it are those of the whole tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    width: int

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Its sizes, the last one replaced."""
        return torch.Size((*Tensor.size(self)[:-1], self.width))

    def size(self, dim: int | None = None) -> Any:
        """As of `shape`."""
        return self.shape if dim is None else self.shape[dim]

    def permute(self, *dims: Any) -> Any:
        """As of any tensor, with the same width if its last dimension stays the last."""
        order = dims[0] if len(dims) == 1 else dims
        permuted = Tensor.permute(self, *order)
        return narrowed(permuted, self.width) if order[-1] in (-1, self.dim() - 1) else permuted

    def transpose(self, dim0: int, dim1: int) -> Any:
        """As of `permute`."""
        order = list(range(self.dim()))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return self.permute(*order)


def narrowed(tensor: Tensor, width: int) -> Narrow:
    """Return the same tensor, whose last size is read as `width`."""
    narrow = tensor.as_subclass(Narrow)
    narrow.width = width
    return narrow


def set_width(module: nn.Module, width: int) -> None:
    """Let the forward of a module read this as the last size of its inputs: `C` in `C // self.num_heads`."""
    if WIDTH not in vars(module):
        module.register_forward_pre_hook(_show_width, with_kwargs=True)
    setattr(module, WIDTH, width)


def width_of(module: nn.Module, default: Any) -> Any:
    """Return the last size of a module's inputs as its forward reads it: what its first Linear reads, if it has one."""
    first = next((child.in_features for child in module.children() if isinstance(child, nn.Linear)), default)
    return vars(module).get(WIDTH, first)


def _show_width(module: Any, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        raise SparsityError(f"{type(module).__name__} reads {WIDTH}: use torch.export.export(..., strict=True)")
    first = next((tensor for _, tensor in tensors_in("", [args, kwargs]) if tensor.is_floating_point()), None)

    def shown(tensor: Tensor) -> Tensor:
        return narrowed(tensor, module.width_of_input) if tensor is first else tensor

    return tree_map_only(Tensor, shown, (args, kwargs))


def config_of(model: nn.Module, path: str) -> tuple[str, Any]:
    """Return the path of the config of the modules of a list, of the nearest module around them, and the config."""
    while path and not hasattr(vars(model.get_submodule(path)).get("config"), "to_dict"):
        path = path.rpartition(".")[0]
    return f"{path}.config".removeprefix("."), vars(model.get_submodule(path)).get("config")


def _part_with_config(model: nn.Module, path: str) -> tuple[str, nn.Module, Any]:
    """Return the path of a list in the outermost module that has the config of `config_of`, this module and config."""
    config, parts = config_of(model, path)[1], path.split(".")
    around = {at: model.get_submodule(".".join(parts[:at])) for at in range(len(parts))}
    at = next((at for at, module in around.items() if vars(module).get("config") is config), 0)
    return ".".join(parts[at:]), around[at], config


def layer_fields(model: nn.Module, path: str) -> dict[str, Any]:
    """Return {path: value} of the config's fields with an entry for each block of a list, or with numbers of blocks."""
    (place, config), blocks = config_of(model, path), [*model.get_submodule(path).children()]
    if config is None:
        return {}
    lists = {key: [*value] for key, value in vars(config).items() if isinstance(value, (list, tuple))}
    fields = {key: value for key, value in lists.items() if _are_numbers(key, value, len(blocks))}
    if any(vars(m).keys() & {*_NUMBERS} for block in blocks for m in block.modules()):
        if runs := lists.get("attention_types"):  # of GPT-Neo: [[["global", "local"], 2]] is for four blocks
            lists["attention_types"] = [[[kind], 1] for kinds, count in runs for kind in kinds * count]
        fields |= {key: value for key, value in lists.items() if _BY_LAYER.fullmatch(key) and len(value) == len(blocks)}
        if getattr(config, "is_heterogeneous", False):
            fields["per_layer_config"] = config.to_dict()["per_layer_config"]
    return {f"{place}.{key}": value for key, value in fields.items()}


def _are_numbers(key: str, value: Sequence[Any], blocks: int) -> bool:
    """Return whether a field of a config lists numbers of blocks."""
    are_in_range = all(type(at) is int and 0 <= at < blocks for at in value)
    return are_in_range and [*value] == sorted({*value}) and bool(_INDICES.fullmatch(key))


def repeated_blocks(value: Any, blocks: int, times: int) -> Any:
    """Return a field of `layer_fields` for these blocks several times."""
    if isinstance(value, Mapping):
        return {int(at) + blocks * k: fields for k in range(times) for at, fields in value.items()}
    return value * times


def _of_kept(key: str, value: Any, kept: Sequence[int], blocks: int) -> Any:
    """Return a field of `layer_fields` for the kept blocks alone."""
    if isinstance(value, Mapping):
        return {at: value[str(block)] for at, block in enumerate(kept) if str(block) in value}
    if not _are_numbers(key, value, blocks):
        return [value[at] for at in kept]
    if _READ.fullmatch(key):  # what a removed block would give is what the block before it gives
        return [sum(block <= at for block in kept) - 1 for at in value]
    return [at for at, block in enumerate(kept) if block in value]


def outside_dropped(removals: Sequence[Removal]) -> list[Removal]:
    """Leave out the removals whose members are all in modules that others drop."""
    paths = [(path, removal.keep.flatten()) for removal in removals for path in removal.bound.lists]
    prefixes = tuple(f"{path}.{at}." for path, keep in paths for at, kept in enumerate(keep.tolist()) if not kept)
    return [r for r in removals if not all(m.fqn.startswith(prefixes) for m in r.bound.members)]
