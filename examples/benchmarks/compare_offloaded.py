"""Time and memory of pruning a Llama that lies on disk, by this library and by SparseGPT of LLM Compressor.

    pip install llmcompressor
    python examples/benchmarks/compare_offloaded.py    # minutes; the table, and a CSV beside this file

The smallest Llama of walk_memory.py (bfloat16, its blocks offloaded to disk by accelerate) is pruned to 2:4, with 4,096
tokens and in a process of its own for each method. LLM Compressor runs with its default settings. A row has the seconds
of the call and its peak memory (VmHWM) over that before it. What both make of a trained model: prune_smollm2.py.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from machine import RESULTS, high_water, reset_high_water, resident, show, write_csv

from sparsekit_ao import prune

METHODS = ("sparsegpt", "admm", "recovered")
THEIRS = "SparseGPT of LLM Compressor"


def main() -> None:
    """One row for each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", choices=(THEIRS, *METHODS), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if importlib.util.find_spec("llmcompressor") is None:
        parser.error("this needs llmcompressor (pip install llmcompressor)")
    if chosen.measure:
        print(json.dumps(measured(chosen.measure)))
        return
    calls = [[sys.executable, __file__, "--measure", method] for method in (THEIRS, *METHODS)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "500000"}  # freed memory goes back at once
    how: dict = {"check": True, "stdout": subprocess.PIPE, "text": True, "env": environment}
    printed = [subprocess.run(call, **how).stdout for call in calls]
    lines = [show(json.loads(text.splitlines()[-1])) for text in printed]
    version = importlib.metadata.version("llmcompressor")
    write_csv([{**r, "llmcompressor": version} for r in lines], RESULTS / "compare_offloaded.csv")


def measured(method: str) -> dict[str, object]:
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
                recipe=SparseGPTModifier(
                    sparsity=0.5, mask_structure="2:4", targets=["Linear"], ignore=["re:.*lm_head"]
                ),
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


if __name__ == "__main__":
    main()
