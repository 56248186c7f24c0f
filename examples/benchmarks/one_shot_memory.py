"""Peak memory of pruning and recovering a model of equal blocks, on a CPU.

    python examples/benchmarks/one_shot_memory.py          # four blocks of 20 MB: some minutes on one core
    python examples/benchmarks/one_shot_memory.py --tiny   # three small blocks in this process; writes no CSV

Each call runs in a process of its own. The peak is the kernel's high-water mark (VmHWM) less what is in memory after a
first small call, before the models are made. `recover` and `one_shot(recover=True)` hold two models, the dense one and
the pruned one. "more" is what the peak adds to models, masks and the inputs of a block (twice where there are two
models), in blocks. glibc is told to give freed tensors back at once, since what it keeps else differs from run to run.
"""

import argparse
import json
import os
import subprocess
import sys

import torch
from machine import RESULTS, high_water, reset_high_water, resident, show, write_csv
from torch import Tensor, nn
from torch.nn import functional as F

from sparsekit_ao import ScopeSparsifier, one_shot, recover

CALLS = ("one_shot", "one_shot, recover=True", "recover")
BATCHES, TOKENS = 16, 32


class Block(nn.Module):
    """Attention and an MLP: 12 * width^2 weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, width] -> the same shape."""
        x = x + self.out(F.scaled_dot_product_attention(self.q(x)[None], self.k(x)[None], self.v(x)[None])[0])
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    """Print and write one row for each call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="three small blocks")
    parser.add_argument("--measure", nargs=3, metavar=("CALL", "BLOCKS", "WIDTH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        call, blocks, width = args.measure
        print(json.dumps(measure(call, int(blocks), int(width))))
        return
    rows = []
    for call in CALLS:
        if args.tiny:
            show(measure(call, 3, 64))
            continue
        command = [sys.executable, __file__, "--measure", call, "4", "640"]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "500000"}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        rows.append(show(json.loads(done.stdout.splitlines()[-1])))
    if not args.tiny:
        write_csv(rows, RESULTS / "one_shot_memory.csv")


def measure(call: str, blocks: int, width: int) -> dict[str, str | float]:
    """MB of the models, of their masks, of a block, of the inputs of a block, and of the peak."""
    torch.set_num_threads(1)
    warm_up = prepared(2, 16)
    one_shot(warm_up, [torch.randn(8, 16)], recover=True, progress=False)
    before = resident()
    batches = [torch.randn(TOKENS, width) for _ in range(BATCHES)]
    sparsifier = prepared(blocks, width)
    model = sparsifier.model
    assert model is not None
    size, copies = sum(p.numel() * p.element_size() for p in model.parameters()), 1 if call == "one_shot" else 2
    masks = sum(state["mask"].numel() for state in sparsifier.state.values())
    reset_high_water()
    if call == "recover":
        dense = nn.Sequential(*(Block(width) for _ in range(blocks)))
        sparsifier.step()
        reset_high_water()
        recover(model, dense, batches, passes=2, progress=False)
    else:
        one_shot(sparsifier, batches, recover=copies == 2, progress=False)
    sparsifier.check()
    peak, inputs = high_water() - before, sum(b.numel() * b.element_size() for b in batches)
    known = copies * size + masks + (copies + 1) * inputs  # the batches themselves, too
    line = {"models": copies * size, "masks": masks, "block": size / blocks, "inputs of a block": inputs, "peak": peak}
    more = round((peak - known) * blocks / size, 1)
    return {"call": call, "blocks": blocks, **{k: round(v / 1e6, 1) for k, v in line.items()}, "more": more}


def prepared(blocks: int, width: int) -> ScopeSparsifier:
    """A sparsifier of a model, to 2:4."""
    sparsifier = ScopeSparsifier(nnz=2, scope_shape=(1, 4))
    sparsifier.prepare(nn.Sequential(*(Block(width) for _ in range(blocks))))
    return sparsifier


if __name__ == "__main__":
    main()
