"""The loss of a language model, pruned in one pass by this library and by SparseGPT of LLM Compressor.

    pip install llmcompressor
    python examples/benchmarks/compare_llmcompressor.py          # some five minutes on one core, most for training
    python examples/benchmarks/compare_llmcompressor.py --tiny   # every step, in seconds; writes no CSV

The model, its text and the calibration batches are those of one_shot_language_model.py. LLM Compressor takes models of
transformers, so the same model is wrapped as one. Its SparseGPT runs with its default settings, block after block. If
the package is not installed, its rows are left out. Writes one row a structure and method.
"""

import argparse
import copy
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from machine import RESULTS, show, write_csv
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent.parent))
import one_shot_language_model as ours
from dst_language_model import LanguageModel, fit, held_out_loss, read_text, windows

STRUCTURES = ("2:4", "50 %")
METHODS = ("sparsegpt", "admm", "recovered")
THEIRS = "SparseGPT of LLM Compressor"


def main() -> None:
    """Train once, prune by every method, print and write the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a smoke test: 60 files, 20 small steps")
    args = ours.parse(["--tiny"] if parser.parse_args().tiny else [])
    torch.set_num_threads(args.threads)
    text, held = read_text(limit=60 if args.tiny else None)
    dense, _ = fit(None, 0.0, text, args)
    rows = [show({"structure": "dense", "method": "", "loss": round(held_out_loss(dense, held, args.tiny), 4)})]
    rows[0]["seconds"] = ""
    source = torch.Generator().manual_seed(2)
    calibration = [inputs for inputs, _ in windows(text, args.calibration, args.batch, source)]
    is_installed = importlib.util.find_spec("llmcompressor") is not None
    if not is_installed:
        print("llmcompressor is not installed (pip install llmcompressor): its rows are left out")
    for structure in STRUCTURES:
        for method in (THEIRS, *METHODS) if is_installed else METHODS:
            start = time.perf_counter()
            if method == THEIRS:
                model: nn.Module = by_llmcompressor(dense, structure, calibration)
            else:
                model = ours.prune(dense, structure, method, calibration)
            seconds = round(time.perf_counter() - start, 1)
            zeros = [
                float((p == 0).float().mean()) for n, p in model.named_parameters() if p.ndim > 1 and "blocks" in n
            ]
            assert all(abs(z - 0.5) < 1e-3 for z in zeros), zeros  # equal zeros by every method
            loss = round(held_out_loss(model, held, args.tiny), 4)
            rows.append(show({"structure": structure, "method": method, "loss": loss, "seconds": seconds}))
    if is_installed and not args.tiny:
        from importlib.metadata import version

        write_csv(
            [{**r, "llmcompressor": version("llmcompressor")} for r in rows], RESULTS / "compare_llmcompressor.csv"
        )


def by_llmcompressor(dense: LanguageModel, structure: str, calibration: Sequence[Tensor]) -> nn.Module:
    """A copy, pruned by SparseGPT of LLM Compressor."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.pruning import SparseGPTModifier
    from torch.utils.data import DataLoader
    from transformers import PretrainedConfig, PreTrainedModel, ProcessorMixin

    class Wrapped(PreTrainedModel):
        """The model as one of transformers."""

        config_class = PretrainedConfig
        _no_split_modules = ("Block",)

        def __init__(self, config: PretrainedConfig, model: nn.Module) -> None:
            super().__init__(config)
            self.model = model

        def forward(self, input_ids: Tensor) -> Tensor:
            """[batch, bytes] -> [batch, bytes, 128]."""
            return self.model(input_ids)

    model = copy.deepcopy(dense)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": "llama"}))  # which it only reads
        oneshot(
            model=Wrapped(PretrainedConfig(name_or_path=folder), model),
            processor=ProcessorMixin(),
            dataset=DataLoader([{"input_ids": batch} for batch in calibration], batch_size=None),
            num_calibration_samples=len(calibration),
            recipe=SparseGPTModifier(
                sparsity=0.5, mask_structure="2:4" if structure == "2:4" else "0:0", targets=["Block"]
            ),
        )
    return model


if __name__ == "__main__":
    main()
