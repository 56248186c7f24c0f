"""Scores: how much every weight matters, from the weight and from statistics of calibration data.

A score is a function `(weight, name) -> saliency`, or an object with `needs` (some of `calibration.NEEDS`), which is
called as `(weight, statistics) -> saliency`. All tensors have the parameter's own shape, whatever view, axes or blocks
the pattern takes; a block's score is the sum of its elements' saliencies (the mean where blocks differ in size). Names
work too: `score="wanda"`. Calibrate before `step` where a score needs statistics:

>>> import sparsekit_ao
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 2, bias=False))
>>> sparsifier = sparsekit_ao.ScopeSparsifier(score="wanda", nnz=2, scope_shape=(1, 4))  # 2:4
>>> sparsifier.prepare(model)
>>> sparsifier.calibrate([torch.eye(4) * torch.tensor([1.0, 100.0, 1.0, 100.0])])
>>> sparsifier.step()
>>> sparsifier.mask("0.weight").int()
tensor([[0, 1, 0, 1],
        [0, 1, 0, 1]], dtype=torch.int32)
"""

from .saliency import (
    NAMES,
    BuiltInScore,
    Score,
    fisher,
    joint_saliency,
    keyed_generator,
    lamp,
    magnitude,
    movement,
    needs_of,
    obd,
    obs,
    obs_block,
    parse_score,
    random,
    ria,
    saliency_of,
    scale,
    taylor,
    wanda,
)

__all__ = [
    "NAMES",
    "Score",
    "fisher",
    "lamp",
    "magnitude",
    "movement",
    "obd",
    "obs",
    "obs_block",
    "random",
    "ria",
    "saliency_of",
    "scale",
    "taylor",
    "wanda",
]
