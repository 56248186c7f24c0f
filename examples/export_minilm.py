"""Prune a sentence-embedding model in one pass, then hand it to what may run or store it on this machine.

    python examples/export_minilm.py                    # 2:4 and blocks at 80 %: minutes on 2 CPU cores
    python examples/export_minilm.py --level 0.9
    python examples/export_minilm.py --tiny             # every step, in seconds

One table (CSV): the median time of a batch of 1 and of 32 sentences, the size of the file, the mean cosine similarity
of held-out sentences' embeddings to the dense model's, and what ran sparse. Nothing is trained here: prune_minilm.py
recovers, which brings the cosine back.
"""

import argparse
import copy
import os
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from minilm import batched, load_model, pool, shuffled, similarity, split_sentences
from rows import write_rows
from shrink_minilm import median_ms
from torch import Tensor, nn

from sparsekit_ao import ScopeSparsifier, SparsityError, export, one_shot, patterns

Batch = Mapping[str, Tensor]
BLOCK = 16  # of BSR tensors: torch's kernels on CUDA need 16 or more


@dataclass
class Exported:
    """A model handed to a target: what runs it (None: only a file), the bytes of its file, what ran sparse."""

    pattern: str
    target: str
    run: Callable[..., Any] | None
    bytes: int
    sparse: str


