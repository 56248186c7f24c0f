"""Couplings of a ResNet with torchvision's names: channels inside of blocks, and those of the residual streams."""

import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from ..errors import SparsityError
from .coupling import Coupling

_FIRST = re.compile(r"(.*?)layer1\.0\.conv1\.weight")
_IN_BLOCK = re.compile(r"(layer\d+\.\d+)\.(.+)")
_CONVS = ("conv1", "conv2", "conv3", "downsample.0")
_NORMS = ("bn1", "bn2", "bn3", "downsample.1")
_NORM_TENSORS = ("weight", "bias", "running_mean", "running_var")


def resnet_couplings(model_tensors: Mapping[str, Tensor]) -> dict[str, Coupling] | None:
    """All couplings of a ResNet, from its parameters and buffers by name; None if the names are not a ResNet's.

    Raises:
        SparsityError: a block with tensors or shapes that torchvision's ResNet does not have.
    """
    first = next(filter(None, map(_FIRST.fullmatch, model_tensors)), None)
    if first is None:
        return None
    prefix = first[1]
    tensors = {name.removeprefix(prefix): t for name, t in model_tensors.items() if name.startswith(prefix)}
    blocks: dict[str, list[str]] = {}
    for match in filter(None, map(_IN_BLOCK.fullmatch, tensors)):
        blocks.setdefault(match[1], []).append(match[2])
    for block, names in blocks.items():
        _check_block(prefix, block, names, tensors)
    last = 3 if "layer1.0.conv3.weight" in tensors else 2
    members = {f"conv{k}": _inside(k, tensors) for k in range(1, last)} | _streams(blocks, last, tensors)
    return {
        kind: Coupling({prefix + name: axes for name, axes in found.items()}, name=kind)
        for kind, found in members.items()
    }


def _inside(k: int, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Channels between one convolution and the next, of every block."""
    writers = _writers(f"conv{k}", f"bn{k}").items()
    found = {f"layer*.*.{name}": axes for name, axes in writers if f"layer1.0.{name}" in tensors}
    return found | {f"layer*.*.conv{k + 1}.weight": "o u h w"}


def _streams(
    blocks: Mapping[str, Sequence[str]], last: int, tensors: Mapping[str, Tensor]
) -> dict[str, dict[str, str]]:
    """Channels of each residual stream: a block with a downsampling ends one and begins the next."""
    kind, found = "stem", {"stem": _writers("conv1", "bn1")}
    for block, names in blocks.items():
        found[kind][f"{block}.conv1.weight"] = "o u h w"
        if "downsample.0.weight" in names:
            found[kind][f"{block}.downsample.0.weight"] = "o u h w"
            kind = block.partition(".")[0]
            found[kind] = _writers(f"{block}.downsample.0", f"{block}.downsample.1")
        found[kind] |= _writers(f"{block}.conv{last}", f"{block}.bn{last}")
    if "fc.weight" in tensors:
        found[kind]["fc.weight"] = "o u"
    else:
        del found[kind]  # the last stream is the output
    return {kind: {name: axes for name, axes in members.items() if name in tensors} for kind, members in found.items()}


def _writers(conv: str, norm: str) -> dict[str, str]:
    """The tensors that write channels: a convolution and the norm behind it."""
    return {f"{conv}.weight": "u i h w"} | {f"{norm}.{name}": "u" for name in _NORM_TENSORS}


def _check_block(prefix: str, block: str, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
    known = {f"{conv}.weight" for conv in _CONVS} | {f"{norm}.{name}" for norm in _NORMS for name in _NORM_TENSORS}
    other = [name for name in names if name not in known and not name.endswith("num_batches_tracked")]
    if other:
        raise SparsityError(
            f"for_model: {prefix}{block} is named as in torchvision's ResNet, but also has {other[0]}, whose couplings "
            "are unknown. discover(model, example_inputs) suggests couplings."
        )
    for before, after in (("conv1", "conv2"), ("conv2", "conv3")):
        a, b = (tensors.get(f"{block}.{conv}.weight") for conv in (before, after))
        if a is not None and b is not None and a.shape[0] != b.shape[1]:
            raise SparsityError(
                f"for_model: {prefix}{block}.{after} reads {b.shape[1]} of {a.shape[0]} channels at a time: it is a "
                "grouped convolution, whose channels cannot be removed one by one. discover(model, example_inputs) "
                "suggests couplings."
            )
