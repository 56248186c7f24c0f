"""The base class of all sparsifiers: how they prepare, step, squash, save, load and copy.

`MaskSparsifier` checks everything before it changes anything; subclasses choose masks.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from .. import distributed, masking
from ..errors import SparsityError, checked_model, warn
from ..models.names import Exclusion, module_in_copy, sharing_memory
from ..schedules import check_positive, cut_short
from .checkpoint import Checkpointed
from .config import ConfigContext, TensorGroup, copied, make_config, resolve_groups
from .report import Report, Row, make_report, make_row
from .usage import refuse_misaligned_state

_ADAPTERS = (
    "adapters were added to its masked layer. peft's merge_and_unload() would add them to a temporary masked copy of "
    "the weight and lose them: merge them by export.merge_lora(peft_model, sparsifier) and call squash_mask then, or "
    "call squash_mask before adapters are added"
)
_REPLACED = (
    "its layer was replaced or removed after prepare, so its mask has no effect on the model, and a new layer has no "
    "mask; call squash_mask, and prepare again"
)


@dataclass(frozen=True)
class UpdateInterval:
    """The steps (counted from 1) in which masks are updated: multiples of `update_every`, up to `until`.

    >>> [step for step in range(1, 20) if UpdateInterval(3, until=9).is_due(step)]
    [3, 6, 9]
    """

    update_every: int = 1
    until: int | None = None

    def __post_init__(self) -> None:
        check_positive("update_every", self.update_every)
        if self.until is not None:
            check_positive("until", self.until)
            if self.until < self.update_every:
                raise SparsityError(
                    f"until={self.until} allows no update, since update_every={self.update_every}; give a larger until"
                )

    def is_due(self, step: int) -> bool:
        """Return whether masks are updated in a step."""
        return step % self.update_every == 0 and (self.until is None or step <= self.until)

    def is_over(self, step: int) -> bool:
        """Return whether masks are never updated after a step."""
        return self.until is not None and step >= self.until - self.until % self.update_every


class MaskSparsifier(Checkpointed):
    """Abstract base class of sparsifiers that can be called, copied, saved and resumed safely.

    It derives from `torch_ao.BaseSparsifier`. A subclass fills masks one by one in
    `update_mask(self, module, tensor_name, **group)`, or all masks in `_update_all`. It may add config keys without a
    default (`optional_keys`), complete an entry (`_complete`), and check one group (`_check_fit`) or all groups
    together (`_check_groups`).

    Args:
        defaults: A dict of the config keys and their default values.

    >>> class KeepAll(MaskSparsifier):
    ...     def update_mask(self, module, tensor_name, **group):
    ...         self.mask(group["tensor_fqn"]).fill_(True)
    """

    #: whether masks are bool; if not, they have the dtype of the weight, as in `FakeSparsity` (`mask.mean()` works)
    bool_masks = False
    #: the parametrization that `prepare` registers; None registers nothing
    mask_class: type[masking.WeightMask] | None = masking.WeightMask
    last_scheduler: Any = None  # the `ScheduleSL` that was constructed last for the prepared model
    _warned: bool = False  # whether `step` has warned about adapted or replaced layers

    def _complete(self, entry: dict[str, Any], place: ConfigContext) -> dict[str, Any]:
        """Return the keys of a config entry for one tensor, completed with the defaults."""
        return {**copied(self.defaults), **entry}

    def _after_prepare(self) -> None:
        """Called at the end of `prepare`, when all masks are registered."""

    def _check_fit(self, group: TensorGroup) -> None:
        """Raise an error if a group does not fit its tensor. Nothing is changed."""

    def _check_alone(self, group: TensorGroup) -> None:
        """Run `_check_fit` and all other checks that need no other group; `skip_unfit` skips a tensor that fails."""
        self._check_fit(group)

    def _check_groups(self, groups: Sequence[TensorGroup]) -> None:
        """Raise an error if groups do not fit their tensors or each other. Nothing is changed."""
        for group in groups:
            self._check_fit(group)

    def _begin(self, groups: Sequence[TensorGroup]) -> None:
        """Write values that follow from the budgets into the groups; `prepare` calls this after all checks."""

    def _update_all(self) -> None:
        """Fill every mask; called under no_grad."""
        self._check_groups(self.groups)
        # Here a mask that was removed raises an error, before any other is written.
        refuse_meta_masks("step", self.groups, list(map(self.live_mask, self.groups)))
        for group in self.groups:
            self.update_mask(**group)

    def require_prepared(self, what: str) -> nn.Module:
        """Return the prepared model, or raise an error if there is none; `what` is the call that needs one."""
        if what == "step" and parametrize._cache_enabled:
            raise SparsityError("step: weights are not masked anew inside materialized(); call step after that context")
        if self._phase == "prepared":
            assert self.model is not None
            distributed.reshard(self.model)
            return self.model
        why = {
            "new": "no model has been prepared; call prepare(model, config) first",
            "squashed": "the masks were squashed already; call prepare(model, config) to start again",
        }
        raise SparsityError(f"{what}: {why[self._phase]}")

    def live_mask(self, group: TensorGroup, model: nn.Module | None = None) -> Tensor:
        """Return the mask of a group's tensor in the model or in a copy of it; raise if the mask was removed."""
        weight_mask = masking.placed_mask(self._module_in(model, group), group["tensor_name"], group["tensor_fqn"])
        if weight_mask is None:
            is_copy = model is not None and model is not self.model
            other = " in the given model, or it is not a copy made after prepare (as an EMA must be)" if is_copy else ""
            raise SparsityError(
                f"{group['tensor_fqn']}: its mask was removed{other}. Remove masks only with squash_mask; to start "
                "again, call prepare on a model without masks."
            )
        return weight_mask.mask

    def _module_in(self, model: nn.Module | None, group: TensorGroup) -> nn.Module:
        """The group's module, or the one of that name in a copy of the model."""
        if model is None or model is self.model:
            return group["module"]
        try:
            return module_in_copy(checked_model(model, group["tensor_fqn"]), group["module_fqn"])
        except AttributeError as e:
            raise SparsityError(f"{group['tensor_fqn']}: the given model has no such tensor ({e})") from None

    def make_config_from_model(self, model: nn.Module, SUPPORTED_MODULES: Iterable[type[nn.Module]] = ()) -> None:
        """Set `config` to entries for all weights of Linears, convolutions, recurrent layers and packed experts.

        If `SUPPORTED_MODULES` is given, the weights of modules of these classes are taken instead.
        """
        self.config = make_config(model, SUPPORTED_MODULES)

    def prepare(
        self,
        model: nn.Module,
        config: Sequence[Mapping[str, Any]] | None = None,
        *,
        exclude: Sequence[Exclusion] = (),
        skip_unfit: bool = False,
    ) -> None:
        """Register a mask that keeps everything on every tensor that the config names, in place.

        Make copies that follow the model, such as a moving average of its weights (EMA), after this call. In
        distributed training, call it after `parallelize_module`, but before `fully_shard`, before DDP and before the
        optimizer is constructed.

        Args:
            model: The model to sparsify. It is modified in place; its Parameters stay the same objects, so optimizers
                stay valid.
            config: A list of dicts, each with `tensor_fqn` or `module` (a module class or several) and any config keys.
                A `tensor_fqn` is a name, a glob in which `*` also matches dots, `re:` followed by a regular expression,
                or a list of these. If several entries name the same tensor, an exact name wins, and then the later
                entry. A parameter with several names has one mask, under all of them. None (default) takes every
                Linear, convolution, recurrent layer and packed expert, except adapters, routers, gates of shared
                experts, the output embedding of a language model and weights tied to another module.
            exclude: Tensors and modules to leave out: their names, globs or regular expressions, modules, or module
                classes. A module is left out with everything inside it.
            skip_unfit: If True, tensors that a block, scope or pattern does not fit are left out instead of raising an
                error; `report().skipped` gives the reasons. The default is False.

        Raises:
            SparsityError: An argument or an entry does not fit the model. The model is then unchanged.
        """
        checked_model(model, "prepare")
        if self._phase == "new" and "step" in self.__dict__:  # a scheduler has wrapped `step`
            warn(
                "prepare: a scheduler was constructed before prepare, so it has no groups and changes nothing; "
                "construct schedulers after prepare",
            )
        if self._phase == "prepared":
            raise SparsityError("prepare: this sparsifier already holds a prepared model; call squash_mask first")
        is_default = config is None
        config = self._default_config(model) if config is None else config
        check = self._check_alone if skip_unfit else None
        options: dict[str, Any] = {"exclude": exclude, "is_default": is_default, "check": check}
        options["is_registered"] = self.mask_class is not None
        resolved = resolve_groups(model, config, self.keys, self._complete, **options)
        groups = resolved.groups
        self._check_groups(groups)
        if distributed.has_process_group():
            distributed.refuse_sharded_first(model, [(g["tensor_fqn"], g["module_fqn"]) for g in groups])
        if self.mask_class and any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise SparsityError(
                "prepare: the model is wrapped in DistributedDataParallel, which would not see the gradients of "
                "masked weights; prepare the model inside (model.module), and wrap it anew after that"
            )
        before = dict(self.__dict__)
        try:
            self._begin(groups)
            new_masks = [(g["module"], g["tensor_name"], self._new_mask(g)) for g in groups if self.mask_class]
            self.model, self.groups, self._resolved = model, groups, replace(resolved, groups=[])
            self.config = [dict(e) for e in config if not is_default or e["tensor_fqn"] not in resolved.skipped]
            self._state, self._phase, self.mask_levels, self._warned = defaultdict(dict), "prepared", None, False
            self.last_scheduler = None
            with masking.installed(masking.under_all_names(model, new_masks)):
                self._after_prepare()
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _default_config(self, model: nn.Module, more: Sequence[TensorGroup] = ()) -> Sequence[Mapping[str, Any]]:
        """Return the config that is made from the model, with `more` entries."""
        self.make_config_from_model(model)
        self.config = [*(self.config or ()), *more]
        if not self.config:
            raise SparsityError("config=None found no Linear or convolution in the model; name tensors in a config")
        return self.config

    def attach(self, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        """Register the optimizers that train the model; if masks depend on weights alone, they are only checked.

        Raises:
            SparsityError: The state of an optimizer does not fit the model, such as one saved before `prepare`.
        """
        refuse_misaligned_state(optimizer, self.model)

    def take_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Read the gradients as they are now. This does nothing if masks depend on weights alone."""

    @property
    def uses_gradients(self) -> bool:
        """Whether masks depend on gradients or momentum, so that `take_gradients` must precede clipping."""
        return False

    @property
    def is_frozen(self) -> bool:
        """Whether `step` will never change masks again."""
        return False

    def step(self, use_path: bool = True) -> None:
        """Choose the masks anew, unless `enable_mask_update` is False."""
        model = self.require_prepared("step")
        if self.enable_mask_update:
            if not self._warned:
                adapted, replaced = _moved_layers(model, self.groups)
                for text in (*adapted[:1], *replaced[:1]):
                    warn(f"step: {text}")
                self._warned = bool(adapted or replaced)
            with torch.no_grad():
                self._update_all()
            self.mask_levels = [g.get("sparsity_level") for g in self.groups]

    @contextmanager
    def materialized(self) -> Iterator[None]:
        """Return a context in which many forward passes (generation, evaluation) compute each masked weight only once.

        Inside it, `step` raises an error, and the optimizer must not run because changed weights would not be masked
        again. It uses the cache of `torch.nn.utils.parametrize.cached`, which all models in the process share.

        >>> from sparsekit_ao import ScopeSparsifier
        >>> sparsifier = ScopeSparsifier()
        >>> sparsifier.prepare(torch.nn.Sequential(torch.nn.Linear(8, 8)))
        >>> with torch.no_grad(), sparsifier.materialized():
        ...     sparsifier.model[0].weight is sparsifier.model[0].weight
        True
        """
        self.require_prepared("materialized")
        with parametrize.cached():
            yield

    def squash_mask(
        self,
        params_to_keep: tuple[str, ...] | None = None,
        params_to_keep_per_layer: dict[str, tuple[str, ...]] | None = None,
        *args: Any,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Write zeros into the parameters and remove the masks.

        Args:
            params_to_keep: Names of config keys. Their values are kept in `sparse_params`, a dict on every sparsified
                module.
            params_to_keep_per_layer: {module name: config keys to keep for this module only}.
            model: A deep copy of the prepared model to squash in its place (an EMA or the best model so far). This
                sparsifier then continues with its own model.

        Raises:
            SparsityError: The sparsifier is not prepared, a name is unknown, another parametrization cannot express the
                masked weight, or `fully_shard` wrapped the model only as a part of a larger one. Nothing is changed
                then. After any other exception all masks are still registered, so the call can be repeated.
        """
        own_model = self.require_prepared("squash_mask")
        adapted, replaced = _moved_layers(own_model, self.groups)
        if adapted:
            raise SparsityError(f"squash_mask: {adapted[0]}")
        for text in replaced[:1]:
            warn(f"squash_mask: {text}")
        sparse_params = _kept_params(self.groups, params_to_keep, params_to_keep_per_layer)
        masks = [self.live_mask(g, model) for g in self.groups]
        refuse_meta_masks("squash_mask", self.groups, masks)
        if self.enable_mask_update and not self.is_frozen:
            text = _stale(self.groups, masks, self.mask_levels) or ("" if model is not None else self._miscounted())
            if text:
                warn(f"squash_mask: {text}")
        if model is None and (text := self.unfinished()):
            warn(f"squash_mask: {text}; train until its end, or give it fewer steps")
        if model is not None:
            _warn_of_averaged([self.live_mask(g) for g in self.groups], masks)
        self._sync_state()
        self._squash(own_model if model is None else model)
        for group, params in zip(self.groups, sparse_params, strict=True):
            if params:
                self._module_in(model, group).sparse_params = params  # type: ignore[assignment]
        if model is None or model is own_model:
            self._end()

    def _squash(self, model: nn.Module) -> None:
        """Write zeros into `model`, the prepared one or a copy, and remove its masks."""
        tensors = [(self._module_in(model, g), g["tensor_name"]) for g in self.groups]
        places = [(g["tensor_fqn"], g["module_fqn"], m) for (m, _), g in zip(tensors, self.groups, strict=True)]
        distributed.refuse_wrapped_outside(model, places)
        records = distributed.fsdp_records(model)
        masks = [self.live_mask(group, model) for group in self.groups]
        parameters = [masking.parameters_under(*tensor) for tensor in tensors]
        sharing = sharing_memory(model)
        for group, originals in zip(self.groups, parameters, strict=True):
            if any(p.is_inference() for p in originals) and not torch.is_inference_mode_enabled():
                raise SparsityError(
                    f"squash_mask: {group['tensor_fqn']} was made in inference mode and cannot be written to outside "
                    "of it; call squash_mask inside torch.inference_mode()"
                )
            if other := next((sharing[id(p)] for p in originals if id(p) in sharing), None):
                raise SparsityError(
                    f"squash_mask: {group['tensor_fqn']} shares memory with {other!r}, so zeros in one would change "
                    "the other; give one of them a copy (.clone()) first"
                )
        rebuilt = [masking.rebuilt_originals(*tensor) for tensor in tensors]
        # All that can be checked has been checked. If an operation fails from here on, all masks are registered again,
        # so that the call can be repeated; weights that are masked may be zero by then.
        with masking.removed([*tensors, *masking.other_names(model, tensors)]):
            for originals, mask, values in zip(parameters, masks, rebuilt, strict=True):
                masking.write_zeros(originals, mask, values)
        for module, name in tensors:
            if id(module._parameters.get(name)) in records:
                distributed.move_record(records[id(module._parameters[name])], module, name)

    def _miscounted(self) -> str:
        """Return a warning if masks do not hold their budgets, for example because they were loaded; else ""."""
        return ""

    def _end(self) -> None:  # called when the prepared model has been squashed
        self._phase = "squashed"

    def unfinished(self) -> str:
        """Return which level a schedule has reached if it ends with another one; "" where a user has set it since."""
        if (now := self.last_scheduler) is None:
            return ""
        groups = zip(now.schedules, now.get_last_sl(), self.groups, strict=True)
        scheduled = ((s, level, g["tensor_fqn"]) for s, level, g in groups if g.get("sparsity_level") == level)
        return next(filter(None, (cut_short(s, now.last_epoch, level, name) for s, level, name in scheduled)), "")

    def report(self) -> Report:
        """Return a `report.Report` with a row for each mask that tells what it keeps now."""
        model = self.require_prepared("report")
        refuse_meta_masks("report", self.groups, list(map(self.live_mask, self.groups)))
        return replace(make_report(list(self._rows()), self._resolved, model, self.groups), schedule=self.unfinished())

    def _rows(self) -> Iterator[Row]:
        """Yield a row for each group. Here blocks are single elements; subclasses with scopes count their blocks."""
        for group in self.groups:
            level = group.get("sparsity_level", float("nan"))
            pattern = ", ".join(f"{k}={group[k]}" for k in self.defaults if k in group and k != "sparsity_level")
            mask, entries = self.live_mask(group), self._resolved.entries
            yield make_row(group["tensor_fqn"], mask, entries, pattern=pattern, asked=level)

    def __repr__(self) -> str:
        rows = (f"  {g['tensor_fqn']}: {', '.join(f'{k}={g[k]!r}' for k in self.keys if k in g)}" for g in self.groups)
        return "\n".join([f"{type(self).__name__} ({self._phase}, {len(self.groups)} tensors)", *rows])

    def _new_mask(self, group: TensorGroup) -> masking.WeightMask:
        """The parametrization that `prepare` registers on a tensor; it keeps everything."""
        weight = getattr(group["module"], group["tensor_name"]).detach()
        return masking.WeightMask(torch.ones_like(weight, dtype=torch.bool if self.bool_masks else weight.dtype))


def refuse_meta_masks(where: str, groups: Sequence[TensorGroup], masks: Sequence[Tensor]) -> None:
    """Raise if the mask of a group has no values, as its weight is on the meta device."""
    for group, mask in zip(groups, masks, strict=True):
        if mask.is_meta:
            raise SparsityError(
                f"{where}: {group['tensor_fqn']} is on the meta device, so its mask has no values; load the weights "
                "first, or prune a model that accelerate offloads by prune(model, ..., inplace=True), without masks"
            )


def _moved_layers(model: nn.Module, groups: Sequence[TensorGroup]) -> tuple[list[str], list[str]]:
    """Return messages about masked layers that an adapter (peft's LoRA) now contains, and about removed layers."""
    moved = []
    for group in groups:
        try:
            is_in_place = model.get_submodule(group["module_fqn"]) is group["module"]
        except AttributeError:
            is_in_place = False
        if not is_in_place:
            moved.append(group)
    if not moved:
        return [], []
    modules = list(model.modules())
    bases = [getattr(m, "base_layer", None) for m in modules]
    inside, present = {m for b in bases if isinstance(b, nn.Module) for m in b.modules()}, set(modules)
    adapted = [f"{g['tensor_fqn']}: {_ADAPTERS}" for g in moved if g["module"] in inside]
    return adapted, [f"{g['tensor_fqn']}: {_REPLACED}" for g in moved if g["module"] not in present]


def _kept_params(
    groups: Sequence[TensorGroup], everywhere: Sequence[str] | None, per_layer: Mapping[str, Sequence[str]] | None
) -> list[dict[str, Any]]:
    """Return what `squash_mask` keeps in `sparse_params` for each group."""
    if isinstance(everywhere, nn.Module):
        raise SparsityError("squash_mask: the model to squash must be given by name, as squash_mask(model=...)")
    if isinstance(everywhere, str):
        raise SparsityError(f"squash_mask: params_to_keep must be a tuple of keys, got {everywhere!r}")
    if not isinstance(per_layer, (Mapping, type(None))):
        raise SparsityError(f"squash_mask: params_to_keep_per_layer must be a dict {{module: keys}}, got {per_layer!r}")
    per_layer, layers = per_layer or {}, {g["module_fqn"] for g in groups}
    for name in sorted(set(per_layer) - layers):
        raise SparsityError(f"squash_mask: {name!r} is not a sparsified module; choose from {sorted(layers)}")
    sparse_params = []
    for group in groups:
        keys = (*(everywhere or ()), *per_layer.get(group["module_fqn"], ()))
        for key in keys:
            if key not in group:
                raise SparsityError(f"squash_mask: {group['tensor_fqn']} has no {key!r}; it has {sorted(group)}")
        sparse_params.append({key: group[key] for key in keys})
    return sparse_params


def _stale(groups: Sequence[TensorGroup], masks: Sequence[Tensor], chosen_at: Sequence[Any] | None) -> str:
    """Return a warning if masks were never chosen (`chosen_at` is None) or were chosen at other levels, else ""."""
    if chosen_at is None:
        if all(bool(m.all()) for m in masks):
            why = "step was never called, or no call was due (update_every)"
            return f"{why}, so every mask keeps everything and nothing is pruned; call step() first"
        pairs = ((g, m) for g, m in zip(groups, masks, strict=True) if m.numel())
        whole = [g["tensor_fqn"] for g, mask in pairs if g.get("sparsity_level", 0) > 0 and bool(mask.all())]
        if whole:
            return (
                f"{len(whole)} of {len(masks)} masks keep everything, so {', '.join(whole[:5])} stay dense: their "
                "masks were never chosen, perhaps because one_shot was interrupted; call one_shot or step() first"
            )
    for group, before in zip(groups, chosen_at or (), strict=chosen_at is not None):
        if group.get("sparsity_level") != before:
            return (
                f"the mask of {group['tensor_fqn']} was chosen at sparsity_level {before}, and its level is "
                f"{group['sparsity_level']} now; call step() once more for the last level"
            )
    return ""


def _warn_of_averaged(live: Sequence[Tensor], of_copy: Sequence[Tensor]) -> None:
    """Warn if the masks of a copy keep more elements than the sparsifier's own, as masks averaged by an EMA do."""
    if any(mask.is_meta for mask in live):
        return
    size, averaged = (sum(int(distributed.local(m).count_nonzero()) for m in masks) for masks in (live, of_copy))
    if averaged > size:
        warn(
            f"squash_mask: the masks of the given copy keep {averaged:,} elements, but the sparsifier's keep {size:,}. "
            "Either the copy was made at a lower sparsity level, or an average of the weights (EMA) has averaged the "
            "masks too; average with use_buffers=False",
        )
