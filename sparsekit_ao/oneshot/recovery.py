"""`recover` trains the blocks of a pruned model to give the outputs of the dense model's blocks, without labels.

3BASiL (arXiv 2603.01376) and "A Free Lunch in LLM Compression" (arXiv 2510.14444) do this with language models.
"""

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .. import masking
from ..errors import SparsityError, is_number
from ..models.loading import Device, is_elsewhere
from ..models.names import named_tensors, owner_of
from ..models.progress import public_call
from ..models.running import TokenMask
from .chain import CalibrationData
from .prune_report import RecoverReport
from .teacher import Teacher, names_in_dense
from .training import PASSES, RATE
from .walk import Walk, check_options, checkpoint_of


@public_call
def recover(
    model: nn.Module,
    dense: nn.Module,
    batches: Iterable[Any],
    forward: Callable[[nn.Module, Any], Any] | None = None,
    *,
    passes: int = PASSES,
    rate: float = RATE,
    outputs: str | None = None,
    layers: str | None = None,
    token_mask: TokenMask = None,
    seed: int = 0,
    device: Device = None,
    stream_memory: float | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> RecoverReport:
    """Train the repeated blocks of a pruned model, in order, to give the outputs of the dense model's blocks.

    For a block B with input x in the dense model and x~ in the pruned one, the mean of ||B(x~) - B_dense(x)||^2 over
    all tokens is minimized by Adam. A token whose dense output has more than twice the typical norm, as the first one
    of a text often has, counts by its relative error. Kept weights, biases and norm parameters change, whether they
    require gradients or not; embeddings, and output layers that are tied to them, do not. Masks stay, and so do zeros:
    in tensors of two or more dimensions, elements that are exactly 0 remain 0. A model without repeated blocks is
    trained as one block. Before a whole model is trained, the running statistics of its batch norms are estimated anew
    on the batches, and kept if the error of its outputs is smaller with them. Batches in which a channel has a single
    value do not count there.

    Apart from these norms, both models run in eval mode. Weights in 16 bits are trained as float32 copies. Besides the
    models, memory holds the inputs of a block in both models for all batches, and five times the weights of one block
    in float32. Either model may be offloaded by accelerate (its blocks are then read one by one) or sharded by
    `fully_shard`. All chains of blocks are trained, such as an encoder and a decoder; the report says which pruned
    layers are in none of them.

    In distributed training all ranks pass the same models and the same number of batches. A step takes a part of one
    batch of each rank, so that steps are those of one process with all batches, and gradients are summed over ranks.

    Args:
        model: The pruned model, which is changed in place. It may be masked, squashed, or made smaller by `shrink` or
            `shrink_layers`. A block that remains after `shrink_layers` also learns what the removed blocks after it
            did.
        dense: The dense model that `model` was made from. Blocks have the same names and outputs of the same shapes in
            both models.
        batches: Calibration data without labels, as for `one_shot`. More data helps more than more passes.
        forward: A function `(model, batch) -> outputs` that is called instead of the models.
        passes: The number of passes over all batches for each block, 4 by default. The error is measured on eight
            batches: before the first pass, after the last one, and after every second one before that, counted from
            the end. The weights with the smallest error are taken. Training of a block ends early if four passes have
            not made its error smaller. An eighth of the rows of the eight batches is held out from training to measure
            the error; if these batches have fewer than 2,048 rows, it is measured on all of their rows.
        rate: The highest learning rate, as a fraction of the root mean square of a block's kept weights; 0.02 by
            default. A whole model is trained with half of it.
        outputs: If given, the whole model is trained at once and not block by block, to give the dense model's outputs
            (the first tensor that the model or `forward` returns), by the mean squared error (`"mse"`) or the
            divergence of logits (`"kl"`). This takes more time and memory. It is for a last call, after the blocks, at
            a far lower `rate`, such as 0.0005.
        layers: The name of a list of repeated modules, a ModuleList or Sequential. None (default) finds all lists.
        token_mask: Which tokens count, as for `one_shot`.
        seed: An int that determines the order of batches.
        device, stream_memory, checkpoint, progress: As for `one_shot`.

    Returns:
        A `RecoverReport` with a row for each block that was trained: its relative output error before and after.

    Raises:
        SparsityError: An argument does not fit, there are no batches, blocks of the models do not fit each other, or
            values are not finite. After an error or an interruption, blocks that were finished keep their new weights,
            the block that was being trained has the weights of its best pass so far (if it is offloaded, its weights
            are as they were), and later blocks are as they were.

    >>> import copy
    >>> from sparsekit_ao import ScopeSparsifier, one_shot, recover
    >>> dense = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
    >>> model, batches = copy.deepcopy(dense), [torch.randn(64, 16) for _ in range(8)]
    >>> sparsifier = ScopeSparsifier(nnz=2, scope_shape=(1, 4))  # 2:4
    >>> sparsifier.prepare(model)
    >>> report = one_shot(sparsifier, batches)
    >>> (row,) = recover(model, dense, batches)
    >>> row.after < row.before, sparsifier.check()
    (True, 256)
    """
    for value, what, least in ((passes, "passes", 1), (seed, "seed", 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise SparsityError(f"recover: {what} must be an int >= {least}, got {value!r}")
    if not is_number(rate) or not 0 < float(rate) < math.inf:
        raise SparsityError(f"recover: rate must be a positive number, got {rate!r}")
    if outputs not in (None, "mse", "kl"):
        raise SparsityError(f"recover: outputs must be 'mse', 'kl' or None, got {outputs!r}")
    check_options("recover", device, stream_memory, checkpoint)
    data = CalibrationData.checked(model, batches, forward, token_mask, "recover")
    teacher = Teacher(dense, data, passes=passes, rate=rate, seed=seed, outputs=outputs)
    changed = _changed_layers(model, dense) if outputs is None else ()  # without layers there are no blocks
    listed = layers if outputs is None else None
    walk = Walk(data, (), blocks=listed, layers=changed, device=device, stream_memory=stream_memory)
    of_blocks = {"layers": layers, "device": device, "stream_memory": stream_memory, "checkpoint": checkpoint}
    if not walk.blocks and (given := [name for name, value in of_blocks.items() if value is not None]):
        why = "has no repeated blocks" if outputs is None else "is trained on its outputs"
        raise SparsityError(f"recover: the model {why}, so it is trained as a whole; leave out {', '.join(given)}")
    saved = checkpoint_of(data, checkpoint, "recover", teacher.described(), layers, device)
    report = teacher.finish(walk.run("recover", None, teacher, checkpoint=saved)[1])
    return replace(report, error_to_dense=data.error_to(replace(data, model=dense).first_output()))


def _changed_layers(model: nn.Module, dense: nn.Module) -> list[nn.Module]:
    """Return the modules whose matrices differ in the dense model; all with matrices if none do, or if blocks left."""
    names = [name for name, p in named_tensors(model) if p.ndim > 1]
    layers, changed, dense_tensors = [owner_of(model, name)[0] for name in names], [], dict(named_tensors(dense))
    has_lost_blocks = len(dense_tensors) > sum(1 for _ in named_tensors(model))
    if has_lost_blocks or is_elsewhere(model) or is_elsewhere(dense):
        return layers  # the values of offloaded and sharded weights cannot be compared here
    for name, dense_name in zip(names, names_in_dense(model, dense, names), strict=True):
        module, tensor = owner_of(model, name)
        other = dense_tensors.get(dense_name)
        weight = masking.used_weight(module, tensor)
        if other is None or weight.shape != other.shape or not torch.equal(weight, other.to(weight.device)):
            changed.append(module)
    return changed or layers
