"""Groups of a transformer, from the names in its layers."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from ...errors import SparsityError
from ..coupling import Coupling
from .layouts import Layout

__all__ = ["Stack", "find_stack", "transformer_groups"]

_HEAD_SIZES = ("head_dim", "attention_head_size")


@dataclass(frozen=True, kw_only=True, eq=False)
class Stack:
    """The layers of one transformer; all have tensors of the same names and shapes.

    Attributes:
        layout: their family.
        model: all of it.
        tensors: all of its, by name.
        prefix: what the names of layers begin with, `model.layers.`.
        shapes: {name from the layer on: shape}.
        layers: their numbers.
    """

    layout: Layout
    model: nn.Module
    tensors: Mapping[str, Tensor]
    prefix: str
    shapes: Mapping[str, tuple[int, ...]]
    layers: Sequence[str]

    @cached_property
    def head_size(self) -> int:
        """Rows of one head.

        Raises:
            SparsityError: neither the attention module nor the config says it.
        """
        where = f"{self.prefix}{self.layers[0]}.{self.layout.attention}"
        attention, config = self.model.get_submodule(where), getattr(self.model, "config", None)
        for holder, name in [(attention, name) for name in _HEAD_SIZES] + [(config, "head_dim")]:
            if isinstance(getattr(holder, name, None), int):
                return int(getattr(holder, name))
        if config is not None and hasattr(config, "hidden_size") and hasattr(config, "num_attention_heads"):
            return int(config.hidden_size) // int(config.num_attention_heads)
        raise SparsityError(
            f"for_model: nothing says how large a head is. It looked for {' and '.join(_HEAD_SIZES)} of {where}, and "
            "for head_dim, or hidden_size and num_attention_heads, of model.config. Write the group of heads by hand."
        )

    def members(self, rows: Mapping[str, str], columns: Mapping[str, str]) -> dict[str, str]:
        """Tensors of every layer: modules with units along their outputs, and with units along their inputs.

        Args:
            rows: {module: axes of its outputs}; its bias has them too.
            columns: {module: axes of its inputs}.
        """
        found: dict[str, str] = {}
        for module, axes in rows.items():
            found |= {f"{module}.weight": f"{axes} i", f"{module}.bias": axes}
        found |= {f"{module}.weight": f"o {axes}" for module, axes in columns.items()}
        return {f"{self.prefix}*.{name}": axes for name, axes in found.items() if name in self.shapes}

    def attrs(self, ints: Mapping[str, str], config: Mapping[str, str]) -> dict[str, str]:
        """Integers to update, as far as the attention modules and the config have them."""
        first = f"{self.prefix}{self.layers[0]}.{self.layout.attention}"
        attention, own = self.model.get_submodule(first), getattr(self.model, "config", None)
        found = {
            f"{self.prefix}*.{self.layout.attention}.{name}": axes
            for name, axes in ints.items()
            if isinstance(getattr(attention, name, None), int)
        }
        return found | {
            f"config.{name}": axes for name, axes in config.items() if isinstance(getattr(own, name, None), int)
        }


def find_stack(layout: Layout, model: nn.Module, tensors: Mapping[str, Tensor]) -> Stack | None:
    """The layers of a family, if the model has any.

    Raises:
        SparsityError: several stacks of layers, layers that differ, or tensors that the family does not have.
    """
    mark = re.compile(rf"(.*?)(\d+)\.{re.escape(layout.required[0])}")
    marked = [match for match in map(mark.fullmatch, tensors) if match]
    if not marked:
        return None
    prefixes = sorted({match[1] for match in marked})
    if len(prefixes) > 1:
        raise SparsityError(
            f"for_model: there are several stacks of {layout.family}: {', '.join(prefixes)}. Give it the part of the "
            "model that holds one, or use discover(model, example_inputs)."
        )
    prefix, layers = prefixes[0], [match[2] for match in marked]
    shapes = [_shapes(tensors, f"{prefix}{layer}.") for layer in layers]
    for layer, own in zip(layers, shapes, strict=True):
        _check_layer(layout, f"{prefix}{layer}", own, shapes[0])
    return Stack(layout=layout, model=model, tensors=tensors, prefix=prefix, shapes=shapes[0], layers=layers)


def transformer_groups(stack: Stack) -> dict[str, Coupling]:
    """All groups of a transformer."""
    layout = stack.layout
    widths = {stack.tensors[f"{stack.prefix}{n}.{layout.up[0]}.weight"].shape[0] for n in stack.layers}
    # The config has one width, so it can hold that of all layers or of none.
    config = {"intermediate_size": "u"} if widths == {_config(stack).get("intermediate_size")} else {}
    members = stack.members(dict.fromkeys(layout.up, "u"), {layout.down: "u"})
    mlp = Coupling(members, attrs=stack.attrs({}, config), name="mlp")
    return {"mlp": mlp} | _heads(stack) | _residual(stack)


def _heads(stack: Stack) -> dict[str, Coupling]:
    layout, d = stack.layout, stack.head_size
    queries, keys = (stack.shapes[f"{module}.weight"][0] for module in (layout.q, layout.k))
    for module in layout.per_head:
        if stack.shapes.get(f"{module}.weight", (d,)) != (d,):
            raise SparsityError(
                f"for_model: {stack.prefix}*.{module} norms {stack.shapes[f'{module}.weight'][0]} values, not one head "
                f"of {d}, so heads do not stand alone. discover(model, example_inputs) suggests groups."
            )
    # A config can hold another number of heads only if it holds the head size by itself.
    config = {"num_attention_heads", "num_key_value_heads"} if "head_dim" in _config(stack) else set()
    if queries == keys:
        members = stack.members(dict.fromkeys((layout.q, layout.k, layout.v), "(u d)"), {layout.o: "(u d)"})
        attrs = stack.attrs(layout.ints, dict.fromkeys(config, "u"))
        return {"heads": Coupling(members, sizes={"d": d}, attrs=attrs, name="heads")}
    sizes = {"kv": keys // d, "g": queries // keys, "d": d}
    own = Coupling(
        stack.members({layout.q: "(kv u d)"}, {layout.o: "(kv u d)"}),
        scope="kv",
        sizes={"kv": sizes["kv"], "d": d},
        attrs=stack.attrs({"num_key_value_groups": "u"}, {"num_attention_heads": "kv u"} if config else {}),
        name="heads",
    )
    shared = Coupling(
        stack.members({layout.q: "(u g d)", layout.k: "(u d)", layout.v: "(u d)"}, {layout.o: "(u g d)"}),
        sizes={"g": sizes["g"], "d": d},
        attrs=stack.attrs({}, {"num_attention_heads": "u g", "num_key_value_heads": "u"} if config else {}),
        name="kv_heads",
    )
    return {"heads": own, "kv_heads": shared}


def _residual(stack: Stack) -> dict[str, Coupling]:
    """The hidden size, where its norms have no bias (so that they can be RMSNorms) and nothing of it is an output."""
    layout, beside = stack.layout, re.sub(r"[^.]+\.$", "", stack.prefix)
    embedding, norm, head = (
        f"{beside}{layout.embedding}.weight",
        f"{beside}{layout.final_norm}.weight",
        f"{layout.head}.weight",
    )
    biased = any(f"{module}.bias" in stack.shapes for module in layout.norms)
    if biased or not layout.head or not {embedding, norm, head} <= stack.tensors.keys():
        return {}
    writes, reads = (layout.o, layout.down), (layout.q, layout.k, layout.v, *layout.up)
    members = {embedding: "o u"} | stack.members(dict.fromkeys(writes, "u"), dict.fromkeys(reads, "u"))
    norms = {f"{stack.prefix}*.{module}.weight": "u" for module in layout.norms if f"{module}.weight" in stack.shapes}
    members = {name.replace("*", "**"): axes for name, axes in (members | norms | {norm: "u"}).items()}
    if stack.tensors[head] is not stack.tensors[embedding]:  # one tensor under two names is one member
        members[head] = "o u"
    attrs = stack.attrs({}, {"hidden_size": "u"} if "head_dim" in _config(stack) else {})
    return {"residual": Coupling(members, attrs=attrs, name="residual")}


def _config(stack: Stack) -> Mapping[str, Any]:
    return getattr(getattr(stack.model, "config", None), "__dict__", {})


def _shapes(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, tuple[int, ...]]:
    return {name.removeprefix(prefix): tuple(t.shape) for name, t in tensors.items() if name.startswith(prefix)}


def _check_layer(
    layout: Layout, layer: str, shapes: Mapping[str, tuple[int, ...]], first: Mapping[str, tuple[int, ...]]
) -> None:
    known = {f"{module}.{name}" for module in layout.modules for name in ("weight", "bias")}
    for what, names in (("has also", shapes.keys() - known), ("lacks", set(layout.required) - shapes.keys())):
        if names:
            raise SparsityError(
                f"for_model: {layer} is named as in {layout.family}, but {what} {_some(names)}. What goes together "
                "there is not known; discover(model, example_inputs) suggests groups."
            )
    sized = {f"{module}.weight" for module in (layout.q, layout.k, *layout.per_head)}  # MLPs may differ in width
    for name in sorted(shapes.keys() | first.keys()):
        found, wanted = (own.get(name) and (own[name] if name in sized else "there") for own in (shapes, first))
        if found != wanted:
            raise SparsityError(
                f"for_model: layers differ: {layer}.{name} is {found or 'missing'}, in the first layer "
                f"{wanted or 'missing'}. Write a Coupling for those that are alike, or use discover(model, inputs)."
            )


def _some(names: Iterable[str]) -> str:
    first, *more = sorted(names)
    return f"{first} and {len(more)} more" if more else first
