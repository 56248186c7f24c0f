"""Make a sentence-embedding model smaller and faster: prune coupled units of all-MiniLM-L6-v2, compact, recover.

    python examples/shrink_minilm.py              # half of the MLP units, a third of the heads: minutes on 2 CPU cores
    python examples/shrink_minilm.py --tiny       # every step, in seconds

Masks alone make nothing faster; here dropped units are removed. Several scores of units are compared first, each with
and without compensation: by least squares, the layers that read the units make up for the dropped ones. The blocks of
the best model are then trained to give what the dense model's blocks give. The compacted model is checked against the
masked one, rebuilt from its manifest, exported to ONNX and checked again in onnxruntime. Writes one row
for each model (CSV): size of the file, FLOPs, time of a batch, and the mean cosine similarity of held-out sentences'
embeddings to the dense model's.
"""

import argparse
import copy
import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from minilm import batched, embed, load_model, shuffled, similarity, split_sentences
from rows import write_rows
from torch import Tensor, nn

from sparsekit_ao import Coupling, ScopeSparsifier, one_shot, recover
from sparsekit_ao.removal import ShrinkReport, compact, cut_to

SELF, OUT = "encoder.layer.*.attention.self", "encoder.layer.*.attention.output.dense"
HEADS = Coupling(
    {
        **{f"{SELF}.{p}.weight": "(u d) i" for p in ("query", "key", "value")},
        **{f"{SELF}.{p}.bias": "(u d)" for p in ("query", "key", "value")},
        f"{OUT}.weight": "o (u d)",
    },
    sizes={"d": 32},
    name="heads of layer *",
    attrs={f"{SELF}.num_attention_heads": "u", f"{SELF}.all_head_size": "u d"},
)
MLP = Coupling(
    {
        "encoder.layer.*.intermediate.dense.weight": "u i",
        "encoder.layer.*.intermediate.dense.bias": "u",
        "encoder.layer.*.output.dense.weight": "o u",
    },
    name="units of layer *",
    attrs={"config.intermediate_size": "u"},
)
# Score of a weight, and which members' scores add up to a unit's. "obd" of the weights that read unit j, their inputs'
# Gram matrix being G, adds up to G_jj * ||W_:j||^2, the square of what Wanda's score measures.
SCORES: dict[str, tuple[str | None, str]] = {
    "magnitude": (None, "sum"),
    "wanda": ("obd", "consumers"),
    "obs": ("obs", "consumers"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Prune, compact, recover, measure, save, export."""
    args = parse(argv)
    start = time.perf_counter()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer, dense = load_model(layers=2 if args.tiny else 6)
    train, held_out = split_sentences(limit=16 if args.tiny else None)
    train = shuffled(train)
    batches, calibration = batched(tokenizer, held_out), batched(tokenizer, train[: args.calibration])
    target, example = embed(dense, batches), dict(batches[len(batches) // 2])
    data, scores, recovered = batched(tokenizer, train[: args.sentences]), ["obs"] if args.tiny else SCORES, []
    for couplings in ([HEADS, MLP],) if args.tiny else ([MLP], [HEADS, MLP]):
        small, report = compare(dense, calibration, batches, target, couplings, scores, args.out)
        before = similarity(embed(small, batches), target)
        print(recover(small, dense, data, passes=args.passes, token_mask="attention_mask"), flush=True)
        after = similarity(embed(small, batches), target)
        units = "half of the MLP units" if HEADS not in couplings else "and a third of the heads"
        recovered.append({"removed": units, "before": f"{before:.4f}", "recovered": f"{after:.4f}"})
    write_rows(recovered, args.out / "shrink_minilm_recovered.csv")
    print(report)

    report.save(args.out / "manifest.json")
    files = {
        "dense": save(dense, args.out / "dense.safetensors"),
        "compacted": save(small, args.out / "small.safetensors"),
    }
    check_rebuilt(dense, small, args.out, example)
    cosine = {"dense": 1.0, "compacted": similarity(embed(small, batches), target)}
    times = median_ms({"dense": dense, "compacted": small}, example, repeat=3 if args.tiny else 31)
    rows = [row(name, report, files[name], times, cosine[name], example) for name in files]
    write_rows(rows, args.out / "shrink_minilm.csv")
    print(f"onnxruntime: largest difference {check_onnx(small, args.out / 'small.onnx', batches):.1e}")
    print(
        f"file {files['compacted'] / files['dense']:.3f}, FLOPs {report.after.flops / report.before.flops:.3f}, ",
        end="",
    )
    print(f"time {times['compacted'] / times['dense']:.3f} of dense, mean cosine to dense {cosine['compacted']:.4f}")
    print(f"{time.perf_counter() - start:.0f} s in all")


def compare(
    dense: nn.Module,
    calibration: Sequence[Any],
    batches: Sequence[Any],
    target: Tensor,
    couplings: Sequence[Coupling],
    scores: Iterable[str],
    out: Path,
) -> tuple[nn.Module, ShrinkReport]:
    """Prune in one pass by every score, with and without compensation, print and write the cosines, return the best."""
    removed = "half of the MLP units" + (" and a third of the heads" if HEADS in couplings else "")
    print(f"| {removed} | cosine | with least squares |\n|---|---|---|", flush=True)
    found, rows = [], []
    for score in scores:
        for compensation in (None, "least_squares"):
            model, report = shrink(dense, calibration, dict(batches[len(batches) // 2]), couplings, score, compensation)
            found.append((similarity(embed(model, batches), target), model, report))
        rows.append({"score": score, "cosine": f"{found[-2][0]:.4f}", "with least squares": f"{found[-1][0]:.4f}"})
        print(f"| {' | '.join(rows[-1].values())} |", flush=True)
    write_rows(rows, out / f"one_shot_{'heads_and_' * (HEADS in couplings)}units.csv")
    return max(found, key=lambda one: one[0])[1:]


def shrink(
    dense: nn.Module,
    calibration: Sequence[Any],
    example: Mapping[str, Tensor],
    couplings: Sequence[Coupling],
    score: str,
    compensation: str | None,
) -> tuple[nn.Module, ShrinkReport]:
    """A copy of the model without half of the MLP units, and without a third of the heads if they are coupled too."""
    element_score, members = SCORES[score]
    levels = {HEADS.name: {"nnz": 8}, MLP.name: {"sparsity_level": 0.5}}
    student, sparsifier = copy.deepcopy(dense), ScopeSparsifier(score=element_score)
    chosen = [(dataclasses.replace(c, member_scores=members), levels[c.name]) for c in couplings]
    sparsifier.prepare(student, [entry for c, level in chosen for entry in c.entries(student, **level)])
    one_shot(sparsifier, calibration, compensate=compensation, token_mask="attention_mask")
    sparsifier.squash_mask()
    return compact(student, couplings, example)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Remove coupled units of all-MiniLM-L6-v2.")
    parser.add_argument("--calibration", type=int, default=192, help="sentences to calibrate on (default: 192)")
    parser.add_argument("--sentences", type=int, default=1024, help="sentences to recover on (default: 1024)")
    parser.add_argument("--passes", type=int, default=8, help="over these, for each block (default: 8)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("out/shrink_minilm"), help="folder (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="16 sentences, two layers")
    args = parser.parse_args(argv)
    if min(args.calibration, args.sentences, args.passes) < 1:
        parser.error("--calibration, --sentences and --passes must be at least 1")
    return args


def save(model: nn.Module, path: Path) -> int:
    """Write the weights and return the size of the file in bytes."""
    from safetensors.torch import save_file

    save_file({name: t.contiguous() for name, t in model.state_dict().items()}, path)
    return path.stat().st_size


@torch.no_grad()
def check_rebuilt(dense: nn.Module, small: nn.Module, folder: Path, example: Mapping[str, Tensor]) -> None:
    """Apply the manifest to a fresh dense model and load the saved weights: its outputs are the same bits."""
    from safetensors.torch import load_file

    fresh = cut_to(copy.deepcopy(dense), folder / "manifest.json")
    fresh.load_state_dict(load_file(folder / "small.safetensors"))
    if not torch.equal(fresh(**example).last_hidden_state, small(**example).last_hidden_state):
        raise SystemExit("the rebuilt model gives other outputs")


@torch.no_grad()
def median_ms(models: Mapping[str, nn.Module], example: Mapping[str, Tensor], repeat: int) -> dict[str, float]:
    """Median milliseconds of one batch; the models alternate, so that other load of the machine affects both."""
    found: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(repeat + 1):
        for name, model in models.items():
            start = time.perf_counter()
            model(**example)
            if turn:  # the first turn touches memory for the first time
                found[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(times) for name, times in found.items()}


class Embedder(nn.Module):
    """The model for export: tensors in and out instead of dictionaries."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """(batch, tokens) -> (batch, tokens, width)."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        return self.model(**inputs).last_hidden_state


@torch.no_grad()
def check_onnx(model: nn.Module, path: Path, batches: Sequence[Mapping[str, Tensor]]) -> float:
    """Export with dynamic batch and length; the largest difference of onnxruntime's outputs from the model's."""
    import onnxruntime

    names = ("input_ids", "attention_mask", "token_type_ids")
    wrapped, example = Embedder(model).eval(), tuple(batches[0][name] for name in names)
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    torch.onnx.export(
        wrapped, example, path, dynamo=True, input_names=names, dynamic_shapes=(shape,) * 3, verbose=False
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    difference = 0.0
    for batch in (batches[0], batches[-1]):
        found = session.run(None, {name: batch[name].numpy() for name in names})[0]
        want = wrapped(*(batch[name] for name in names))
        difference = max(difference, float((torch.from_numpy(found) - want).abs().max()))
    if not difference < 1e-3:  # of unit vectors; float32 sums in another order
        raise SystemExit(f"onnxruntime gives other outputs: they differ by {difference:.1e}")
    return difference


def row(
    name: str, report: ShrinkReport, file_bytes: int, times: Mapping[str, float], cosine: float, example: Mapping
) -> dict[str, Any]:
    """One model's numbers, with machine and versions."""
    size = report.before if name == "dense" else report.after
    batch, tokens = example["input_ids"].shape
    return {
        "model": name,
        "parameters": size.parameters,
        "file bytes": file_bytes,
        "flops": size.flops,
        "batch": f"{batch}x{tokens}",
        "ms": f"{times[name]:.1f}",
        "of dense": f"{times[name] / times['dense']:.3f}",
        "cosine": f"{cosine:.4f}",
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
