"""Couplings of a transformer, from the names in its layers: a table of families, and what follows for each.

`LAYOUTS` lists how families name the tensors of a layer; `find_stack` looks for the layers of one family in a model;
`transformer_couplings` writes the couplings of hidden units, heads and the residual stream.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..errors import SparsityError
from .coupling import Coupling

_HEAD_SIZES = ("head_dim", "attention_head_size")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One layer of a family: modules by their function, named relative to the layer.

    Attributes:
        family: its name in errors.
        projections: query, key, value and output projection of attention.
        up: modules that write the hidden units of the MLP.
        down: the module that reads them.
        head_norms: norms of one head, whose length is the head size.
        norms: all other modules that a layer may have.
        embedding, final_norm, head: the modules outside of the layers that write and read the residual stream, if all
            of its norms can be RMSNorms; `embedding` and `final_norm` are siblings of the list of layers, `head` is
            named from the model on.
        ints: {attribute of the attention module: the axes whose product it holds}; `u` heads of size `d`.
    """

    family: str
    projections: tuple[str, ...]
    up: tuple[str, ...]
    down: str
    head_norms: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    embedding: str = ""
    final_norm: str = ""
    head: str = ""
    ints: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def attention(self) -> str:
        """The module that holds the query projection."""
        return self.projections[0].rpartition(".")[0]

    @property
    def required(self) -> tuple[str, ...]:
        """The weights that make a layer one of this family."""
        return tuple(f"{module}.weight" for module in (*self.projections, *self.up, self.down))


