"""for_model: the couplings of known transformers and mixtures of experts, by the names of their tensors.

To add a family, add a row to the table `LAYOUTS`, which says how the modules of a layer are named.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..errors import SparsityError, checked_model
from ..sparsifiers.names import named_tensors
from .bound import is_list
from .coupling import Coupling

_HEAD_SIZES = ("head_dim", "attention_head_size")
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "experts_per_rank")
_LISTED_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(gate_proj|w1)\.weight")
_UP_AND_DOWN = {"gate_proj": (("gate_proj", "up_proj"), "down_proj"), "w1": (("w1", "w3"), "w2")}


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
        stream: embedding and last norm, siblings of the list of layers, and the head, named from the model on; empty
            if the norms of the residual stream cannot be RMSNorms.
        ints: {attribute of the attention module: the axes whose product it holds}; `u` heads of size `d`.
    """

    family: str
    projections: tuple[str, ...]
    up: tuple[str, ...]
    down: str
    head_norms: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    stream: tuple[str, ...] = ()
    ints: Mapping[str, str] = field(default_factory=dict, hash=False)


LAYOUTS = (
    Layout(
        family="Llama-, Qwen- and Mistral-like decoders",
        projections=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        up=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
        head_norms=("self_attn.q_norm", "self_attn.k_norm"),
        norms=tuple(f"{at}_layernorm" for at in ("input", "post_attention", "pre_feedforward", "post_feedforward")),
        stream=("embed_tokens", "norm", "lm_head"),
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


def for_model(model: nn.Module) -> dict[str, Coupling]:
    """Return the couplings of a Hugging Face Llama/Qwen/Mistral-like decoder, BERT-like encoder, ViT or MoE.

    Transformers have `"mlp"` (hidden units) and `"heads"`. Where query heads share key heads, `"heads"` are the query
    heads, an equal number within each key head (scope `kv`), and `"kv_heads"` whole key heads with their queries. A
    decoder with an `lm_head` also has `"residual"`, its hidden size (exact where its norms are RMSNorms).

    A mixture of experts, packed or a list of modules, has `"expert_units"` and `"experts"` (`discover` finds its heads
    and hidden size). The former are hidden units inside of each expert, the latter whole experts with their rows of the
    router. Whole experts are not exact: a router without a row never chooses a dropped expert, while one that is only
    zero may be chosen. So `compact` takes them with a larger `tolerance` only (`tolerance=10`, say), and reports the
    difference.

    Integers that hold such a size (`num_attention_heads` of modules and config, say) are in the couplings' `attrs`, for
    `compact`. Couplings that share a tensor are prepared together by `joint_entries`. For other models, ResNets for
    instance, use `discover`, which needs example inputs.

    The head size is the attention module's `head_dim` or `attention_head_size`, else the config's `head_dim`, else its
    `hidden_size // num_attention_heads`; numbers of heads follow from the shapes.

    Args:
        model: with plain tensors or after `prepare`; it is not changed.

    Returns:
        {kind of unit: coupling}.

    Raises:
        SparsityError: another architecture; layers with unknown tensors, or of different shapes.

    >>> class Layer(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.attention = torch.nn.ModuleDict({n: torch.nn.Linear(8, 8) for n in ("q_lin", "k_lin", "v_lin")})
    ...         self.attention["out_lin"] = torch.nn.Linear(8, 8)
    ...         self.attention.head_dim = 4
    ...         self.ffn = torch.nn.ModuleDict({"lin1": torch.nn.Linear(8, 16), "lin2": torch.nn.Linear(16, 8)})
    >>> couplings = for_model(torch.nn.ModuleList([Layer(), Layer()]))
    >>> couplings["mlp"].members
    {'*.ffn.lin1.weight': 'u i', '*.ffn.lin1.bias': 'u', '*.ffn.lin2.weight': 'o u'}
    >>> couplings["heads"].members["*.attention.out_lin.weight"], couplings["heads"].sizes
    ('o (u d)', {'d': 4})
    """
    parameters = dict(named_tensors(checked_model(model, "for_model")))
    experts = _expert_couplings(model, parameters | dict(model.named_buffers()))
    if experts:
        return experts
    for layout in LAYOUTS:
        query = re.compile(rf"(.*?)(\d+)\.{re.escape(layout.projections[0])}\.weight")
        layers = [match for match in map(query.fullmatch, parameters) if match]
        if layers:
            return _Stack(layout, model, parameters, layers).couplings()
    names = ", ".join(f"{layout.family} ('*.{layout.projections[0]}.weight')" for layout in LAYOUTS)
    raise SparsityError(
        f"for_model does not know {type(model).__name__}. It looked for the tensor names of {names}, and for experts. "
        "Use coupling.discover(model, example_inputs), which suggests couplings for any model; or write them by hand "
        "(Coupling)."
    )


class _Stack:
    """The layers of one transformer: all have tensors of the same names and, but for widths of MLPs, shapes.

    `prefix` begins the layers' names (`model.layers.`); `shapes` are those of the first layer, by name in it.
    """

    def __init__(
        self, layout: Layout, model: nn.Module, parameters: Mapping[str, Tensor], layers: list[re.Match[str]]
    ) -> None:
        prefixes = sorted({match[1] for match in layers})
        if len(prefixes) > 1:
            raise SparsityError(
                f"for_model: there are several stacks of {layout.family}: {', '.join(prefixes)}. Pass the submodule "
                "that contains one, or use discover(model, example_inputs)."
            )
        self.layout, self.model, self.parameters, self.prefix = layout, model, parameters, prefixes[0]
        self.names = [f"{match[1]}{match[2]}" for match in layers]
        self.attention = layout.projections[0].rpartition(".")[0]
        self.module: Any = model.get_submodule(f"{self.names[0]}.{self.attention}")
        self.config: Any = getattr(model, "config", None) or nn.Module()
        shapes: dict[str, dict[str, tuple[int, ...]]] = {f"{name}.": {} for name in self.names}
        for start, layer in shapes.items():
            layer |= {n.removeprefix(start): tuple(t.shape) for n, t in parameters.items() if n.startswith(start)}
        self.shapes = shapes[f"{self.names[0]}."]
        for start, layer in shapes.items():
            self._check(start, layer)

    def _check(self, start: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise unless a layer has the tensors of its family, as the first layer does."""
        layout = self.layout
        required = (*layout.projections, *layout.up, layout.down)
        known = {f"{m}.{n}" for m in (*required, *layout.head_norms, *layout.norms) for n in ("weight", "bias")}
        lacking = {f"{module}.weight" for module in required} - shapes.keys()
        for what, names in (("also has", shapes.keys() - known), ("lacks", lacking)):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise SparsityError(
                    f"for_model: {start[:-1]} is named as in {layout.family}, but {what} {min(names)}{more}, so its "
                    "couplings are unknown. discover(model, example_inputs) suggests couplings."
                )
        sized = {f"{module}.weight" for module in (*layout.projections[:2], *layout.head_norms)}
        for name in sorted(shapes.keys() | self.shapes.keys()):
            here, first = (s.get(name) and (s[name] if name in sized else "there") for s in (shapes, self.shapes))
            if here != first:
                raise SparsityError(
                    f"for_model: layers differ: {start}{name} is {here or 'missing'}, in the first layer "
                    f"{first or 'missing'}. Write a Coupling for those that are alike, or use discover(model, inputs)."
                )

    def couplings(self) -> dict[str, Coupling]:
        """Return all couplings by name."""
        up, down = self.layout.up, self.layout.down
        widths = {self.parameters[f"{name}.{up[0]}.weight"].shape[0] for name in self.names}
        # The config has one width, so it can hold that of all layers or of none.
        config = {"intermediate_size": "u"} if widths == {vars(self.config).get("intermediate_size")} else {}
        mlp = Coupling(self._members(dict.fromkeys(up, "u"), {down: "u"}), attrs=self._attrs({}, config), name="mlp")
        return {"mlp": mlp} | self._heads() | self._residual()

    def _members(self, rows: Mapping[str, str], columns: Mapping[str, str]) -> dict[str, str]:
        """Return tensors of every layer; `rows` and `columns` are {module: axes of its outputs, or of its inputs}."""
        names: dict[str, str] = {}
        for module, axes in rows.items():
            names |= {f"{module}.weight": f"{axes} i", f"{module}.bias": axes}
        names |= {f"{module}.weight": f"o {axes}" for module, axes in columns.items()}
        return {f"{self.prefix}*.{name}": axes for name, axes in names.items() if name in self.shapes}

    def _attrs(self, ints: Mapping[str, str], config: Mapping[str, str]) -> dict[str, str]:
        """Return the integers to update, as far as the attention modules and the config have them."""
        path = f"{self.prefix}*.{self.attention}"
        rows = [(self.module, name, f"{path}.{name}", axes) for name, axes in ints.items()]
        rows += [(self.config, name, f"config.{name}", axes) for name, axes in config.items()]
        return {full: axes for holder, name, full, axes in rows if isinstance(getattr(holder, name, None), int)}

    def _heads(self) -> dict[str, Coupling]:
        d = self._head_size()
        q, k, v, o = self.layout.projections
        queries, keys = (self.shapes[f"{module}.weight"][0] for module in (q, k))
        for module in self.layout.head_norms:
            shape = self.shapes.get(f"{module}.weight", (d,))
            if shape != (d,):
                raise SparsityError(
                    f"for_model: {self.prefix}*.{module} normalizes {shape[0]} values, not one head of {d}, so heads "
                    "depend on each other. discover(model, example_inputs) suggests couplings."
                )
        # A config can hold another number of heads only if it holds the head size by itself.
        named = "head_dim" in vars(self.config)
        queries_of, keys_of = ("num_attention_heads", "num_key_value_heads") if named else ("", "")
        if queries == keys:
            members = self._members(dict.fromkeys((q, k, v), "(u d)"), {o: "(u d)"})
            attrs = self._attrs(self.layout.ints, {queries_of: "u", keys_of: "u"})
            return {"heads": Coupling(members, sizes={"d": d}, attrs=attrs, name="heads")}
        heads = Coupling(
            self._members({q: "(kv u d)"}, {o: "(kv u d)"}),
            scope="kv",
            sizes={"kv": keys // d, "d": d},
            attrs=self._attrs({"num_key_value_groups": "u"}, {queries_of: "kv u"}),
            name="heads",
        )
        key_heads = Coupling(
            self._members({q: "(u g d)", k: "(u d)", v: "(u d)"}, {o: "(u g d)"}),
            sizes={"g": queries // keys, "d": d},
            attrs=self._attrs({}, {queries_of: "u g", keys_of: "u"}),
            name="kv_heads",
        )
        return {"heads": heads, "kv_heads": key_heads}

    def _head_size(self) -> int:
        """Return the rows of one head: an attribute of the attention module, else of the config."""
        holders = [(self.module, name) for name in _HEAD_SIZES] + [(self.config, "head_dim")]
        for size in (getattr(holder, name, None) for holder, name in holders):
            if isinstance(size, int):
                return size
        if hasattr(self.config, "hidden_size") and hasattr(self.config, "num_attention_heads"):
            return int(self.config.hidden_size) // int(self.config.num_attention_heads)
        raise SparsityError(
            f"for_model: the head size is unknown. {self.names[0]}.{self.attention} has no "
            f"{' or '.join(_HEAD_SIZES)}, and model.config has no head_dim, nor hidden_size and num_attention_heads. "
            "Write the coupling of heads by hand (Coupling)."
        )

    def _residual(self) -> dict[str, Coupling]:
        """Return the coupling of the hidden size, unless a norm has a bias (is no RMSNorm) or it is an output."""
        layout, siblings = self.layout, re.sub(r"[^.]+\.$", "", self.prefix)
        if not layout.stream or any(f"{module}.bias" in self.shapes for module in layout.norms):
            return {}
        paths = (siblings + layout.stream[0], siblings + layout.stream[1], layout.stream[2])
        embedding, norm, head = (f"{path}.weight" for path in paths)
        if not {embedding, norm, head} <= self.parameters.keys():
            return {}
        q, k, v, o = layout.projections
        layers = self._members(dict.fromkeys((o, layout.down), "u"), dict.fromkeys((q, k, v, *layout.up), "u"))
        norms = {f"{self.prefix}*.{name}.weight": "u" for name in layout.norms if f"{name}.weight" in self.shapes}
        members = {embedding: "o u"} | {name.replace("*", "**"): axes for name, axes in (layers | norms).items()}
        members |= {norm: "u"}
        if self.parameters[head] is not self.parameters[embedding]:  # one tensor under two names is one member
            members |= {head: "o u"}
        attrs = self._attrs({}, {"hidden_size": "u"} if "head_dim" in vars(self.config) else {})
        return {"residual": Coupling(members, attrs=attrs, name="residual")}


def _expert_couplings(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Coupling]:
    """Return `"expert_units"`, and `"experts"` where a router has a row for each; {} for a model without experts.

    Packed experts hold `gate_up_proj` (experts, 2 * hidden, width) and `down_proj` (experts, width, hidden), as
    Mixtral, Qwen-MoE and DeepSeek of transformers do. Listed ones are modules `experts.0`, ... of an `nn.ModuleList`.
    """
    packed = next((fqn.rpartition(".")[0] for fqn in tensors if _is_packed(fqn, tensors)), None)
    listed = next(filter(None, map(_LISTED_EXPERT.fullmatch, tensors)), None)
    if packed is not None:
        path, name, experts = packed, _starred(packed), model.get_submodule(packed)
        up, down = f"{name}.gate_up_proj", f"{name}.down_proj"
        attrs = {f"{name}.intermediate_dim": "u"} if isinstance(getattr(experts, "intermediate_dim", None), int) else {}
        units = Coupling({up: "s (g u) i", down: "s o u"}, scope="s", sizes={"g": 2}, attrs=attrs, name="expert_units")
        whole = _whole_experts(model, tensors, path, len(tensors[f"{path}.down_proj"]), (up, down))
    elif listed:
        path, name, experts = listed[1], _starred(listed[1]), model.get_submodule(listed[1])
        ups, down = _UP_AND_DOWN[listed[3]]
        axes = {f"{up}.weight": "u i" for up in ups} | {f"{up}.bias": "u" for up in ups} | {f"{down}.weight": "o u"}
        first = f"{path}.{listed[2]}"
        members = {f"{name}.*.{key}": text for key, text in axes.items() if f"{first}.{key}" in tensors}
        units = Coupling(members, name="expert_units")
        whole = _whole_experts(model, tensors, path, len(experts), lists=(name,)) if is_list(experts) else {}  # type: ignore[arg-type]
    else:
        return {}
    return {"expert_units": units} | whole


def _whole_experts(
    model: nn.Module, tensors: Mapping[str, Tensor], path: str, experts: int, packed: tuple[str, ...] = (), **keys: Any
) -> dict[str, Coupling]:
    """Return `"experts"`, whose unit is in the packed tensors or a module of `lists` in `keys`; {} without a router.

    A router is a module beside the experts whose `weight` is a matrix with a row for each of them.
    """
    parent = path.rpartition(".")[0]
    beside = re.compile(re.escape(f"{parent}." if parent else "") + r"[^.]+\.weight")
    weights = [fqn for fqn, t in tensors.items() if beside.fullmatch(fqn) and t.ndim == 2 and len(t) == experts]
    routers = [fqn.removesuffix(".weight") for fqn in weights]
    if not routers:
        return {}
    # Some routers choose among groups of experts first.
    ints = [getattr(model.get_submodule(router), key, 1) for router in routers for key in ("num_group", "n_group")]
    groups = max(n for n in ints if isinstance(n, int))
    rows, axes = ("(s u)", "s u") if groups > 1 else ("u", "u")
    members = dict.fromkeys(packed, f"{rows} a b")
    for fqn, tensor in tensors.items():
        if fqn.rpartition(".")[0] in routers and tensor.shape[:1] == (experts,):
            members[_starred(fqn)] = rows + " i" * (tensor.ndim - 1)
    holders = {f"{_starred(name)}.".lstrip("."): vars(model.get_submodule(name)) for name in (path, parent, *routers)}
    holders["config."] = vars(getattr(model, "config", None) or nn.Module())
    attrs = {
        f"{name}{key}": axes for name, ints in holders.items() for key in _EXPERT_COUNTS if ints.get(key) == experts
    }
    keys |= {"scope": "s", "sizes": {"s": groups}} if groups > 1 else {}
    return {"experts": Coupling(members, attrs=attrs, name="experts", **keys)}


def _is_packed(fqn: str, tensors: Mapping[str, Tensor]) -> bool:
    up, down = tensors[fqn], tensors.get(f"{fqn.rpartition('.')[0]}.down_proj")
    if not fqn.endswith(".gate_up_proj") or down is None or (up.ndim, down.ndim) != (3, 3):
        return False
    return tuple(up.shape) == (down.shape[0], 2 * down.shape[2], down.shape[1])


def _starred(path: str) -> str:
    """Replace the first number of a name, that of the layer, by `*`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path, count=1)