def main(argv: Sequence[str] | None = None) -> None:
    """Prune, convert, measure, print and write the table."""
    args = parse(argv)
    start = time.perf_counter()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer, dense = load_model()
    if args.tiny:
        dense.encoder.layer = dense.encoder.layer[:1]
    train, held_out = split_sentences(limit=16 if args.tiny else None)
    train = shuffled(train)
    batches, calibration = batched(tokenizer, held_out), batched(tokenizer, train[: args.calibration])
    target = embed(dense, batches)

    models = [Exported("dense", "float32", dense, saved(dense.state_dict(), args.out / "dense"), "-")]
    models.append(dense_int8(dense, args.out))
    patterns_of = {"2:4": patterns.n_m(2, 4)}
    patterns_of[f"{BLOCK}x{BLOCK} blocks at {args.level:.0%}"] = patterns.blocks(BLOCK, BLOCK, args.level)
    for name, pattern in patterns_of.items():
        pruned, sparsifier = prune(dense, pattern, calibration, None if args.tiny else args.compensate)
        export.save_pretrained(pruned, sparsifier, args.out / "hugging_face")
        models += convert(name, pruned, calibration, args.out)
        print(f"{name}: pruned and converted, {time.perf_counter() - start:.0f} s", flush=True)
    rows = measure(models, batches, target, tokenizer, repeat=2 if args.tiny else 31)
    show(rows)
    write_rows(rows, args.out / "export_minilm.csv", machine())
    print(f"{time.perf_counter() - start:.0f} s in all")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Prune all-MiniLM-L6-v2 and run it on every target of this machine.")
    parser.add_argument("--level", type=float, default=0.8, help="fraction of blocks dropped (default: 0.8)")
    parser.add_argument("--compensate", choices=("admm", "least_squares"), default="admm", help="(default: admm)")
    parser.add_argument("--calibration", type=int, default=192, help="sentences to calibrate on (default: 192)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("out/export_minilm"), help="folder (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="16 sentences, one layer, 2 runs")
    return parser.parse_args(argv)


def prune(
    dense: nn.Module, pattern: patterns.Pattern, calibration: Sequence[Any], compensate: str | None
) -> tuple[nn.Module, ScopeSparsifier]:
    """A copy of the model, pruned in one pass; kept weights make up for the others."""
    model, sparsifier = copy.deepcopy(dense), ScopeSparsifier(score="wanda", pattern=pattern)
    sparsifier.prepare(model, None, exclude=["pooler"])
    one_shot(sparsifier, calibration, compensate=compensate, token_mask="attention_mask")
    sparsifier.squash_mask()
    return model, sparsifier


def convert(name: str, model: nn.Module, calibration: Sequence[Any], folder: Path) -> list[Exported]:
    """The pruned model itself, and for every target of its pattern."""
    path = folder / name.replace(":", "_").replace(" ", "_")
    models = [Exported(name, "float32", model, saved(model.state_dict(), path), "nothing")]
    for target, function in (TARGETS_2_4 if name == "2:4" else {"BSR": to_bsr}).items():
        try:
            models.append(function(name, model, [dict(batch) for batch in calibration], path))
        except (SparsityError, ImportError) as e:
            models.append(Exported(name, target, None, 0, f"not converted: {reason(e)}"))
    return models


def reason(error: Exception) -> str:
    """The first reason of an error that lists tensors, or else the error."""
    lines = str(error).splitlines()
    return lines[1].partition(": ")[2] if len(lines) > 1 else lines[0]


def to_bsr(name: str, model: nn.Module, batches: Sequence[Batch], path: Path) -> Exported:
    """torch's BSR tensors, float32 on the CPU; safetensors does not store them."""
    converted, rows = copy.deepcopy(model), [row for row in export.report(model) if row.patterns]
    for row in rows:
        layer = row.tensor.removesuffix(".weight")
        converted.set_submodule(layer, BlockLinear(converted.get_submodule(layer)))
    torch.save(converted.state_dict(), f"{path}.pt")
    return Exported(name, "BSR", converted, os.path.getsize(f"{path}.pt"), f"{len(rows)} layers, float32")


class BlockLinear(nn.Module):
    """A Linear whose weight is a BSR tensor."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "Sparse BSR tensor support is in beta state"
            weight = linear.weight.detach().to_sparse_bsr((BLOCK, BLOCK))
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        y = nn.functional.linear(x.reshape(-1, x.shape[-1]), self.weight) + self.bias
        return y.reshape(*x.shape[:-1], -1)


def to_int8_weights(name: str, model: nn.Module, batches: Sequence[Batch], path: Path) -> Exported:
    """torchao's int8 weights, dense; products in float32."""
    if find_spec("torchao") is None:
        raise ImportError("the package torchao is not installed")
    from torchao.quantization import Int8WeightOnlyConfig

    converted, _ = export.quantize(model, Int8WeightOnlyConfig(), batches)
    torch.save(converted.state_dict(), f"{path}.pt")
    return Exported(name, "torchao int8 weights", converted, os.path.getsize(f"{path}.pt"), "nothing")


TARGETS_2_4: dict[str, Callable[[str, nn.Module, Sequence[Batch], Path], Exported]] = {
    "torchao int8 weights": to_int8_weights,
}


def dense_int8(model: Any, folder: Path) -> Exported:
    """torch's dense int8 kernels, which gain more than zeros do on a CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization moves to torchao, which has no int8 kernels for CPUs
        converted: nn.Module = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear})
    torch.save(converted.state_dict(), folder / "dense_int8.pt")
    return Exported("dense", "torch.ao dynamic int8", converted, os.path.getsize(folder / "dense_int8.pt"), "nothing")


def saved(state_dict: Mapping[str, Tensor], path: Path) -> int:
    """Write a safetensors file and return its bytes."""
    from safetensors.torch import save_file

    save_file({name: t.contiguous() for name, t in state_dict.items()}, f"{path}.safetensors")
    return os.path.getsize(f"{path}.safetensors")


@torch.no_grad()
def embed(run: Callable[..., Any], batches: Sequence[Batch]) -> Tensor:
    """One unit vector for each sentence, in the batches' order."""
    found = []
    for batch in batches:
        output = run(**batch)
        hidden = output[0] if isinstance(output, tuple) else output.last_hidden_state
        found.append(pool(hidden, batch["attention_mask"]))
    return torch.cat(found)


def measure(
    models: Sequence[Exported], batches: Sequence[Batch], target: Tensor, tokenizer: Any, repeat: int
) -> list[dict[str, Any]]:
    """One row for each model; the models' runs alternate."""
    running = {str(at): model.run for at, model in enumerate(models) if model.run is not None}
    one = dict(tokenizer(["Return the number of bytes that a file of this size needs."], return_tensors="pt"))
    times = [median_ms(running, example, repeat) for example in (one, dict(batches[len(batches) // 2]))]
    rows = []
    for at, model in enumerate(models):
        single, many = ("" if model.run is None else f"{t[str(at)]:.1f}" for t in times)
        cosine = "" if model.run is None else f"{similarity(embed(model.run, batches), target):.4f}"
        row = {"pattern": model.pattern, "target": model.target, "ms, 1 sentence": single, "ms, 32 sentences": many}
        size = f"{model.bytes / 1e6:.1f}" if model.bytes else ""
        rows.append({**row, "MB": size, "cosine": cosine, "ran sparse": model.sparse})
    return rows


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table."""
    print(f"| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(row.values())} |")


def machine() -> dict[str, Any]:
    """The machine and versions, for every row of the CSV."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())
    return {"cpu": cpu, "threads": torch.get_num_threads(), "torch": torch.__version__}


if __name__ == "__main__":
    main()