LAYOUTS = (
    Layout(
        family="Llama-, Qwen- and Mistral-like decoders",
        projections=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        up=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
        head_norms=("self_attn.q_norm", "self_attn.k_norm"),
        norms=tuple(f"{at}_layernorm" for at in ("input", "post_attention", "pre_feedforward", "post_feedforward")),
        embedding="embed_tokens",
        final_norm="norm",
        head="lm_head",
    ),
    Layout(
        family="BERT-like encoders",
        projections=("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),
        up=("intermediate.dense",),
        down="output.dense",
        norms=("attention.output.LayerNorm", "output.LayerNorm"),
        ints={"num_attention_heads": "u", "all_head_size": "u d"},
    ),
    Layout(
        family="DistilBERT",
        projections=("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin"),
        up=("ffn.lin1",),
        down="ffn.lin2",
        norms=("sa_layer_norm", "output_layer_norm"),
        ints={"n_heads": "u", "dim": "u d"},
    ),
    Layout(
        family="ViT",
        projections=("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj"),
        up=("mlp.fc1",),
        down="mlp.fc2",
        norms=("layernorm_before", "layernorm_after"),
        ints={"num_attention_heads": "u"},
    ),
    Layout(
        family="ViT of transformers 4",
        projections=(*(f"attention.attention.{name}" for name in ("query", "key", "value")), "attention.output.dense"),
        up=("intermediate.dense",),
        down="output.dense",
        norms=("layernorm_before", "layernorm_after"),
        ints={"num_attention_heads": "u", "all_head_size": "u d"},
    ),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Stack:
    """The layers of one transformer; all have tensors of the same names and shapes.

    `tensors` are those of the whole model by name, `prefix` is how the layers' names begin (`model.layers.`), `shapes`
    are by name relative to a layer, and `layers` are the numbers.
    """

    layout: Layout
    model: nn.Module
    tensors: Mapping[str, Tensor]
    prefix: str
    shapes: Mapping[str, tuple[int, ...]]
    layers: Sequence[str]

    @property
    def attention(self) -> Any:
        """The attention module of the first layer."""
        return self.model.get_submodule(f"{self.prefix}{self.layers[0]}.{self.layout.attention}")

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's config as a dict; empty if it has none."""
        return getattr(getattr(self.model, "config", None), "__dict__", {})

    def members(self, rows: Mapping[str, str], columns: Mapping[str, str]) -> dict[str, str]:
        """Tensors of every layer with units along outputs (`rows`, biases included) or along inputs (`columns`).

        Both are {module: axes of its outputs, or inputs}.
        """
        found: dict[str, str] = {}
        for module, axes in rows.items():
            found |= {f"{module}.weight": f"{axes} i", f"{module}.bias": axes}
        found |= {f"{module}.weight": f"o {axes}" for module, axes in columns.items()}
        return {f"{self.prefix}*.{name}": axes for name, axes in found.items() if name in self.shapes}

    def attrs(self, ints: Mapping[str, str], config: Mapping[str, str]) -> dict[str, str]:
        """Integers to update, as far as the attention modules and the config have them."""
        own, path = getattr(self.model, "config", None), f"{self.prefix}*.{self.layout.attention}"
        rows = [(self.attention, name, f"{path}.{name}", axes) for name, axes in ints.items()]
        rows += [(own, name, f"config.{name}", axes) for name, axes in config.items()]
        return {full: axes for holder, name, full, axes in rows if isinstance(getattr(holder, name, None), int)}


def find_stack(layout: Layout, model: nn.Module, tensors: Mapping[str, Tensor]) -> Stack | None:
    """The layers of a family, if the model has any.

    Raises:
        SparsityError: several stacks of layers, layers that differ, or tensors that the family does not have.
    """
    regex = re.compile(rf"(.*?)(\d+)\.{re.escape(layout.required[0])}")
    matches = [match for match in map(regex.fullmatch, tensors) if match]
    if not matches:
        return None
    prefixes = sorted({match[1] for match in matches})
    if len(prefixes) > 1:
        raise SparsityError(
            f"for_model: there are several stacks of {layout.family}: {', '.join(prefixes)}. Pass the submodule that "
            "contains one, or use discover(model, example_inputs)."
        )
    prefix, layers = prefixes[0], [match[2] for match in matches]
    shapes: list[dict[str, tuple[int, ...]]] = []
    for start in (f"{prefix}{layer}." for layer in layers):
        shapes.append({n.removeprefix(start): tuple(t.shape) for n, t in tensors.items() if n.startswith(start)})
    for layer, own in zip(layers, shapes, strict=True):
        _check_layer(layout, f"{prefix}{layer}", own, shapes[0])
    return Stack(layout=layout, model=model, tensors=tensors, prefix=prefix, shapes=shapes[0], layers=layers)


def transformer_couplings(stack: Stack) -> dict[str, Coupling]:
    """All couplings of a transformer."""
    layout = stack.layout
    widths = {stack.tensors[f"{stack.prefix}{n}.{layout.up[0]}.weight"].shape[0] for n in stack.layers}
    # The config has one width, so it can hold that of all layers or of none.
    config = {"intermediate_size": "u"} if widths == {stack.config.get("intermediate_size")} else {}
    members = stack.members(dict.fromkeys(layout.up, "u"), {layout.down: "u"})
    mlp = Coupling(members, attrs=stack.attrs({}, config), name="mlp")
    return {"mlp": mlp} | _heads(stack) | _residual(stack)


def _heads(stack: Stack) -> dict[str, Coupling]:
    layout, d = stack.layout, _head_size(stack)
    q, k, v, o = layout.projections
    queries, keys = (stack.shapes[f"{module}.weight"][0] for module in (q, k))
    for module in layout.head_norms:
        shape = stack.shapes.get(f"{module}.weight", (d,))
        if shape != (d,):
            raise SparsityError(
                f"for_model: {stack.prefix}*.{module} normalizes {shape[0]} values, not one head of {d}, so heads "
                "depend on each other. discover(model, example_inputs) suggests couplings."
            )
    # A config can hold another number of heads only if it holds the head size by itself.
    config = {"num_attention_heads", "num_key_value_heads"} if "head_dim" in stack.config else set()
    if queries == keys:
        members = stack.members(dict.fromkeys((q, k, v), "(u d)"), {o: "(u d)"})
        attrs = stack.attrs(layout.ints, dict.fromkeys(config, "u"))
        return {"heads": Coupling(members, sizes={"d": d}, attrs=attrs, name="heads")}
    own = Coupling(
        stack.members({q: "(kv u d)"}, {o: "(kv u d)"}),
        scope="kv",
        sizes={"kv": keys // d, "d": d},
        attrs=stack.attrs({"num_key_value_groups": "u"}, {"num_attention_heads": "kv u"} if config else {}),
        name="heads",
    )
    shared = Coupling(
        stack.members({q: "(u g d)", k: "(u d)", v: "(u d)"}, {o: "(u g d)"}),
        sizes={"g": queries // keys, "d": d},
        attrs=stack.attrs({}, {"num_attention_heads": "u g", "num_key_value_heads": "u"} if config else {}),
        name="kv_heads",
    )
    return {"heads": own, "kv_heads": shared}


def _head_size(stack: Stack) -> int:
    """Rows of one head: an attribute of the attention module, else of the config."""
    config: Any = getattr(stack.model, "config", None)
    for holder, name in [(stack.attention, name) for name in _HEAD_SIZES] + [(config, "head_dim")]:
        if isinstance(getattr(holder, name, None), int):
            return int(getattr(holder, name))
    if hasattr(config, "hidden_size") and hasattr(config, "num_attention_heads"):
        return int(config.hidden_size) // int(config.num_attention_heads)
    raise SparsityError(
        f"for_model: the head size is unknown. {stack.prefix}{stack.layers[0]}.{stack.layout.attention} has no "
        f"{' or '.join(_HEAD_SIZES)}, and model.config has no head_dim, nor hidden_size and num_attention_heads. "
        "Write the coupling of heads by hand (Coupling)."
    )


def _residual(stack: Stack) -> dict[str, Coupling]:
    """The hidden size, where its norms have no bias (so that they can be RMSNorms) and nothing of it is an output."""
    layout, siblings = stack.layout, re.sub(r"[^.]+\.$", "", stack.prefix)
    paths = (siblings + layout.embedding, siblings + layout.final_norm, layout.head)
    embedding, norm, head = (f"{path}.weight" for path in paths)
    biased = any(f"{module}.bias" in stack.shapes for module in layout.norms)
    if biased or not layout.head or not {embedding, norm, head} <= stack.tensors.keys():
        return {}
    q, k, v, o = layout.projections
    layers = stack.members(dict.fromkeys((o, layout.down), "u"), dict.fromkeys((q, k, v, *layout.up), "u"))
    norms = {f"{stack.prefix}*.{module}.weight": "u" for module in layout.norms if f"{module}.weight" in stack.shapes}
    members = {name.replace("*", "**"): axes for name, axes in ({embedding: "o u"} | layers | norms).items()}
    members[norm] = "u"
    if stack.tensors[head] is not stack.tensors[embedding]:  # one tensor under two names is one member
        members[head] = "o u"
    attrs = stack.attrs({}, {"hidden_size": "u"} if "head_dim" in stack.config else {})
    return {"residual": Coupling(members, attrs=attrs, name="residual")}


def _check_layer(
    layout: Layout, layer: str, shapes: Mapping[str, tuple[int, ...]], first: Mapping[str, tuple[int, ...]]
) -> None:
    modules = (*layout.projections, *layout.up, layout.down, *layout.head_norms, *layout.norms)
    known = {f"{module}.{name}" for module in modules for name in ("weight", "bias")}
    for what, names in (("also has", shapes.keys() - known), ("lacks", set(layout.required) - shapes.keys())):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise SparsityError(
                f"for_model: {layer} is named as in {layout.family}, but {what} {min(names)}{more}, so its couplings "
                "are unknown. discover(model, example_inputs) suggests couplings."
            )
    # The widths of MLPs may differ between layers.
    sized = {f"{module}.weight" for module in (*layout.projections[:2], *layout.head_norms)}
    for name in sorted(shapes.keys() | first.keys()):
        found, wanted = (own.get(name) and (own[name] if name in sized else "there") for own in (shapes, first))
        if found != wanted:
            raise SparsityError(
                f"for_model: layers differ: {layer}.{name} is {found or 'missing'}, in the first layer "
                f"{wanted or 'missing'}. Write a Coupling for those that are alike, or use discover(model, inputs)."
            )
