"""A model and its converted copy on a user's batches: both run in eval mode on equal inputs; outputs are compared."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree

from ..calibration import Calibration, call, run_batches
from ..coupling.nested_tensors import tensors_in
from ..errors import SparsityError
from ..removal.verify import Outputs, largest_difference, seeded

Forward = Callable[[nn.Module, Any], Any]


def listed(batches: Iterable[Any], target: str) -> list[Any]:
    """The batches as a list, since models run on them twice.

    Raises:
        SparsityError: there are none; or a single batch was given, of which each row or key would be taken for one.
    """
    if isinstance(batches, (Tensor, Mapping, str)):
        kind = type(batches).__name__
        raise SparsityError(f"{target}: batches must be a list of batches, got one {kind}; pass [batch]")
    found = list(batches)
    if not found:
        raise SparsityError(f"{target}: there are no batches; an iterator that was used up before gives none")
    return found


def outputs_of(model: nn.Module, batches: Sequence[Any], forward: Forward | None = None) -> list[Outputs]:
    """The tensors that a model returns for each batch, in eval mode, without gradients, with one seed.

    The model runs on copies of the batches, in case that it writes to its inputs.
    """
    outputs: list[Outputs] = []

    def run(model: nn.Module, batch: Any) -> None:
        result = call(model, batch) if forward is None else forward(model, batch)
        outputs.append([(place, tensor.detach().clone()) for place, tensor in tensors_in("output", result)])

    copies = (_pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), batch) for batch in batches)
    with seeded([*model.parameters(), *model.buffers()]):
        run_batches(Calibration(()), model, copies, run, None)
    return outputs


def compare(
    want: list[Outputs], converted: nn.Module, batches: Sequence[Any], forward: Forward | None, target: str
) -> float:
    """The largest relative difference of a converted model from recorded outputs; see `largest_difference`."""
    try:
        found = outputs_of(converted, batches, forward)
    except Exception as e:
        raise SparsityError(f"{target}: the converted model does not run: {e}") from e
    return largest_difference(want, found, target)


@contextmanager
def calls_of(model: nn.Module, modules: Mapping[str, str]) -> Iterator[set[str]]:
    """Yields the names whose modules were called inside, of {name: name of the module in the model}."""
    called: set[str] = set()

    def recorder(name: str) -> Callable[..., None]:
        return lambda *_: called.add(name)

    with ExitStack() as hooks:
        for name, path in modules.items():
            hooks.callback(model.get_submodule(path).register_forward_pre_hook(recorder(name)).remove)
        yield called


def check_calls(
    converted: nn.Module, modules: Mapping[str, str], batches: Sequence[Any], forward: Forward | None, target: str
) -> None:
    """Check that a copy calls the modules that were replaced or changed, in a run of its own, since hooks change some.

    Args:
        converted: the copy.
        modules: {name: name of the module in the model}, all called by the original on these batches.
        batches, forward: as for `outputs_of`; no more run than are needed.
        target: first word of the error.

    Raises:
        SparsityError: some are not called.
    """
    with calls_of(converted, modules) as called:
        for batch in batches:
            if called == modules.keys():
                return
            outputs_of(converted, [batch], forward)
    refuse_uncalled(modules, called, target)


def refuse_uncalled(names: Iterable[str], called: Collection[str], target: str) -> None:
    """Raise a SparsityError for the first of the names that is not among those called."""
    missing = next((name for name in names if name not in called), None)
    if missing is not None:
        raise SparsityError(
            f"{target}: a copy of the model still calls the original module of {missing}, as closures and compiled "
            "models do. Pass the model before torch.compile, and call layers as attributes of their module."
        )


def copied(model: nn.Module, target: str, replaced: Mapping[str, nn.Module] | None = None) -> nn.Module:
    """A copy of a model, with other modules in some places; what those replace is not copied.

    Raises:
        SparsityError: something in the model cannot be copied.
    """
    new = {}
    for name, module in (replaced or {}).items():
        old = model.get_submodule(name)
        new[id(old)] = module.train(old.training)
    try:
        return copy.deepcopy(model, memo=new)
    except Exception as e:
        raise SparsityError(f"{target}: the model cannot be copied: {e}") from e
