"""Save a Llama whose layers differ as a DeciLM (Nemotron-NAS) folder, which vLLM loads; vLLM itself is not run.

    python examples/save_decilm.py --out out/decilm     # a small Llama of random weights: seconds

`save_decilm` is what to copy. Prints the sizes of each layer as the folder has them.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from sparsekit_ao import SparsityError, shrink

CONFIG = '''"""The config of a model whose layers differ; engines read `block_configs`."""

from types import SimpleNamespace

from transformers import LlamaConfig


class DeciLMConfig(LlamaConfig):
    model_type = "nemotron-nas"

    def __init__(self, block_configs=(), **kwargs):
        super().__init__(**kwargs)
        self.blocks = [dict(block) for block in block_configs]

    @property
    def block_configs(self):
        return [SimpleNamespace(**{part: SimpleNamespace(**keys) for part, keys in b.items()}) for b in self.blocks]
'''


def save_decilm(model: Any, path: str | Path) -> None:
    """Save a Llama as such a folder, with Llama's names of tensors.

    The folder has the code of its config, so that it is loaded with `trust_remote_code=True`.
    `block_configs` in config.json has, for every layer, the number of query heads for each key head, the number of MLP
    units, and `no_op` for an attention or MLP without parameters, which `examples/drop_sublayers.py` leaves.

    Args:
        model: A `LlamaForCausalLM`, as `shrink(..., keep_config=False)` returns it.
        path: Folder.

    Raises:
        SparsityError: It is of another class; or layers have different numbers of query heads, or a number that their
            key heads do not divide, which the format cannot hold.
    """
    if type(model).__name__ != "LlamaForCausalLM":
        raise SparsityError(f"save_decilm: expected a LlamaForCausalLM, got {type(model).__name__}")
    sizes = [sizes_of(layer) for layer in model.model.layers]
    keys = ("num_attention_heads", "num_key_value_heads", "head_dim")
    heads, key_heads, head_dims = ([layer[key] for layer in sizes if key in layer] for key in keys)
    if len({*heads}) > 1 or any(heads[0] % n for n in key_heads) or {*head_dims} != {model.config.head_dim}:
        raise SparsityError(
            f"save_decilm: layers must have one number of query heads, {heads[0]}, which their key heads divide, and "
            f"heads of {model.config.head_dim}; they have {heads} and {key_heads}, of {head_dims}. Shrink heads with "
            "keep_config=True, and MLPs by their own couplings."
        )
    if "head_dim" not in (first := next(filter(None, sizes))):
        raise SparsityError("save_decilm: vLLM's first block with an MLP needs an attention too, and this has none")
    parts = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}
    unread = {  # norms before what gives zeros
        f"model.layers.{at}.{norm}.weight"
        for at, layer in enumerate(model.model.layers)
        for part, norm in parts.items()
        if not [*layer.get_submodule(part).parameters()]
    }
    folder = Path(path)
    model.save_pretrained(folder, state_dict={k: v for k, v in model.state_dict().items() if k not in unread})
    data = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["DeciLMForCausalLM"],
        "model_type": "nemotron-nas",
        "auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig"},
        "hidden_size": first["hidden_size"],
        "num_attention_heads": heads[0],
        "intermediate_size": max(layer.get("intermediate_size", 1) for layer in sizes),
        "num_key_value_heads": max(key_heads),
        "block_configs": [
            {
                "attention": {"no_op": not keys, "n_heads_in_group": heads[0] // keys if keys else None},
                "ffn": {"no_op": width is None, "intermediate_size": width},
            }
            for keys, width in ((layer.get("num_key_value_heads"), layer.get("intermediate_size")) for layer in sizes)
        ],
    }
    (folder / "config.json").write_text(json.dumps(data, indent=2) + "\n")
    (folder / "configuration_decilm.py").write_text(CONFIG)


def sizes_of(layer: Any) -> dict[str, int]:
    """The sizes of a layer, without those of an attention or MLP that has no parameters."""
    attention, mlp, sizes = layer.self_attn, layer.mlp, {}
    if [*attention.parameters()]:
        sizes["num_attention_heads"] = attention.q_proj.out_features // attention.head_dim
        sizes["num_key_value_heads"] = attention.k_proj.out_features // attention.head_dim
        sizes |= {"hidden_size": attention.q_proj.in_features, "head_dim": attention.head_dim}
    if [*mlp.parameters()]:
        sizes["intermediate_size"] = mlp.down_proj.in_features
    return sizes


def main() -> None:
    """Shrink a Llama by FLOPs, so that each layer keeps a number of MLP units of its own, and save it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/decilm"))
    folder = parser.parse_args().out
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 64}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4)).eval()
    with torch.no_grad():
        for at, layer in enumerate(llama.model.layers):
            layer.mlp.down_proj.weight *= 0.5**at  # so that layers differ in importance
    tokens = torch.randint(0, 64, (2, 8))
    small, _ = shrink(
        llama, {"input_ids": tokens}, 0.25, exclude=["*self_attn*"], budget="parameters", keep_config=False
    )
    save_decilm(small, folder)
    for block in json.loads((folder / "config.json").read_text())["block_configs"]:
        print(block)


if __name__ == "__main__":
    main()
