"""discover: the couplings that one forward of a model suggests, as Python code to read, edit and keep."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...errors import SparsityError
from ..coupling import Coupling
from .shared import FrozenAxis, fold, fold_frozen, shared_axes
from .trace import trace


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """The result of `discover`; printed, it is Python to be edited.

    Attributes:
        couplings: one for each kind of unit, with stars for repeated layers.
        counts: for each, how often it is bound and how many units each bound coupling has.
        frozen: axes from which nothing may be removed, with the reason, and how many are alike.
        opaque: objects in the output that were not inspected, so tensors in them are not frozen.
        left_out: (name, reason) of couplings from which `compact` cannot remove units; only of `removal.removable`.

    >>> found = discover(torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Linear(16, 2)), torch.zeros(1, 4))
    >>> [coupling.members for coupling in found.couplings], found.counts
    ([{'0.weight': 'u i', '0.bias': 'u', '1.weight': 'o u'}], ((1, 16),))
    """

    couplings: tuple[Coupling, ...]
    counts: tuple[tuple[int, int], ...]
    frozen: tuple[tuple[FrozenAxis, int], ...]
    opaque: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        rows = zip(self.couplings, self.counts, strict=True)
        lines = [line for coupling, counts in rows for line in _coupling_lines(coupling, *counts)]
        text = ["couplings = [", *lines, "]"]
        if self.left_out:
            text += ["", "# Left out, they cannot be removed:", *(f"#   {name}: {why}" for name, why in self.left_out)]
        if self.frozen:
            text += ["", "# Frozen, nothing is removed there:", *(_frozen_line(*row) for row in self.frozen)]
        if self.opaque:
            notes = [f"#   {place}" for place in self.opaque]
            text += ["", "# Not inspected, tensors in there are not frozen:", *notes]
        return "\n".join(text)

    __repr__ = __str__


def discover(model: nn.Module, example_inputs: Any) -> Discovery:
    """Suggest couplings: which axes of which tensors belong together, found in one forward without values.

    Every operation makes axes of its operands and its result the same; a reshape splits and merges them. An axis that
    is not frozen can be pruned: its units can be removed as soon as their parameters are zero. Frozen are the
    dimensions of inputs and outputs, the axes that LayerNorm or softmax normalizes, what is read by index, and
    everything that an unknown operation reads; the result lists which and where. Outputs are searched for in tuples,
    mappings and dataclasses; objects of other types (a cache, say) are listed but not inspected. Axes are named as in
    einops: `u` the unit, scope axes `s`, `t`, and sizes as the forward split them. It is a suggestion: print it, read
    it, keep the lines you want. Tied parameters have their first name.

    Args:
        model: not changed, moved or run: a copy without values runs in eval mode, with its hooks.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments; only shapes matter.

    Raises:
        SparsityError: a parametrized, lazy or scripted module; a forward that fails, or that needs to know values.

    >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 2))
    >>> print(discover(mlp, torch.zeros(1, 4)))
    couplings = [
        # 1 coupling of 16 units
        Coupling(
            {
                "0.weight": "u i",
                "0.bias": "u",
                "2.weight": "o u",
            },
        ),
    ]
    <BLANKLINE>
    # Frozen, nothing is removed there:
    #   4 in 0.weight[1]: input[0]
    #   2 in 2.weight[0] and 2.bias[0]: output
    """
    if not isinstance(model, nn.Module):
        raise SparsityError(f"discover needs a model (an nn.Module), got {type(model).__name__}")
    found = trace(model, example_inputs)
    free, frozen = shared_axes(found, [name for name, _ in model.named_parameters()])
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    folded = fold(free, names)
    return Discovery(
        couplings=tuple(Coupling(axis.members, scope=axis.scope, sizes=axis.sizes) for axis, _ in folded),
        counts=tuple((count, axis.units) for axis, count in folded),
        frozen=tuple(fold_frozen(frozen)),
        opaque=tuple(found.opaque),
    )


def _coupling_lines(coupling: Coupling, count: int, units: int) -> Iterator[str]:
    yield f"    # {count} coupling{'s' * (count > 1)} of {units} units"
    yield "    Coupling("
    yield "        {"
    for name, axes in coupling.members.items():
        yield f'            "{name}": "{axes}",'
    yield "        },"
    if coupling.scope:
        yield f'        scope="{coupling.scope}",'
    if coupling.sizes:
        sizes = ", ".join(f'"{axis}": {size}' for axis, size in coupling.sizes.items())
        yield f"        sizes={{{sizes}}},"
    if coupling.name != next(iter(coupling.members)):
        yield f'        name="{coupling.name}",'
    if coupling.attrs:
        attrs = ", ".join(f'"{path}": "{axes}"' for path, axes in coupling.attrs.items())
        yield f"        attrs={{{attrs}}},"
    yield "    ),"


def _frozen_line(frozen: FrozenAxis, count: int) -> str:
    first, *more = [f"{name}[{d}]" for name, d in frozen.places]
    others = f" and {more[0]}" if len(more) == 1 else f" and {len(more)} more" if more else ""
    return f"#   {f'{count} x ' if count > 1 else ''}{frozen.size} in {first}{others}: {frozen.why}"
