"""Prune a sentence-embedding model in one pass, then hand it to everything on this machine that may run it faster.

    python examples/export_minilm.py                    # blocks at 80 %, 2:4: minutes on 2 CPU cores
    python examples/export_minilm.py --level 0.9
    python examples/export_minilm.py --tiny             # every step, in seconds

Targets whose package is not installed are listed with the reason. One table (CSV): the median time of a batch of 1 and
of 32 sentences, the size of the file, the mean cosine similarity of held-out sentences' embeddings to the dense
model's, and what ran sparse. Model and sentences are those of prune_minilm.py; no network is needed. Nothing is trained
here: prune_minilm.py distils, which brings the cosine back.

Blocks of 16x16 are for torch's BSR tensors only. "Feed-forward only" leaves the attention layers dense: most of the
work is in the others, and what is then lost in quality is less.
"""

import argparse
import copy
import os
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from prune_minilm import ENCODER_LINEARS, batched, load_model, pool, shuffled, similarity, split_sentences, write_rows
from shrink_minilm import median_ms
from torch import Tensor, nn

from sparsekit_ao import ScopeSparsifier, SparsityError, export, one_shot, patterns

Batch = Mapping[str, Tensor]
FEED_FORWARD = r"re:encoder\.layer\.\d+\.(intermediate|output)\.dense\.weight"
BLOCK = 16  # of BSR tensors: torch's kernels on CUDA need 16 or more


@dataclass
class Exported:
    """A model handed to a target: what runs it (None: only a file), the bytes of its file, what ran sparse."""

    pattern: str
    target: str
    run: Callable[..., Any] | None
    bytes: int
    sparse: str


@dataclass(frozen=True)
class Choice:
    """What is pruned: a pattern, the tensors, and the names of the targets."""

    pattern: Any
    tensors: str
    targets: Sequence[str]


def choices(level: float) -> dict[str, Choice]:
    """By the name in the table; block sizes and targets belong together."""
    blocks, everywhere = patterns.blocks(1, 4, level), [name for name in TARGETS if name not in (BSR, MIXED)]
    return {
        f"1x4 blocks at {level:.0%}": Choice(blocks, ENCODER_LINEARS, everywhere),
        f"1x4 blocks at {level:.0%}, feed-forward only": Choice(blocks, FEED_FORWARD, ["fbgemm", MIXED]),
        "2:4": Choice(patterns.n_m(2, 4), ENCODER_LINEARS, everywhere),
        f"{BLOCK}x{BLOCK} blocks at {level:.0%}": Choice(patterns.blocks(BLOCK, BLOCK, level), ENCODER_LINEARS, [BSR]),
    }


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
    for name, choice in choices(args.level).items():
        pruned, sparsifier = prune(dense, choice, calibration, None if args.tiny else args.compensate)
        export.save_pretrained(pruned, sparsifier, args.out / "hugging_face")
        models += convert(name, pruned, choice.targets, calibration, args.out)
        print(f"{name}: pruned and converted, {time.perf_counter() - start:.0f} s", flush=True)
    rows = measure(models, batches, target, tokenizer, repeat=2 if args.tiny else 31)
    show(rows)
    write_rows([{**row, **machine()} for row in rows], args.out / "export_minilm.csv")
    print(f"{time.perf_counter() - start:.0f} s in all")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Prune all-MiniLM-L6-v2 and run it on every target of this machine.")
    parser.add_argument("--level", type=float, default=0.8, help="fraction of 1x4 blocks dropped (default: 0.8)")
    parser.add_argument("--compensate", choices=("admm", "least_squares"), default="admm", help="(default: admm)")
    parser.add_argument("--calibration", type=int, default=192, help="sentences to calibrate on (default: 192)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("out/export_minilm"), help="folder (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="16 sentences, one layer, 2 runs")
    return parser.parse_args(argv)


def prune(
    dense: nn.Module, choice: Choice, calibration: Sequence[Any], compensate: str | None
) -> tuple[nn.Module, ScopeSparsifier]:
    """A copy of the model, pruned in one pass; kept weights make up for the others."""
    model, sparsifier = copy.deepcopy(dense), ScopeSparsifier(score="wanda", pattern=choice.pattern)
    sparsifier.prepare(model, [{"tensor_fqn": choice.tensors}])
    one_shot(sparsifier, calibration, compensate=compensate, token_mask="attention_mask")
    sparsifier.squash_mask()
    return model, sparsifier


def convert(
    name: str, model: nn.Module, targets: Sequence[str], calibration: Sequence[Any], folder: Path
) -> list[Exported]:
    """The pruned model itself, and for every target."""
    path = folder / name.replace(":", "_").replace(" ", "_").replace(",", "")
    models = [Exported(name, "float32", model, saved(model.state_dict(), path), "nothing")]
    for target in targets:
        try:
            models.append(TARGETS[target](name, model, [dict(batch) for batch in calibration], path))
        except (SparsityError, ImportError) as e:
            models.append(Exported(name, target, None, 0, f"not converted: {reason(e)}"))
    return models


def reason(error: Exception) -> str:
    """The first reason of an error that lists tensors, or else the error."""
    lines = str(error).splitlines()
    return lines[1].partition(": ")[2] if len(lines) > 1 else lines[0]


def to_fbgemm(name: str, model: nn.Module, batches: Sequence[Batch], path: Path) -> Exported:
    """torch's sparse int8 kernels; saved, and loaded into a fresh model, which is the one that is measured."""
    converted, report = export.fbgemm(model, batches)
    size = saved(converted.state_dict(), path)
    from safetensors.torch import load_file

    again = export.load_fbgemm(copy.deepcopy(model), load_file(f"{path}.safetensors"))
    return Exported(name, "fbgemm", again, size, f"{len(report.converted)} layers, int8")


def to_mixed_int8(name: str, model: nn.Module, batches: Sequence[Batch], path: Path) -> Exported:
    """As fbgemm, with the layers that are not pruned in torch's dense int8 kernels."""
    sparse = to_fbgemm(name, model, batches, path)
    mixed = as_int8(sparse.run, path)
    return replace(sparse, target=MIXED, run=mixed, bytes=os.path.getsize(f"{path}.pt"))


def to_bsr(name: str, model: nn.Module, batches: Sequence[Batch], path: Path) -> Exported:
    """torch's BSR tensors, float32 on the CPU; safetensors does not store them."""
    converted, rows = copy.deepcopy(model), [row for row in export.report(model) if row.patterns]
    for row in rows:
        layer = row.tensor.removesuffix(".weight")
        converted.set_submodule(layer, BlockLinear(converted.get_submodule(layer)))
    torch.save(converted.state_dict(), f"{path}.pt")
    return Exported(name, BSR, converted, os.path.getsize(f"{path}.pt"), f"{len(rows)} layers, float32")


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


class Hidden(nn.Module):
    """The model with tensors as arguments and one tensor as result, as torch.export and Core ML need it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(batch, tokens) -> (batch, tokens, width)."""
        types = torch.zeros_like(input_ids)
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=types)
        return output.last_hidden_state


