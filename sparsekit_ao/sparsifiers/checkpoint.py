"""What a sparsifier saves and loads: plain dicts, which are checked before anything is changed."""

import copy
import numbers
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from .. import distributed
from ..errors import SparsityError
from ..masking import find_mask
from .config import TensorGroup, copied

# A scheduler's wrapper around the bound method holds the old instance; a plan is made again when it is needed.
_NOT_COPIED = ("step", "_plan", "_adapters")
_NOT_SAVED = ("module", "module_fqn", "tensor_name")
_ROW = {"tensor": str, "before": float, "after": float, "density": float, "seconds": float, "note": str}  # of a report


class Copies:
    """State dicts, deep copies and pickles of a sparsifier: a copy has its own model, a pickle none until `prepare`."""

    model: nn.Module | None
    groups: list[TensorGroup]
    config: list[TensorGroup] | None
    enable_mask_update: bool
    optional_keys: tuple[str, ...]
    _state: dict[str, dict[str, Any]]
    _phase: str
    _chosen_at: list[Any] | None

    @abstractmethod
    def _sync_state(self) -> None:
        """Bring `_state` up to date with the model's masks."""

    @property
    @abstractmethod
    def keys(self) -> tuple[str, ...]:
        """The keys that a config entry may have besides those that name its tensors."""

    @abstractmethod
    def _need_prepared(self, method: str) -> None:
        """Raise unless a model is prepared."""

    @abstractmethod
    def _live_mask(self, group: TensorGroup, model: nn.Module | None = None) -> Tensor:
        """The mask of a group."""

    def _check_groups(self, groups: Sequence[TensorGroup]) -> None:
        """Raise if a group is invalid; called before anything is changed."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        self._sync_state()
        for key, value in self.__dict__.items():
            if key not in _NOT_COPIED:
                new.__dict__[key] = copy.deepcopy(value, memo)
        new._sync_state()
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the model; `prepare` attaches an unpickled sparsifier to a model again."""
        self._sync_state()
        kept = {k: v for k, v in self.__dict__.items() if k not in (*_NOT_COPIED, "model")}
        kept["_state"] = {fqn: copied_state(s) for fqn, s in self._state.items()}
        kept["groups"] = [{k: v for k, v in g.items() if k != "module"} for g in self.groups]
        kept["config"] = [{k: v for k, v in e.items() if not isinstance(v, nn.Module)} for e in self.config or ()]
        kept["_phase"] = "detached" if self._phase == "prepared" else self._phase
        return {**kept, "model": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def state_dict(self) -> dict[str, Any]:
        """Masks and groups as a plain dict of copies, which `torch.load(weights_only=True)` reads.

        Functions in the config (a score or a view) are left out; loading keeps the live ones.
        """
        self._sync_state()
        return {
            "state": {fqn: copied_state(s) for fqn, s in self._state.items()},
            "groups": [plain({k: v for k, v in g.items() if k not in _NOT_SAVED}) for g in self.groups],
            "enable_mask_update": self.enable_mask_update,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load masks (in place) and group values into this prepared sparsifier; the argument is not changed.

        Args:
            state_dict: from `state_dict`; torch.ao's own are read too.
            strict: the tensors must be the same ones; else only those in both are loaded.

        Raises:
            SparsityError: not prepared, names or shapes that do not fit. Nothing is then changed.
        """
        self._need_prepared("load_state_dict")
        masks, saved = check_saved(state_dict, self.groups, strict)
        try:
            groups = [merged_group(g, saved.get(g["tensor_fqn"]), self.keys, self.optional_keys) for g in self.groups]
            self._check_groups(groups)
        except (TypeError, KeyError, AttributeError, ArithmeticError, RuntimeError) as e:
            raise SparsityError(f"load_state_dict: the saved groups are not valid: {e}") from e
        live = {g["tensor_fqn"]: self._live_mask(g) for g in self.groups}
        for old, new in zip(self.groups, groups, strict=True):
            old.clear()
            old.update(new)
        with torch.no_grad():
            for fqn, mask in live.items():
                if fqn in masks:
                    distributed.fill(mask, masks[fqn])
                    saved_state = copied_state(state_dict["state"][fqn])
                    self._state[fqn].update({k: v for k, v in saved_state.items() if k != "mask"})
        self.enable_mask_update, self._chosen_at = bool(state_dict.get("enable_mask_update", True)), None

    def _pickled(self) -> dict[str, Any]:
        """What an unpickled sparsifier loads once it is attached; a state dict."""
        return {
            "state": {fqn: dict(s) for fqn, s in self._state.items()},
            "groups": [dict(g) for g in self.groups],
            "enable_mask_update": self.enable_mask_update,
        }


def copied_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the state of one tensor: its mask, and whatever a subclass stores beside it."""
    return {k: v.detach().clone() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in state.items()}


def plain(value: Any) -> Any:
    """A copy of only dicts, lists, tuples, numbers, strings and None; entries that hold functions are left out.

    >>> plain({"norm": abs, "stages": [{"nnz": 2, "view": len}]})
    {'stages': [{'nnz': 2}]}
    """
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items() if not callable(v)}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(plain(v) for v in value)
    return copied(value) if isinstance(value, numbers.Real) else copy.deepcopy(value)


def check_saved(
    state_dict: Mapping[str, Any], groups: Sequence[TensorGroup], strict: bool
) -> tuple[dict[str, Tensor], dict[str, TensorGroup]]:
    """Check that saved masks and groups fit these groups, and return them by name.

    Raises:
        SparsityError: not a state dict, other tensors (if `strict`), or a mask of another shape.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "groups"} <= set(state_dict):
        raise SparsityError("load_state_dict: expected a dict with 'state' and 'groups', as state_dict() gives")
    masks, saved = _saved_masks(state_dict["state"]), _saved_groups(state_dict["groups"])
    if not isinstance(state_dict.get("enable_mask_update", True), bool):
        raise SparsityError("load_state_dict: 'enable_mask_update' must be a bool")
    own, live = {g["tensor_fqn"]: _shape(g) for g in groups}, {g["tensor_fqn"]: g for g in groups}
    if strict and (set(own) != set(masks) or set(own) != set(saved)):
        missing, unexpected = sorted(set(own) - (set(masks) & set(saved))), sorted((set(masks) | set(saved)) - set(own))
        raise SparsityError(f"load_state_dict: missing tensors {missing}, unexpected tensors {unexpected}")
    for fqn, shape in own.items():
        if fqn in masks and masks[fqn].is_meta and not _is_meta(live[fqn]):
            raise SparsityError(f"load_state_dict: {fqn}: the saved mask is on the meta device and has no values")
        if fqn in masks and masks[fqn].shape != shape:
            raise SparsityError(
                f"load_state_dict: {fqn}: the saved mask is {tuple(masks[fqn].shape)}, the weight {tuple(shape)}"
            )
    return masks, saved


def _saved_masks(state: object) -> dict[str, Tensor]:
    if not isinstance(state, Mapping) or not all(isinstance(own, Mapping) for own in state.values()):
        raise SparsityError("load_state_dict: 'state' must be a dict {tensor name: {'mask': tensor}}")
    masks = {fqn: own["mask"] for fqn, own in state.items() if own.get("mask") is not None}
    for fqn, mask in masks.items():
        if not isinstance(mask, Tensor) or mask.is_complex() or mask.is_quantized or mask.layout != torch.strided:
            found = f"{mask.dtype}, {mask.layout}" if isinstance(mask, Tensor) else type(mask).__name__
            raise SparsityError(f"load_state_dict: {fqn}: a mask must be a tensor of 0 and 1, got {found}")
        own = distributed.local(mask)
        if not mask.is_meta and mask.dtype != torch.bool and not bool(((own == 0) | (own == 1)).all()):
            raise SparsityError(f"load_state_dict: {fqn}: a mask must hold 0 and 1 only")
    return masks


def saved_count(state_dict: object, key: str, default: int) -> int:
    """A number of steps in a state dict, or the default if it has none."""
    found = state_dict.get(key, default) if isinstance(state_dict, Mapping) else default
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise SparsityError(f"load_state_dict: {key!r} must be an int >= 0, got {found!r}")
    return found


def saved_names(state_dict: object, key: str, groups: Sequence[TensorGroup]) -> list[str]:
    """Names of some of these groups in a state dict, none if it has no such entry."""
    found = state_dict.get(key, []) if isinstance(state_dict, Mapping) else []
    own = [g["tensor_fqn"] for g in groups]
    if not isinstance(found, list) or any(n not in own for n in found):
        raise SparsityError(f"load_state_dict: {key!r} must be a list of names of tensors in the config, got {found!r}")
    return list(found)


def checked_pass(state_dict: object, groups: Sequence[TensorGroup]) -> dict[str, dict[str, Any]] | None:
    """Copies of the saved progress of `one_shot`, if there is one: rows of finished tensors, and chosen masks.

    Raises:
        SparsityError: it is not of these groups.
    """
    saved = state_dict.get("one_shot") if isinstance(state_dict, Mapping) else None
    if saved is None:
        return None
    rows, masks = (saved.get("rows"), saved.get("masks")) if isinstance(saved, Mapping) else (None, None)
    if not isinstance(rows, Mapping) or not isinstance(masks, Mapping):
        raise SparsityError("load_state_dict: 'one_shot' must be a dict with 'rows' and 'masks', as state_dict() gives")
    own = {g["tensor_fqn"]: g for g in groups}
    found = _saved_masks({fqn: {"mask": mask} for fqn, mask in masks.items()})
    for fqn in (*rows, *masks):
        if fqn not in own or (fqn in masks and (fqn not in found or found[fqn].shape != _shape(own[fqn]))):
            raise SparsityError(f"load_state_dict: 'one_shot': {fqn!r} is unknown, or its mask has another shape")
        if fqn in rows and not (isinstance(rows[fqn], Mapping) and {k: type(v) for k, v in rows[fqn].items()} == _ROW):
            raise SparsityError(f"load_state_dict: 'one_shot': {fqn}: a row has {', '.join(_ROW)}, got {rows[fqn]!r}")
    devices = {fqn: getattr(own[fqn]["module"], own[fqn]["tensor_name"]).device for fqn in found}
    copies = {fqn: mask.detach().to(devices[fqn], torch.bool, copy=True) for fqn, mask in found.items()}
    return {"rows": {fqn: dict(row) for fqn, row in rows.items()}, "masks": copies}


def _saved_groups(groups: object) -> dict[str, TensorGroup]:
    is_list = isinstance(groups, Sequence) and not isinstance(groups, str)
    if not is_list or not all(isinstance(g, Mapping) and isinstance(g.get("tensor_fqn"), str) for g in groups):  # type: ignore[attr-defined]
        raise SparsityError("load_state_dict: 'groups' must be a list of dicts with a 'tensor_fqn' each")
    saved = {g["tensor_fqn"]: g for g in groups}  # type: ignore[attr-defined]
    if len(saved) < len(groups):  # type: ignore[arg-type]
        raise SparsityError("load_state_dict: 'groups' has several entries for one tensor")
    return saved


def _is_meta(group: TensorGroup) -> bool:
    return bool(getattr(group["module"], group["tensor_name"]).is_meta)


def _shape(group: TensorGroup) -> tuple[int, ...]:
    found = find_mask(group["module"], group["tensor_name"])
    return tuple(getattr(group["module"], group["tensor_name"]).shape if found is None else found.mask.shape)


def merged_group(
    live: TensorGroup, saved: Mapping[str, Any] | None, keys: Collection[str], optional_keys: Collection[str]
) -> TensorGroup:
    """The live group with a saved one's values; functions, which are not saved, are those of the live one."""
    if saved is None:
        return dict(live)
    kept = {k: v for k, v in live.items() if k not in optional_keys or k in saved or callable(v)}
    merged = {**kept, **copied({k: v for k, v in saved.items() if k in keys})}
    before, after = live.get("stages"), merged.get("stages")
    if before is not None and after is not None and len(before) == len(after):
        functions = [{k: v for k, v in stage.items() if callable(v)} for stage in before]
        merged["stages"] = [{**f, **stage} for f, stage in zip(functions, after, strict=True)]
    return merged


def kept_params(
    groups: Sequence[TensorGroup], everywhere: Sequence[str] | None, per_layer: Mapping[str, Sequence[str]] | None
) -> list[dict[str, Any]]:
    """What `sparse_params` holds for each group after `squash_mask`; see there."""
    if isinstance(everywhere, nn.Module):
        raise SparsityError("squash_mask: the model to squash is given by name, squash_mask(model=...)")
    if isinstance(everywhere, str):
        raise SparsityError(f"squash_mask: params_to_keep must be a tuple of keys, got {everywhere!r}")
    layers = {g["module_fqn"] for g in groups}
    if not isinstance(per_layer, (Mapping, type(None))):
        raise SparsityError(f"squash_mask: params_to_keep_per_layer must be a dict {{module: keys}}, got {per_layer!r}")
    unknown = sorted(set(per_layer or {}) - layers)
    if unknown:
        raise SparsityError(f"squash_mask: {unknown[0]!r} is not a sparsified module; those are {sorted(layers)}")
    out = []
    for group in groups:
        wanted = [*(everywhere or ()), *(per_layer or {}).get(group["module_fqn"], ())]
        absent = [k for k in wanted if k not in group]
        if absent:
            raise SparsityError(f"squash_mask: {group['tensor_fqn']} has no {absent[0]!r}; it has {sorted(group)}")
        out.append({k: group[k] for k in wanted})
    return out
