"""Prune a trained transformer in one pass, without labels: four structures, six methods, and recovery.

    python examples/one_shot_language_model.py          # a few minutes on one core, most of them for training once
    python examples/one_shot_language_model.py --tiny   # every structure and method, in seconds

The byte-level language model and the text are those of dst_language_model.py. It is trained dense once; then copies of
it are pruned by every method and measured on held-out files. Half of the MLP units are removed by `removal.compact`, so
that this model is really smaller. "recovered" then trains the blocks to give what the dense model's blocks give, and
"and logits" after that the whole model to give its logits (`recover`). Prints a table and writes a CSV.
"""

import argparse
import copy
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from dst_language_model import BATCH, STEPS, LanguageModel, fit, held_out_loss, linears, read_text, windows
from rows import write_rows
from torch import Tensor, nn

from sparsekit_ao import Coupling, ScopeSparsifier, one_shot, patterns, recover
from sparsekit_ao.removal import compact

UNITS = "half of the MLP units"
STRUCTURES: dict[str, dict[str, Any]] = {
    "2:4": patterns.n_m(2, 4),
    "50 %": patterns.unstructured(0.5),
    "8 rows x 1 column, 8 of 16": {"block_shape": (8, 1), "scope_shape": (1, 16), "nnz": 8},
}
# (score, compensation) by name.
METHODS: dict[str, tuple[str, str | None]] = {
    "magnitude": ("magnitude", None),
    "wanda": ("wanda", None),
    "sparsegpt": ("wanda", "sparsegpt"),
    "wanda + least squares": ("wanda", "least_squares"),
    "obs": ("obs", "obs"),
    "admm": ("wanda", "admm"),
    "recovered": ("wanda", "admm"),
    "and logits": ("wanda", "admm"),
}
FOR_SPARSEGPT = ("2:4", "50 %")
# Units are chosen by a score of the weights that read them. "obd" adds up to the square of Wanda's score for a unit.
UNIT_SCORES = {"magnitude": "magnitude", **dict.fromkeys(("wanda", "wanda + least squares"), "obd")}
UNIT_SCORES |= dict.fromkeys(("obs", "recovered", "and logits"), "obs")


def main(argv: Sequence[str] | None = None) -> None:
    """Train once, prune by every method, print and write the losses."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    start, (text, held) = time.perf_counter(), read_text(limit=60 if args.tiny else None)
    dense, _ = fit(None, 0.0, text, args)
    rows = [{"structure": "dense", "method": "", "loss": round(held_out_loss(dense, held, args.tiny), 4)}]
    print(f"dense: loss {rows[0]['loss']:.3f}, {time.perf_counter() - start:.0f} s", flush=True)
    source = torch.Generator().manual_seed(2)
    calibration = [inputs for inputs, _ in windows(text, args.calibration, args.batch, source)]
    for structure in (*STRUCTURES, UNITS):
        for method in methods_of(structure):
            loss = held_out_loss(prune(dense, structure, method, calibration), held, args.tiny)
            rows.append({"structure": structure, "method": method, "loss": round(loss, 4)})
            print(f"{rows[-1]}  {time.perf_counter() - start:.0f} s", flush=True)
    print_table(rows)
    args.out.mkdir(parents=True, exist_ok=True)
    machine = {"steps": args.steps, "threads": args.threads, "python": platform.python_version()}
    machine["torch"] = torch.__version__
    write_rows(rows, args.out / "one_shot_language_model.csv", machine)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps (default: {STEPS})")
    parser.add_argument("--calibration", type=int, default=64, help="batches of 16 windows (default: 64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("out/one_shot_language_model"), help="folder for the CSV")
    parser.add_argument("--tiny", action="store_true", help="a smoke test: 60 files, 20 small steps")
    args = parser.parse_args(argv)
    args.batch, args.every = 2 if args.tiny else BATCH, 1
    args.steps = 20 if args.tiny else args.steps
    args.calibration = 2 if args.tiny else args.calibration
    if args.steps < 1 or args.calibration < 1:
        parser.error("--steps and --calibration must be at least 1")
    return args


def methods_of(structure: str) -> list[str]:
    """The methods that are defined for a structure."""
    if structure == UNITS:
        return list(UNIT_SCORES)
    return [name for name in METHODS if name != "sparsegpt" or structure in FOR_SPARSEGPT]


def prune(dense: LanguageModel, structure: str, method: str, calibration: Sequence[Tensor]) -> nn.Module:
    """A copy, pruned in one pass."""
    score, compensation = METHODS[method]
    model = copy.deepcopy(dense)
    if structure == UNITS:
        model = remove_units(model, method, compensation and "least_squares", calibration)
    else:
        sparsifier = ScopeSparsifier(score=score)
        sparsifier.prepare(model, [{**entry, **STRUCTURES[structure]} for entry in linears(model)])
        one_shot(sparsifier, calibration, compensate=compensation)
        sparsifier.squash_mask()
    if method in ("recovered", "and logits"):
        recover(model, dense, calibration)
    if method == "and logits":
        recover(model, dense, calibration, outputs="kl")
    return model


def remove_units(
    model: LanguageModel, method: str, compensation: str | None, calibration: Sequence[Tensor]
) -> nn.Module:
    """Without half of the MLP units, removed from both layers; the second layer makes up for them."""
    units = Coupling(
        {"blocks.*.up.weight": "u i", "blocks.*.up.bias": "u", "blocks.*.down.weight": "o u"},
        member_scores="sum" if method == "magnitude" else "consumers",
    )
    sparsifier = ScopeSparsifier(score=UNIT_SCORES[method])
    sparsifier.prepare(model, units.entries(model, sparsity_level=0.5))
    one_shot(sparsifier, calibration, compensate=compensation)
    sparsifier.squash_mask()
    return compact(model, units, calibration[0])[0]


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Held-out loss by structure and method."""
    print(f"\nheld-out loss (nats per byte) without labels; dense {rows[0]['loss']:.3f}")
    print("| structure | " + " | ".join(METHODS) + " |\n|" + "---|" * (len(METHODS) + 1))
    loss = {(r["structure"], r["method"]): f"{r['loss']:.3f}" for r in rows}
    for structure in (*STRUCTURES, UNITS):
        print(f"| {structure} | " + " | ".join(loss.get((structure, name), "-") for name in METHODS) + " |")


if __name__ == "__main__":
    main()