def to_coreml(name: str, model: nn.Module, batches: Sequence[Batch], path: Path) -> Exported:
    """A Core ML program in float16 with sparse weights, which runs on Apple's devices only."""
    if find_spec("coremltools") is None:
        raise ImportError("the package coremltools is not installed")
    import coremltools

    marked, _ = export.coreml_metadata(Hidden(copy.deepcopy(model)).eval())
    example = batches[0]["input_ids"][:1], batches[0]["attention_mask"][:1]
    target = coremltools.target.iOS16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and coremltools
        try:
            program = torch.export.export(marked, example).run_decompositions({})
            found = coremltools.convert(program, minimum_deployment_target=target, skip_model_load=True)
        except Exception as e:
            raise SparsityError(f"coremltools cannot convert the model: {str(e).splitlines()[0]}") from e
        found.save(f"{path}.mlpackage")
    count = len(found._mil_program.functions["main"].find_ops(op_type="constexpr_sparse_to_dense"))
    size = sum(file.stat().st_size for file in Path(f"{path}.mlpackage").rglob("*") if file.is_file())
    return Exported(name, "Core ML", None, size, f"{count} weights in the file, float16; runs on Apple's devices")


def to_openvino(name: str, model: nn.Module, batches: Sequence[Batch], path: Path) -> Exported:
    """OpenVINO's int8 layers, sparse with AMX."""
    if find_spec("openvino") is None:
        raise ImportError("the package openvino is not installed")
    converted, report = export.openvino(model, batches)
    import openvino

    openvino.save_model(converted.graph, f"{path}.xml", compress_to_fp16=False)
    ran = f"{len(report.ran_sparse)} layers" + "".join(f": {note}" for note in report.notes)
    return Exported(name, "openvino", converted, os.path.getsize(f"{path}.bin"), ran)


def to_int8_weights(name: str, model: nn.Module, batches: Sequence[Batch], path: Path) -> Exported:
    """torchao's int8 weights, dense; products in float32."""
    if find_spec("torchao") is None:
        raise ImportError("the package torchao is not installed")
    from torchao.quantization import Int8WeightOnlyConfig

    converted, _ = export.quantize(model, Int8WeightOnlyConfig(), batches)
    torch.save(converted.state_dict(), f"{path}.pt")
    return Exported(name, "torchao int8 weights", converted, os.path.getsize(f"{path}.pt"), "nothing")


def to_sparse_file(name: str, model: nn.Module, batches: Sequence[Batch], path: Path) -> Exported:
    """A file without zeros, which is loaded as the dense model."""
    report = export.save_sparse(model, f"{path}.sparse.safetensors")
    return Exported(name, "save_sparse", None, report.after, f"{len(report.converted)} tensors in the file")


def to_2_4(name: str, model: nn.Module, batches: Sequence[Batch], path: Path) -> Exported:
    """Packed 2:4 in bfloat16, for GPUs."""
    packed = path.with_suffix(".2_4.safetensors")
    report = export.pack_2_4(copy.deepcopy(model).bfloat16(), packed)
    return Exported(name, "pack_2_4, bfloat16", None, packed.stat().st_size, f"{len(report.converted)} layers on CUDA")


BSR, MIXED = "BSR", "fbgemm, others torch.ao dynamic int8"
TARGETS: dict[str, Callable[[str, nn.Module, Sequence[Batch], Path], Exported]] = {
    "fbgemm": to_fbgemm,
    MIXED: to_mixed_int8,
    BSR: to_bsr,
    "openvino": to_openvino,
    "torchao int8 weights": to_int8_weights,
    "save_sparse": to_sparse_file,
    "pack_2_4, bfloat16": to_2_4,
    "Core ML": to_coreml,
}


def dense_int8(model: nn.Module, folder: Path) -> Exported:
    """torch's dense int8 kernels, whose speed the sparse ones must exceed."""
    converted = as_int8(model, folder / "dense_int8")
    return Exported("dense", "torch.ao dynamic int8", converted, os.path.getsize(folder / "dense_int8.pt"), "nothing")


def as_int8(model: Any, path: Path) -> nn.Module:
    """A copy whose Linear layers run in torch's dense int8 kernels; saved as `path`.pt."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization moves to torchao, which has no int8 kernels for CPUs
        converted: nn.Module = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear})
    torch.save(converted.state_dict(), f"{path}.pt")
    return converted


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
