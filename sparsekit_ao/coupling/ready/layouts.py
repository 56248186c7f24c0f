"""How layers of common transformers name their tensors: a table, and nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["LAYOUTS", "Layout"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One layer of a family: modules by what they do, named from the layer on.

    Attributes:
        family: as errors call it.
        q, k, v, o: the projections of attention.
        up: what writes the hidden units of the MLP.
        down: what reads them.
        per_head: norms of one head, whose length is the head size.
        norms: all other modules that a layer may have.
        embedding, final_norm, head: what writes and reads the residual stream beside the layers, if all of its norms
            can be RMSNorms; names beside and (the head) above the layers.
        ints: {attribute: the axes whose product it holds}; `u` heads of size `d`.
    """

    family: str
    q: str
    k: str
    v: str
    o: str
    up: tuple[str, ...]
    down: str
    per_head: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    embedding: str = ""
    final_norm: str = ""
    head: str = ""
    ints: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def attention(self) -> str:
        """The module that holds the query projection."""
        return self.q.rpartition(".")[0]

    @property
    def modules(self) -> tuple[str, ...]:
        """All that a layer may have."""
        return (self.q, self.k, self.v, self.o, *self.up, self.down, *self.per_head, *self.norms)

    @property
    def required(self) -> tuple[str, ...]:
        """The weights that make a layer one of this family."""
        return tuple(f"{module}.weight" for module in (self.q, self.k, self.v, self.o, *self.up, self.down))


LAYOUTS = (
    Layout(
        family="Llama-, Qwen- and Mistral-like decoders",
        q="self_attn.q_proj",
        k="self_attn.k_proj",
        v="self_attn.v_proj",
        o="self_attn.o_proj",
        up=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
        per_head=("self_attn.q_norm", "self_attn.k_norm"),
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        embedding="embed_tokens",
        final_norm="norm",
        head="lm_head",
    ),
    Layout(
        family="BERT-like encoders",
        q="attention.self.query",
        k="attention.self.key",
        v="attention.self.value",
        o="attention.output.dense",
        up=("intermediate.dense",),
        down="output.dense",
        norms=("attention.output.LayerNorm", "output.LayerNorm"),
        ints={"num_attention_heads": "u", "all_head_size": "u d"},
    ),
    Layout(
        family="DistilBERT",
        q="attention.q_lin",
        k="attention.k_lin",
        v="attention.v_lin",
        o="attention.out_lin",
        up=("ffn.lin1",),
        down="ffn.lin2",
        norms=("sa_layer_norm", "output_layer_norm"),
        ints={"n_heads": "u", "dim": "u d"},
    ),
    Layout(
        family="ViT",
        q="attention.q_proj",
        k="attention.k_proj",
        v="attention.v_proj",
        o="attention.o_proj",
        up=("mlp.fc1",),
        down="mlp.fc2",
        norms=("layernorm_before", "layernorm_after"),
        ints={"num_attention_heads": "u"},
    ),
    Layout(
        family="ViT of transformers 4",
        q="attention.attention.query",
        k="attention.attention.key",
        v="attention.attention.value",
        o="attention.output.dense",
        up=("intermediate.dense",),
        down="output.dense",
        norms=("layernorm_before", "layernorm_after"),
        ints={"num_attention_heads": "u", "all_head_size": "u d"},
    ),
)
