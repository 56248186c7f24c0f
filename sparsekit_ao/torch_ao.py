"""The classes of `torch.ao.pruning` that this package builds on; no other file imports torch.ao.

Where torch has them, they are torch's own, so that `isinstance` checks and schedulers of others work. Else they are
the classes of this file, with the same names, arguments and state dicts.
"""

import abc
import contextlib
import copy
import functools
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

__all__ = ["BaseScheduler", "BaseSparsifier", "CubicSL", "FakeSparsity", "LambdaSL"]


class FakeSparsity(nn.Module):
    """Parametrization that multiplies a weight by its buffer `mask`, of the weight's shape."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        """Return the masked weight."""
        if self.mask.shape != x.shape:
            raise ValueError(f"the mask is {tuple(self.mask.shape)}, the weight {tuple(x.shape)}")
        return self.mask * x


class BaseSparsifier(abc.ABC):
    """Abstract base class of sparsifiers: a subclass chooses masks in `update_mask`.

    Each of its `groups` is an entry of the config with the defaults, `module`, `module_fqn` and `tensor_name`. The
    masks are in `state`, {tensor_fqn: {"mask": mask}}.
    """

    def __init__(self, defaults: dict[str, Any] | None = None) -> None:
        self.defaults: dict[str, Any] = defaults or {}
        self.state: dict[str, dict[str, Any]] = defaultdict(dict)
        self.groups: list[dict[str, Any]] = []
        self.enable_mask_update = True
        self.model: Any = None
        self.config: list[dict[str, Any]] = []

    @abc.abstractmethod
    def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
        """Fill the mask of one tensor; `step` calls it with the keys of a group."""

    def make_config_from_model(self, model: nn.Module, SUPPORTED_MODULES: Iterable[type[nn.Module]] = ()) -> None:
        """Set `config` to an entry for the weight of each Linear, or of each module of the given classes."""
        kinds = tuple(SUPPORTED_MODULES) or (nn.Linear,)
        names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
        self.config = [{"tensor_fqn": f"{name}.weight".removeprefix(".")} for name in names]

    def prepare(self, model: nn.Module, config: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Register a mask that keeps everything on each tensor of the config; None is all Linear layers."""
        self.model = model
        if config is None:
            self.make_config_from_model(model)
        else:
            self.config = [dict(entry) for entry in config]
        for entry in self.config:
            path, _, name = entry["tensor_fqn"].rpartition(".")
            module = model.get_submodule(path)
            mask = torch.ones_like(getattr(module, name))
            parametrize.register_parametrization(module, name, FakeSparsity(mask))
            self.state[entry["tensor_fqn"]]["mask"] = mask
            where = {"module": module, "module_fqn": path, "tensor_name": name}
            self.groups.append({**copy.deepcopy(self.defaults), **entry, **where})

    def step(self, use_path: bool = True) -> None:
        """Update the mask of each group, unless `enable_mask_update` is False."""
        if self.enable_mask_update:
            with torch.no_grad():
                for group in self.groups:
                    self.update_mask(**group)

    def squash_mask(
        self,
        params_to_keep: tuple[str, ...] | None = None,
        params_to_keep_per_layer: dict[str, tuple[str, ...]] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Write zeros into the weights and remove the masks; see `MaskSparsifier.squash_mask`."""
        for group in self.groups:
            module, name = group["module"], group["tensor_name"]
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
            if kept := (*(params_to_keep or ()), *(params_to_keep_per_layer or {}).get(group["module_fqn"], ())):
                module.sparse_params = {key: group[key] for key in kept}

    def convert(
        self,
        module: nn.Module,
        mapping: dict[type[nn.Module], Any] | None = None,
        inplace: bool = False,
        parameterization: type[nn.Module] = FakeSparsity,
    ) -> nn.Module:
        """Replace masked submodules of the classes in `mapping` by `mapping[class].from_dense(submodule)`."""
        if mapping is None:
            raise NotImplementedError("convert needs a mapping {class: class with from_dense}")
        module = module if inplace else copy.deepcopy(module)
        for path, child in list(module.named_modules()):
            chains = getattr(child, "parametrizations", {}) if path else {}
            masked = any(isinstance(p, parameterization) for name in chains for p in chains[name])
            if masked and (kind := parametrize.type_before_parametrizations(child)) in mapping:
                module.set_submodule(path, mapping[kind].from_dense(child))
        return module

    def state_dict(self) -> dict[str, Any]:
        """Return `state`, and `groups` without their modules."""
        unsaved = ("module", "module_fqn", "tensor_name")
        groups = [{k: v for k, v in group.items() if k not in unsaved} for group in self.groups]
        return {"state": self.state, "groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load masks and groups into the prepared model; if `strict`, its tensors must be the saved ones."""
        saved = {group["tensor_fqn"]: group for group in state_dict["groups"]}
        names = {group["tensor_fqn"] for group in self.groups}
        if strict and names != set(saved):
            raise RuntimeError(f"saved for {sorted(saved)}, but {sorted(names)} are prepared")
        for group in self.groups:
            if (name := group["tensor_fqn"]) in saved:
                group.update(saved[name])
                self.state[name]["mask"].copy_(state_dict["state"][name]["mask"])


class BaseScheduler:
    """Abstract base class of schedulers: a subclass returns the level of each group at `last_epoch` from `get_sl`.

    `base_sl` are the levels of the prepared sparsifier when the scheduler is constructed, which is its first step.
    """

    def __init__(self, sparsifier: BaseSparsifier, last_epoch: int = -1, verbose: bool = False) -> None:
        self.sparsifier, self.last_epoch, self.verbose = sparsifier, last_epoch, verbose
        self.base_sl = [group["sparsity_level"] for group in sparsifier.groups]
        self._step_count = 0
        self._get_sl_called_within_step = False  # unused; torch.ao's state dicts have it
        self._last_sl: list[float] = []
        vars(sparsifier).update(step=functools.partial(_counted_step, sparsifier), _step_count=0)
        self.step()

    def get_sl(self) -> list[float]:
        """Return the level of each group at `last_epoch`."""
        raise NotImplementedError

    def get_last_sl(self) -> list[float]:
        """Return the levels of the last step."""
        return self._last_sl

    def step(self, epoch: int | None = None) -> None:
        """Advance one epoch and write the levels into the groups; `epoch` is only printed."""
        if self._step_count == 1 and vars(self.sparsifier)["_step_count"] == 0:
            text = "`scheduler.step()` was called before `sparsifier.step()`; call it after"
            warnings.warn(f"{type(self).__name__}: {text}", stacklevel=2)
        self._step_count, self.last_epoch = self._step_count + 1, self.last_epoch + 1
        self._last_sl = self.get_sl()
        for at, (group, level) in enumerate(zip(self.sparsifier.groups, self._last_sl, strict=True)):
            group["sparsity_level"] = level
            self.print_sl(self.verbose, at, level, epoch)
        self.sparsifier.enable_mask_update = True

    def print_sl(self, is_verbose: bool, group: int, sl: float, epoch: int | None = None) -> None:
        """Print the level of a group, if `is_verbose`."""
        if is_verbose:
            print(f"{'' if epoch is None else f'Epoch {epoch:5d}: '}sparsity level of group {group}: {sl:.4e}")

    def state_dict(self) -> dict[str, Any]:
        """Return all attributes but the sparsifier."""
        return {key: value for key, value in self.__dict__.items() if key != "sparsifier"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.__dict__.update(state_dict)


class LambdaSL(BaseScheduler):
    """Set each level to `base_sl` times a function of the epoch, or of a list with one function for each group.

    Users of torch.ao can load their schedules with it; `ScheduleSL` has other arguments and states.
    """

    def __init__(self, sparsifier: BaseSparsifier, sl_lambda: Any, last_epoch: int = -1, verbose: bool = False) -> None:
        self.sl_lambdas = _of_groups(sparsifier, sl_lambda)
        super().__init__(sparsifier, last_epoch, verbose)

    def get_sl(self) -> list[float]:
        """Return the base levels times the functions of this epoch."""
        return [level * f(self.last_epoch) for level, f in zip(self.base_sl, self.sl_lambdas, strict=True)]


class CubicSL(BaseScheduler):
    """Raise levels by a cubic from `init_sl` (0 before it, if `initially_zero`) to `base_sl` (arXiv 1710.01878).

    The last epoch is `init_t + delta_t * total_t`. Each argument may be a list with one value for each group. It exists
    for the same reason as `LambdaSL`.
    """

    def __init__(
        self,
        sparsifier: BaseSparsifier,
        init_sl: Any = 0.0,
        init_t: Any = 0,
        delta_t: Any = 10,
        total_t: Any = 100,
        initially_zero: Any = False,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.init_sl, self.init_t = _of_groups(sparsifier, init_sl), _of_groups(sparsifier, init_t)
        self.delta_t, self.total_t = _of_groups(sparsifier, delta_t), _of_groups(sparsifier, total_t)
        self.initially_zero = _of_groups(sparsifier, initially_zero)
        super().__init__(sparsifier, last_epoch, verbose)

    def get_sl(self) -> list[float]:
        """Return the levels of this epoch."""
        levels = list(map(float, self.init_sl))
        for at, (begin, interval, count) in enumerate(zip(self.init_t, self.delta_t, self.total_t, strict=True)):
            if self.last_epoch >= begin:
                remaining = 1 - min((self.last_epoch - begin) / (interval * count), 1)
                levels[at] = self.base_sl[at] + (levels[at] - self.base_sl[at]) * remaining**3
            elif self.initially_zero[at]:
                levels[at] = 0.0
        return levels


def _of_groups(sparsifier: BaseSparsifier, value: Any) -> list[Any]:
    """Return a list with one value for each group."""
    values = [*value] if isinstance(value, (list, tuple)) else [value] * len(sparsifier.groups)
    if len(values) != len(sparsifier.groups):
        raise ValueError(f"{len(values)} values for {len(sparsifier.groups)} groups: {value!r}")
    return values


def _counted_step(sparsifier: Any, *args: Any, **kwargs: Any) -> None:
    sparsifier._step_count += 1
    type(sparsifier).step(sparsifier, *args, **kwargs)


with contextlib.suppress(ImportError):  # of a torch that has no torch.ao.pruning
    from torch.ao.pruning import BaseScheduler, BaseSparsifier, CubicSL, FakeSparsity, LambdaSL  # type: ignore[assignment]
