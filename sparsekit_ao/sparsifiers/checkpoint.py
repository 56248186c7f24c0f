"""Copies of sparsifiers, each with its own model, and state dicts, which are checked before anything is changed."""

import copy
import math
import numbers
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from .. import distributed, masking
from ..errors import SparsityError, is_number, warn
from ..scores import parse_score
from ..torch_ao import BaseSparsifier
from .config import ResolvedConfig, TensorGroup, copied

_NOT_SAVED = ("module", "module_fqn", "tensor_name")
_REPLACED = ("score", "norm", "zeros_per_block")  # keys that a state replaces, with a warning
_DEFAULTS = {"norm": 2}


class Checkpointed(BaseSparsifier):
    """Mixin that holds a sparsifier's state, and copies, saves, loads and moves it to another model."""

    #: attributes that copies do not have; a scheduler's wrapper around `step` holds the old instance
    not_copied: tuple[str, ...] = ("step", "last_scheduler")
    #: config keys that need no default
    optional_keys: tuple[str, ...] = ()
    model: nn.Module | None = None
    config: list[TensorGroup] | None = None  # type: ignore[assignment]
    _state: dict[str, dict[str, Any]]
    _positions: Mapping[str, int] = MappingProxyType({})  # of tensors in `groups`, where these have not changed since
    _phase: str = "new"
    mask_levels: list[Any] | None = None  # the levels at which all masks were chosen last
    _resolved: ResolvedConfig = ResolvedConfig()
    _check_groups: Callable[[Sequence[TensorGroup]], None]
    require_prepared: Callable[[str], nn.Module]
    live_mask: Callable[[TensorGroup], Tensor]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with a copy of the model."""
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        self._sync_state()
        for key, value in self.__dict__.items():
            if key not in self.not_copied:
                new.__dict__[key] = copy.deepcopy(value, memo)
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle; raise if there is a model, whose masks only `state_dict` saves."""
        if self.model is not None:
            raise SparsityError(
                f"a {type(self).__name__} that was prepared cannot be pickled, because it refers to its model. Save "
                "state_dict(), then construct and prepare another one in the same way, and call its load_state_dict"
            )
        return {k: v for k, v in self.__dict__.items() if k not in self.not_copied}

    def state_dict(self) -> dict[str, Any]:
        """Return the masks and groups as a plain dict of copies, which `torch.load(weights_only=True)` can read.

        Functions in the config (a score or a view) are not saved; after loading, the sparsifier's own ones stay in use.
        Statistics, if there are any, and the counts of steps are saved.
        """
        return {"state": {fqn: copied_state(s) for fqn, s in self.state.items()}, **self.without_masks()}

    def without_masks(self) -> dict[str, Any]:
        """Return the entries of `state_dict` besides the masks, for checkpoints whose model has the masks."""
        return {
            "groups": [plain({k: v for k, v in g.items() if k not in _NOT_SAVED}) for g in self.groups],
            "enable_mask_update": self.enable_mask_update,
            **self._extra_state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load the masks (in place) and groups of a state dict into this prepared sparsifier.

        Args:
            state_dict: What `state_dict` returned, also in torch.ao's sparsifiers. It is not changed.
            strict: If True (default), both must have the same tensors. If False, only common tensors are loaded.

        Raises:
            SparsityError: The sparsifier is not prepared, or names, shapes or a structure do not fit. Nothing is
                changed.

        Warns:
            UserWarning: The sparsity levels, or the score, norm or `zeros_per_block` of a tensor, differ. The values
                of the state dict are taken, and schedulers may change the levels. The norm of a `WeightNormSparsifier`
                is in no state dict; its own one stays.
        """
        self.require_prepared("load_state_dict")
        masks, saved = check_saved(state_dict, self.groups, strict)
        try:
            groups = [_merged_group(g, saved.get(g["tensor_fqn"]), self.keys, self.optional_keys) for g in self.groups]
            self._check_groups(groups)
        except (TypeError, KeyError, AttributeError, ArithmeticError, RuntimeError) as e:
            raise SparsityError(f"load_state_dict: the saved groups are not valid: {e}") from e
        self._check_replaced(groups)
        live = {g["tensor_fqn"]: self.live_mask(g) for g in self.groups}
        for old, new in zip(self.groups, groups, strict=True):
            old.clear()
            old.update(new)
        with torch.no_grad():
            for fqn, mask in live.items():
                if fqn in masks:
                    distributed.copy_values(mask, masks[fqn])
                    beside = {k: v for k, v in state_dict["state"][fqn].items() if k != "mask"}
                    self._state[fqn].update(copied_state(beside))
        self.enable_mask_update, self.mask_levels = bool(state_dict.get("enable_mask_update", True)), None

    def _check_replaced(self, groups: Sequence[TensorGroup]) -> None:
        """Raise where loaded groups have another structure than the live ones; warn where they have other levels."""
        for live, new in zip(self.groups, groups, strict=True):
            before, after = self._structure(live), self._structure(new)
            if before != after:
                raise SparsityError(
                    f"load_state_dict: {live['tensor_fqn']}: the state was saved with {after}, and this sparsifier "
                    f"was prepared with {before}. Prepare with the structure of the state; for another structure "
                    "load the model's weights alone, and call step() to choose new masks."
                )
        for key in _REPLACED:
            pairs = zip(self.groups, groups, strict=True)
            if differ := [(live, new) for live, new in pairs if _meaning(live, key) != _meaning(new, key)]:
                own, saved = (group.get(key, _DEFAULTS.get(key)) for group in differ[0])
                names = _first([live["tensor_fqn"] for live, _ in differ])
                warn(
                    f"load_state_dict: {names} was prepared with {key}={own!r}, and continues with "
                    f"{key}={saved!r} of the state. To keep {key}={own!r}, set group[{key!r}] = {own!r} in "
                    "sparsifier.groups after loading"
                )
        if "step" in self.__dict__:  # a scheduler determines the levels
            return
        levels, new_levels = self._levels(self.groups), self._levels(groups)
        changed = [name for name in levels if levels[name] != new_levels[name]]
        if changed:
            level, saved = f"{levels[changed[0]]:.4g}", f"{new_levels[changed[0]]:.4g}"
            warn(
                f"load_state_dict: {_first(changed)} was prepared at sparsity_level {level}, and continues at {saved}, "
                f"the level of the state. To keep {level}, set group['sparsity_level'] = {level} in sparsifier.groups "
                "after loading, and call step()"
            )

    def _extra_state(self) -> dict[str, Any]:
        """What `state_dict` contains besides masks and groups."""
        return {}

    def _structure(self, group: TensorGroup) -> str:
        """What a group says besides its level, stage by stage; a saved state must say the same."""
        return f"sparse_block_shape={tuple(group.get('sparse_block_shape', ()))}"

    def _levels(self, groups: Sequence[TensorGroup]) -> dict[str, float]:
        """{tensor_fqn: level} of tensors whose level only a scheduler changes."""
        return {g["tensor_fqn"]: g["sparsity_level"] for g in groups if is_number(g.get("sparsity_level"))}

    @property
    def state(self) -> dict[str, dict[str, Any]]:
        """A dict {tensor_fqn: {"mask": the module's own buffer}}, which follows the model when `.to()` moves it."""
        self._sync_state()
        return self._state

    @state.setter
    def state(self, value: dict[str, dict[str, Any]]) -> None:
        self._state = value

    def mask(self, tensor_fqn: str) -> Tensor:
        """Return the mask of a tensor by its name: the module's own buffer, not a copy."""
        at = self._positions.get(tensor_fqn, len(self.groups))
        if [g["tensor_fqn"] for g in self.groups[at : at + 1]] != [tensor_fqn]:  # other groups, or renamed ones
            self._positions = {g["tensor_fqn"]: at for at, g in enumerate(self.groups)}
            at = self._positions.get(tensor_fqn, len(self.groups))
        self._sync_state(self.groups[at : at + 1])
        if tensor_fqn not in self._state:
            raise SparsityError(f"no mask for {tensor_fqn!r}; sparsified tensors: {', '.join(self.state) or 'none'}")
        return self._state[tensor_fqn]["mask"]

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that a config entry may have besides those that name its tensors."""
        return tuple(dict.fromkeys((*self.defaults, *self.optional_keys)))

    def move_to(self, model: nn.Module) -> None:
        """Continue on a model that has the masked modules under other names, as after adapters were merged."""
        names, entries = {m: name for name, m in model.named_modules()}, {}
        for group in self.groups:
            before, prefix = group["tensor_fqn"], names.get(group["module"], group["module_fqn"])
            group |= {"module_fqn": prefix, "tensor_fqn": f"{prefix}.{group['tensor_name']}".removeprefix(".")}
            entries[group["tensor_fqn"]] = self._resolved.entries.get(before, "")
        self.model, self._state, self._resolved = model, defaultdict(dict), replace(self._resolved, entries=entries)

    def _sync_state(self, groups: Sequence[TensorGroup] | None = None) -> None:
        distributed.reshard(self.model)
        for group in self.groups if groups is None else groups:
            live = masking.placed_mask(group["module"], group["tensor_name"], group["tensor_fqn"])
            if live is not None:
                self._state[group["tensor_fqn"]]["mask"] = live.mask


def _first(names: Sequence[str]) -> str:
    return f"{names[0]} (and {len(names) - 1} more)" if names[1:] else names[0]


def _meaning(group: TensorGroup, key: str) -> Any:
    """What a group says by a key, whether as a name, as an object or by its default."""
    value = group.get(key, _DEFAULTS.get(key))
    if key == "score":
        return parse_score(value, f"{group['tensor_fqn']}: ")
    return math.inf if value == "inf" else value


def copied_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the state of one tensor: its mask, and whatever a subclass stores beside it."""
    return {k: v.detach().clone() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in state.items()}


def plain(value: Any) -> Any:
    """A copy of only dicts, lists, tuples, numbers, strings and None; entries that hold functions are left out."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items() if not callable(v)}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(plain(v) for v in value)
    return copied(value) if isinstance(value, numbers.Real) else copy.deepcopy(value)


def check_saved(
    state_dict: Mapping[str, Any], groups: Sequence[TensorGroup], strict: bool
) -> tuple[dict[str, Tensor], dict[str, TensorGroup]]:
    """Return saved masks and groups by name, or raise an error if they do not fit these groups."""
    if not isinstance(state_dict, Mapping) or not {"state", "groups"} <= set(state_dict):
        raise SparsityError("load_state_dict: expected a dict with 'state' and 'groups', as state_dict() gives")
    masks, saved_groups = _saved_masks(state_dict["state"]), state_dict["groups"]
    is_list = isinstance(saved_groups, Sequence) and not isinstance(saved_groups, str)
    if not is_list or not all(isinstance(g, Mapping) and isinstance(g.get("tensor_fqn"), str) for g in saved_groups):
        raise SparsityError("load_state_dict: 'groups' must be a list of dicts with a 'tensor_fqn' each")
    saved = {g["tensor_fqn"]: g for g in saved_groups}
    if len(saved) < len(saved_groups):
        raise SparsityError("load_state_dict: 'groups' has several entries for one tensor")
    if not isinstance(state_dict.get("enable_mask_update", True), bool):
        raise SparsityError("load_state_dict: 'enable_mask_update' must be a bool")
    live = {g["tensor_fqn"]: g for g in groups}
    if strict and not set(live) == set(masks) == set(saved):
        missing = sorted(set(live) - (set(masks) & set(saved)))
        unexpected = sorted((set(masks) | set(saved)) - set(live))
        raise SparsityError(
            f"load_state_dict: the state has other tensors than the sparsifier: missing tensors {missing}, unexpected "
            f"tensors {unexpected}; prepare with the same config, or give strict=False"
        )
    for fqn, mask in masks.items():
        if fqn not in live:
            continue
        if mask.is_meta and not getattr(live[fqn]["module"], live[fqn]["tensor_name"]).is_meta:
            raise SparsityError(f"load_state_dict: {fqn}: the saved mask is on the meta device and has no values")
        if mask.shape != (shape := masking.shape_of(live[fqn]["module"], live[fqn]["tensor_name"])):
            raise SparsityError(f"load_state_dict: {fqn}: the saved mask is {tuple(mask.shape)}, the weight {shape}")
    return masks, saved


def _saved_masks(state: object) -> dict[str, Tensor]:
    if not isinstance(state, Mapping) or not all(isinstance(entry, Mapping) for entry in state.values()):
        raise SparsityError("load_state_dict: 'state' must be a dict {tensor name: {'mask': tensor}}")
    masks = {fqn: entry["mask"] for fqn, entry in state.items() if entry.get("mask") is not None}
    for fqn, mask in masks.items():
        if not isinstance(mask, Tensor) or mask.is_complex() or mask.is_quantized or mask.layout != torch.strided:
            kind = f"{mask.dtype}, {mask.layout}" if isinstance(mask, Tensor) else type(mask).__name__
            raise SparsityError(f"load_state_dict: {fqn}: a mask must be a tensor of 0 and 1, got {kind}")
        part = distributed.local(mask)
        if not mask.is_meta and mask.dtype != torch.bool and not bool(((part == 0) | (part == 1)).all()):
            raise SparsityError(f"load_state_dict: {fqn}: a mask must hold 0 and 1 only")
    return masks


def saved_count(state_dict: object, key: str, default: int) -> int:
    """A number of steps in a state dict, or the default if it has none."""
    count = state_dict.get(key, default) if isinstance(state_dict, Mapping) else default
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise SparsityError(f"load_state_dict: {key!r} must be an int >= 0, got {count!r}")
    return count


def _merged_group(
    live: TensorGroup, saved: Mapping[str, Any] | None, keys: Collection[str], optional_keys: Collection[str]
) -> TensorGroup:
    """The live group with a saved one's values; functions, which are not saved, are those of the live one."""
    if saved is None:
        return dict(live)
    unsaved = {k: v for k, v in live.items() if k not in optional_keys or k in saved or callable(v)}
    merged = {**unsaved, **copied({k: v for k, v in saved.items() if k in (*keys, "level_of_nnz")})}
    before, after = live.get("stages"), merged.get("stages")
    if before is not None and after is not None and len(before) == len(after):
        functions = [{k: v for k, v in stage.items() if callable(v)} for stage in before]
        merged["stages"] = [{**f, **stage} for f, stage in zip(functions, after, strict=True)]
    return merged
