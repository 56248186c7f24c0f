"""Cases for `test_sharded`: masks of sharded tensors by interpreted kernels on each rank are those of one process."""

import functools
from unittest.mock import patch

import torch
from grids import EXHAUSTIVE
from kernel_cases import INTERPRETS
from sharded_selection import global_case, odd_cases, plain_case
from torch import distributed

from sparsekit_ao.distributed import update

PLAIN = [  # dimension that is sharded, pattern, dtype, kind of values
    (0, "elements", torch.float32, "normal"),
    (1, "elements", torch.bfloat16, "ties"),
    (1, "rows", torch.float16, "special"),
    (0, "1x4", torch.float32, "ties"),
]
MORE = [
    (0, "elements", torch.bfloat16, "zeros"),
    (1, "elements", torch.float16, "special"),
    (0, "columns", torch.bfloat16, "normal"),
]
ODD = {"saliency": 0, "view": 1}  # dimension that is sharded
MORE_ODD = {"among_kept": 0, "masked": 1, "own_budgets": 1}


def counted(case, most):
    """A case that must use the kernels, and at most so many all-reduces for each of its updates."""
    with (
        patch.object(update, "kernels_take", lambda dtype, device: dtype != torch.float64),  # as on GPUs
        patch.object(update, "choose_on_device", wraps=update.choose_on_device) as chosen,
        patch.object(distributed, "all_reduce", wraps=distributed.all_reduce) as sums,
    ):
        case()
    calls = chosen.call_count
    assert calls and (most is None or sums.call_count <= most * calls), (calls, sums.call_count)


def cases():
    """Needs TRITON_INTERPRET=1."""
    if not INTERPRETS:
        return []
    import interpreting
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    interpreting.speed_up()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("shard",))
    found = []
    for dim, pattern, dtype, kind in PLAIN + (MORE if EXHAUSTIVE else []):
        case = functools.partial(plain_case, mesh, (Shard(dim),), (20, 16), pattern, dtype, kind)
        digits = 4 if dtype == torch.float32 else 2
        found.append((f"{pattern} {kind} {dtype} by {dim}", functools.partial(counted, case, 1 + digits + 2)))
    shapes, rows, columns = [(20, 8), (3, 5), (8, 8), (7,)], [Shard(0)], [Shard(1)]
    placements = [columns, rows, [Replicate()], rows]
    for dtype, kind in ((torch.bfloat16, "ties"), (torch.float32, "special"))[: 1 + EXHAUSTIVE]:
        case = functools.partial(global_case, mesh, placements, shapes, dtype, kind, 0.35)
        found.append((f"global {dtype}", functools.partial(counted, case, None)))
    chosen = ODD | (MORE_ODD if EXHAUSTIVE else {})
    for dim, placement in enumerate((rows, columns)):
        odd = [(name, case) for name, case in odd_cases(mesh, placement, "") if chosen.get(name.strip()) == dim]
        found += [(name, functools.partial(counted, case, None)) for name, case in odd]
    return [(f"kernels: {name}", case) for name, case in found]
