"""Prune a sentence-embedding model, all-MiniLM-L6-v2, without labels: several methods, then the recommended way.

    python examples/prune_minilm.py                                   # 2:4, some three minutes on 2 CPU cores
    python examples/prune_minilm.py --pattern 16x16 --level 0.5
    python examples/prune_minilm.py --sentences 4096 --methods ""     # more data, the recommended way alone
    python examples/prune_minilm.py --tiny                            # every step, in seconds

First the model is pruned in one pass by several methods, on few sentences. A method is a score, which chooses the
masks, and a compensation, by which the kept weights make up for the dropped ones. Then it is pruned by ADMM on more
sentences, without and with training each block to give what the dense model's block gives (`recover=True`). The
measure is the mean cosine similarity of the embeddings of held-out sentences to the dense model's. Writes a CSV, the
model and a picture.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from minilm import batched, embed, load_model, shuffled, similarity, split_sentences
from rows import write_rows
from torch import nn

from sparsekit_ao import SparsityError, patterns, prune
from sparsekit_ao.plot import plot_mask

METHODS: dict[str, tuple[str, str | None]] = {  # (score, compensation) by name
    "magnitude": ("magnitude", None),
    "wanda": ("wanda", None),
    "sparsegpt": ("wanda", "sparsegpt"),
    "wanda + least_squares": ("wanda", "least_squares"),
    "admm": ("wanda", "admm"),
}
FOR_SPARSEGPT = ("2:4", "1:4", "unstructured")
FAST = ("magnitude", "wanda", "wanda + least_squares")


def main(argv: Sequence[str] | None = None) -> None:
    """Prune by every method, then the recommended way, recover, save."""
    args = parse(argv)
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    tokenizer, dense = load_model(layers=2 if args.tiny else 6)
    train, held_out = split_sentences(limit=16 if args.tiny else None)
    train = shuffled(train)
    batches = batched(tokenizer, held_out)
    target, rows, blocks = embed(dense, batches), [], []

    def measure(model: nn.Module, method: str, sentences: int, seconds: float) -> None:
        cosine = similarity(embed(model, batches), target)
        print(f"| {method} | {sentences} | {cosine:.4f} | {seconds:.1f} |", flush=True)
        cells = {"method": method, "sentences": sentences, "cosine": f"{cosine:.4f}", "seconds": f"{seconds:.1f}"}
        rows.append({"pattern": args.pattern, "level": args.level, **cells, "threads": args.threads})

    def pruned(sentences: int, score: str, compensation: str | None, name: str, recover: bool = False) -> nn.Module:
        start, data = time.perf_counter(), batched(tokenizer, train[:sentences])
        pattern = replace(patterns.parse(args.pattern), sparsity_level=args.level)
        options = {"exclude": ["pooler"], "token_mask": "attention_mask", "recover": recover}
        model, report = prune(dense, pattern, batches=data, score=score, compensate=compensation, **options)
        measure(model, name, len(train[:sentences]), time.perf_counter() - start)
        if recover:
            print(report.recovery)
            blocks.extend(
                {"block": r.block, "before": f"{r.before:.4f}", "after": f"{r.after:.4f}"} for r in report.recovery
            )
        return model

    print(f"| {args.pattern} | sentences | cosine | seconds |\n|---|---|---|---|", flush=True)
    for name in args.methods:
        pruned(args.calibration, *METHODS[name], name)
    pruned(args.sentences, *METHODS["admm"], "admm")
    model = pruned(args.sentences, *METHODS["admm"], "admm, recovered", recover=True)

    args.out.mkdir(parents=True, exist_ok=True)
    stem = f"prune_minilm_{args.pattern.replace(':', '_')}" + f"_{args.level}" * (args.level is not None)
    write_rows(rows, args.out / f"{stem}.csv")
    write_rows(blocks, args.out / f"{stem}_blocks.csv")
    name = "encoder.layer.0.attention.self.query.weight"
    plot_mask(model.get_parameter(name) != 0, args.out / "mask.png", title=name)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"saved to {args.out}: the model, a CSV, and mask.png, a picture of {name}'s mask")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Prune all-MiniLM-L6-v2 in one pass, and recover it without labels.")
    parser.add_argument("--pattern", default="2:4", help="2:4, 1:4, 32:2:8, 1x4, 16x16, unstructured, rows or columns")
    parser.add_argument("--level", type=float, help="fraction dropped (default: 0.5), where the pattern has no count")
    parser.add_argument("--methods", help="those of the table, with commas (default: all that take the pattern)")
    parser.add_argument("--calibration", type=int, default=192, help="sentences for the table (default: 192)")
    parser.add_argument("--sentences", type=int, default=1024, help="for the recommended way (default: 1024)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("out/minilm"), help="folder (default: out/minilm)")
    parser.add_argument("--tiny", action="store_true", help="16 sentences, two layers, the fast methods")
    args = parser.parse_args(argv)
    try:
        budget = patterns.parse(args.pattern).budget_key
    except SparsityError as e:
        parser.error(str(e))
    if args.level is not None and budget is not None:
        parser.error(f"--level has no effect on {args.pattern}, which has a fixed budget")
    known = [m for m in METHODS if m != "sparsegpt" or args.pattern in FOR_SPARSEGPT]
    chosen = None if args.methods is None else [m for m in args.methods.split(",") if m]
    args.methods = [m for m in known if m in FAST or not args.tiny] if chosen is None else chosen
    if unknown := [m for m in args.methods if m not in known]:
        parser.error(f"--methods: {unknown[0]!r} is none of {', '.join(known)}")
    if min(args.calibration, args.sentences) < 1:
        parser.error("--calibration and --sentences must be at least 1")
    return args


if __name__ == "__main__":
    main()
