"""The loss of a language model, pruned in one pass by this library and by SparseGPT of LLM Compressor.

    pip install llmcompressor
    python examples/benchmarks/compare_llmcompressor.py          # some five minutes on one core, most for training
    python examples/benchmarks/compare_llmcompressor.py --offloaded  # time and memory on a Llama that lies on disk
    python examples/benchmarks/compare_llmcompressor.py --tiny   # every step, in seconds; writes no CSV

The model, its text and the calibration batches are those of one_shot_language_model.py. LLM Compressor takes models of
transformers, so the same model is wrapped as one. Its SparseGPT runs with its default settings, block after block. If
the package is not installed, its rows are left out. Writes one row a structure and method.

With `--offloaded`, the smallest Llama of walk_memory.py (bfloat16, its blocks offloaded to disk by accelerate) is
pruned to 2:4, with 4,096 tokens and in a process of its own for each method. A row has the seconds of the call and its
peak memory (VmHWM) over that before it.
"""

import argparse
import copy
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from machine import RESULTS, high_water, reset_high_water, resident, show, write_csv
from torch import Tensor, nn

from sparsekit_ao import prune

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
    parser.add_argument("--offloaded", action="store_true", help="time and memory on a model that lies on disk")
    parser.add_argument("--measure", choices=(THEIRS, *METHODS), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.offloaded and chosen.tiny:
        parser.error("--offloaded has no tiny form; leave out one of the two")
    if chosen.offloaded and importlib.util.find_spec("llmcompressor") is None:
        parser.error("--offloaded needs llmcompressor (pip install llmcompressor)")
    if chosen.measure:
        print(json.dumps(of_offloaded(chosen.measure)))
        return
    if chosen.offloaded:
        calls = [[sys.executable, __file__, "--measure", method] for method in (THEIRS, *METHODS)]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "500000"}  # as walk_memory.py
        how: dict = {"check": True, "stdout": subprocess.PIPE, "text": True, "env": environment}
        printed = [subprocess.run(call, **how).stdout for call in calls]
        lines = [show(json.loads(text.splitlines()[-1])) for text in printed]
        version = importlib.metadata.version("llmcompressor")
        write_csv([{**r, "llmcompressor": version} for r in lines], RESULTS / "compare_offloaded.csv")
        return
    args = ours.parse(["--tiny"] if chosen.tiny else [])
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
        version = importlib.metadata.version("llmcompressor")
        write_csv([{**r, "llmcompressor": version} for r in rows], RESULTS / "compare_llmcompressor.csv")


def of_offloaded(method: str) -> dict[str, object]:
    """Seconds and memory of one method that prunes a Llama on disk to 2:4."""
    import walk_memory

    if method == THEIRS:  # before memory is measured
        from llmcompressor import oneshot
        from llmcompressor.modifiers.pruning import SparseGPTModifier
        from torch.utils.data import DataLoader
        from transformers import ProcessorMixin
    torch.set_num_threads(2)
    torch.manual_seed(0)
    blocks = 12
    batches = list(torch.randint(walk_memory.SIZES["small"][3], (16, 2, 128)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        walk_memory.written(folder / "dense", "small", blocks)
        model = walk_memory.loaded(folder / "dense", blocks, folder / "offloaded")
        before = resident()
        reset_high_water()
        start = time.perf_counter()
        if method == THEIRS:
            oneshot(
                model=model,
                processor=ProcessorMixin(),
                dataset=DataLoader([{"input_ids": batch} for batch in batches], batch_size=None),
                num_calibration_samples=len(batches),
                recipe=SparseGPTModifier(sparsity=0.5, mask_structure="2:4", targets=["Linear"], ignore=["lm_head"]),
                pipeline="sequential",
            )
        else:
            options = {"compensate": "admm", "recover": True} if method == "recovered" else {"compensate": method}
            prune(model, "2:4", batches=batches, exclude=["lm_head"], inplace=True, **options)
        seconds, peak = time.perf_counter() - start, high_water() - before
        model.save_pretrained(folder / "pruned")
        again = walk_memory.AutoModelForCausalLM.from_pretrained(folder / "pruned", dtype=torch.bfloat16)
        weights = [p for name, p in again.named_parameters() if "proj" in name]
        if not all(abs(float((w == 0).float().mean()) - 0.5) < 1e-3 for w in weights):
            raise SystemExit(f"{method}: the weights are not 2:4")
    return {"method": method, "seconds": f"{seconds:.1f}", "peak MiB": round(peak / 2**20)}


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
