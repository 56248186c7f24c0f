"""discover: the groups that one forward of a model suggests, as lines to read, edit and keep."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...errors import SparsityError
from ..coupling import Coupling
from .fold import fold, fold_frozen
from .ties import Frozen, Tie, ties
from .trace import trace

__all__ = ["Discovery", "discover"]


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """What `discover` found; printed, it is Python to be edited.

    Attributes:
        groups: one for each kind of unit, layers folded into stars.
        counts: for each, how many coupled groups it stands for and how many units each has.
        frozen: axes that nothing may be removed from, with the reason, and how many are alike.
        opaque: objects in the output that were not looked into, so tensors in them are not frozen.
    """

    groups: tuple[Coupling, ...]
    counts: tuple[tuple[int, int], ...]
    frozen: tuple[tuple[Frozen, int], ...]
    opaque: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [line for group, n in zip(self.groups, self.counts, strict=True) for line in _group_lines(group, *n)]
        notes = [line for frozen, count in self.frozen for line in _frozen_lines(frozen, count)]
        header = ["", "# Frozen, nothing is removed there:"] if notes else []
        unseen = [f"#   {text}" for text in self.opaque]
        unseen = ["", "# Not looked into, tensors in there are not frozen:", *unseen] if unseen else []
        return "\n".join(["groups = [", *lines, "]", *header, *notes, *unseen])

    __repr__ = __str__


def discover(model: nn.Module, example_inputs: Any) -> Discovery:
    """Suggest groups: which axes of which tensors are tied, found in one forward without values.

    Every operation says how the axes of its operands and its result belong together; a reshape splits and merges them.
    What is left free can be removed as a unit, as soon as the parameters of the unit are zero. Frozen are the
    dimensions of inputs and outputs, what LayerNorm or softmax goes over, what is read by index, and all that an
    operation touches that is not understood; the answer says which and where. Outputs are looked for in tuples,
    mappings and dataclasses; objects of other kinds (a cache, say) are named and not looked into. Names are einops
    axes: `u` the unit, scope axes `s`, `t`, and sizes as the forward split them. It is a suggestion: print it, read it,
    keep the lines you want. Tied parameters go by their first name.

    Args:
        model: not changed, not moved, not run: a copy without values is, in eval mode; its hooks run with it.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments; only shapes matter.

    Raises:
        SparsityError: a parametrized or lazy module; a forward that fails, or that needs to know values.

    >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 2))
    >>> print(discover(mlp, torch.zeros(1, 4)))
    groups = [
        # 1 coupled group of 16 units
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
    free, frozen = ties(found, [name for name, _ in model.named_parameters()])
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    folded = fold(free, names)
    return Discovery(
        groups=tuple(_group(tie) for tie, _ in folded),
        counts=tuple((count, tie.units) for tie, count in folded),
        frozen=tuple(fold_frozen(frozen)),
        opaque=tuple(found.opaque),
    )


def _group(tie: Tie) -> Coupling:
    return Coupling(tie.members, scope=tie.scope, sizes=tie.sizes)


def _group_lines(group: Coupling, count: int, units: int) -> Iterator[str]:
    yield f"    # {count} coupled group{'s' * (count > 1)} of {units} units"
    yield "    Coupling("
    yield "        {"
    for name, axes in group.members.items():
        yield f'            "{name}": "{axes}",'
    yield "        },"
    if group.scope:
        yield f'        scope="{group.scope}",'
    if group.sizes:
        sizes = ", ".join(f'"{axis}": {size}' for axis, size in group.sizes.items())
        yield f"        sizes={{{sizes}}},"
    yield "    ),"


def _frozen_lines(frozen: Frozen, count: int) -> Iterator[str]:
    first, *more = [f"{name}[{d}]" for name, d in frozen.places]
    others = f" and {more[0]}" if len(more) == 1 else f" and {len(more)} more" if more else ""
    yield f"#   {f'{count} x ' if count > 1 else ''}{frozen.size} in {first}{others}: {frozen.why}"
