"""Drop single attentions and MLPs of a transformer, those whose outputs change the hidden states least.

    sublayers = by_influence(model, "model.layers", batches)
    drop(model, sublayers[: len(sublayers) // 4])

A dropped module gives zeros and has no parameters. Models of transformers cannot be loaded without single attentions or
MLPs, so save the whole model by `torch.save`; `examples/save_decilm.py` saves a Llama for vLLM. To remove whole blocks,
after which `from_pretrained` loads the model, call `sparsekit_ao.removal.shrink_layers`.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree

ATTENTION, MLP = "attn|attention", "mlp|ffn|feed_?forward|moe|expert"  # found in the names of modules of a block


class Sublayer(NamedTuple):
    """An attention or MLP: its name, its influence, and how many outputs it returns in a tuple (0: a tensor)."""

    name: str
    influence: float
    outputs: int


class Zeros(nn.Module):
    """Stands in for an attention or MLP: zeros like its first input, first in a tuple if the module returned one."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the zeros."""
        zeros = torch.zeros_like(first_tensor([args, kwargs]))
        return (zeros, *[None] * (self.outputs - 1)) if self.outputs else zeros


def drop(model: nn.Module, sublayers: Iterable[Sublayer]) -> None:
    """Replace attentions and MLPs by `Zeros`, in place."""
    for sublayer in sublayers:
        model.set_submodule(sublayer.name, Zeros(sublayer.outputs))


@torch.no_grad()
def by_influence(model: Any, path: str, batches: Iterable[Mapping[str, Any]]) -> list[Sublayer]:
    """Return the attentions and MLPs of the blocks in the list at `path`, those of the least influence first.

    The influence is one minus the cosine of the hidden states before and after the output is added to them, averaged
    over tokens. The first attention of each type (full, sliding) is left out, because caches count tokens by it.
    """
    outputs: dict[str, Any] = {}  # of the modules of the block that runs now, in the order of their calls
    lengths: dict[str, int] = {}  # of the tuples that modules return
    cosines: dict[str, list[Tensor]] = defaultdict(list)

    def keep_output(child: str, *call: Any) -> None:
        outputs[child] = changed(torch.clone, call[-1])  # a clone, since blocks may add to it in place

    def score(name: str, block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        states = states_between(block, args, kwargs, outputs)
        if not (states[0].equal(first_tensor([args, kwargs])) and states[-1].equal(first_tensor(output))):
            names = ", ".join(outputs)
            raise ValueError(f"{name} does not only add {names} to its input; a norm may follow the sum, as in BERT")
        for child, before, after in zip(outputs, states, states[1:], strict=False):
            cosine = F.cosine_similarity(before.double(), after.double(), dim=-1)
            cosines[f"{name}.{child}"].append(cosine.flatten())
            lengths[f"{name}.{child}"] = len(outputs[child]) if isinstance(outputs[child], tuple) else 0
        outputs.clear()

    was_training = model.training
    with ExitStack() as hooks:
        hooks.callback(model.train, was_training)
        model.eval()
        for at, block in enumerate(model.get_submodule(path)):
            hooks.enter_context(block.register_forward_hook(partial(score, f"{path}.{at}"), with_kwargs=True))
            for child, module in block.named_children():
                if isinstance(module, nn.Linear) or [*module.children()]:  # norms and dropout are neither
                    hooks.enter_context(module.register_forward_hook(partial(keep_output, child)))
        for batch in batches:
            model(**batch)
    types, first_of_type = getattr(model.config, "layer_types", None), set()
    sublayers = []
    for name, values in cosines.items():
        at, child = name.split(".")[-2:]
        type_in_cache = types[int(at)] if types else ""
        if re.search(ATTENTION, child) and type_in_cache not in first_of_type:
            first_of_type.add(type_in_cache)
        elif re.search(f"{ATTENTION}|{MLP}", child):
            sublayers.append(Sublayer(name, 1 - torch.cat(values).mean().item(), lengths[name]))
    return sorted(sublayers, key=lambda sublayer: sublayer.influence)


def states_between(block: nn.Module, args: Any, kwargs: Any, outputs: Mapping[str, Any]) -> list[Tensor]:
    """Return what a block gives if the first 0, 1, 2, ... of its modules in `outputs` give these, the rest zeros."""
    constants = {child: changed(torch.zeros_like, output) for child, output in outputs.items()}
    states = []
    try:
        for last in (None, *outputs):
            constants |= {last: outputs[last]} if last else {}
            for child, constant in constants.items():
                # An attribute of the instance hides the module, which `nn.Module.__getattr__` would find.
                vars(block)[child] = lambda *_, constant=constant, **__: changed(torch.clone, constant)
            states.append(first_tensor(block.forward(*args, **kwargs)))
    finally:
        for child in outputs:
            vars(block).pop(child, None)
    return states


def changed(change: Callable[[Tensor], Tensor], output: Any) -> Any:
    """Return an output with `change` of its first tensor."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def first_tensor(value: Any) -> Tensor:
    """Return the first tensor of nested arguments or outputs."""
    return next(leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor))
