"""peft's `merge` of an adapter into a masked layer: an error, since the adapter would be lost."""

import sys

from ..errors import SparsityError

FRAMES = 9  # calls between the code that reads a parametrized weight and its parametrization, and a few more


def refuse_merge() -> None:
    """Raise if peft reads the masked weight to merge an adapter into it.

    `layer.weight.data += adapter` would add to the masked weight, which is computed anew whenever it is read. The
    calls show it; nothing else does.
    """
    frame = sys._getframe(1).f_back
    for _ in range(FRAMES):
        if frame is None:
            return
        if frame.f_code.co_name == "merge" and frame.f_globals.get("__name__", "").startswith("peft."):
            raise SparsityError(
                "peft cannot merge adapters into masked weights: they are computed anew whenever they are read, so the "
                "adapters would be lost. Merge them by export.merge_lora(peft_model, sparsifier), or call squash_mask "
                "before adapters are added."
            )
        frame = frame.f_back
