"""Memory and time of pruning language models that lie on disk: `prune` of Llamas that accelerate offloads, on a CPU.

    python examples/benchmarks/walk_memory.py            # Llamas of 12, 24 and 48 equal blocks: some minutes
    python examples/benchmarks/walk_memory.py --large    # one of 8 GiB, by wanda; needs 17 GiB of disk, takes long
    python examples/benchmarks/walk_memory.py --tiny     # two small ones in this process; writes no CSV

Each model is written with random weights in bfloat16, loaded in a process of its own by `from_pretrained` with its
blocks on disk, pruned to 2:4 in place, saved, and loaded again without offloading (the 8 GiB again with it); logits are
compared. A small model is pruned before it, so that what torch loads once does not count. "peak" is the kernel's
high-water mark (VmHWM) during `prune` over what was in memory before it. "allowed" is embeddings and head, eight times
one block in float32, and the inputs of a block in the dense and the pruned model. "forward" is the time of running one
loaded block on all batches; the walk needs two such runs (three with `recover`). glibc is told to give freed memory
back at once.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from machine import RESULTS, high_water, reset_high_water, resident, show, write_csv
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from sparsekit_ao import prune

SIZES = {"small": (512, 1664, 4, 8000), "large": (4096, 11008, 32, 32000), "tiny": (32, 48, 4, 50)}
MIB = 2**20


def written(folder: Path, size: str, blocks: int) -> None:
    """Write a Llama, a file for each block, without having it in memory."""
    hidden, inner, heads, vocabulary = SIZES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    shapes: dict[str, dict[str, torch.Size]] = {}
    for name, p in model.named_parameters():
        part = f"block{name.split('.')[2]}" if name.startswith("model.layers.") else "rest"
        shapes.setdefault(f"{part}.safetensors", {})[name] = p.shape
    index = {}
    for file, names in shapes.items():
        values = {n: torch.ones(s) if len(s) == 1 else torch.randn(s).mul_(0.02) for n, s in names.items()}
        save_file({n: v.bfloat16() for n, v in values.items()}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def loaded(folder: Path, blocks: int, offloaded: Path) -> torch.nn.Module:
    """The model with its blocks on disk."""
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {f"model.layers.{k}": "disk" for k in range(blocks)}
    return AutoModelForCausalLM.from_pretrained(
        folder, device_map=places, offload_folder=offloaded, dtype=torch.bfloat16
    )


def measure(size: str, blocks: int) -> dict[str, object]:
    """Write, load, prune, save and reload one model; the figures of the call."""
    torch.set_num_threads(2)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    hidden, vocabulary, is_large = SIZES[size][0], SIZES[size][3], size == "large"
    batches = list(torch.randint(vocabulary, (2, 1, 128) if is_large else (2, 2, 64)))
    options = {"score": "wanda", "compensate": None} if is_large else {"recover": True}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written(folder / "dense", size, blocks)
        start = time.perf_counter()
        for path in sorted((folder / "dense").glob("block*")):
            while_read = path.read_bytes()
        reading = time.perf_counter() - start
        del while_read
        if size != "tiny":
            written(folder / "first", "tiny", 2)
            first = loaded(folder / "first", 2, folder / "first offloaded")
            ids = list(torch.randint(SIZES["tiny"][3], (2, 2, 64)))
            prune(first, "2:4", batches=ids, exclude=["lm_head"], inplace=True, **options)
            del first
        model = loaded(folder / "dense", blocks, folder / "offloaded")
        before, numel = resident(), sum(p.numel() for p in model.parameters())
        block = sum(p.numel() for p in model.model.layers[0].parameters())
        reset_high_water()
        start = time.perf_counter()
        _, report = prune(model, "2:4", batches=batches, exclude=["lm_head"], inplace=True, **options)
        seconds, peak = time.perf_counter() - start, high_water() - before
        resident_in_all = high_water()
        with torch.no_grad():
            expected = model(batches[0]).logits
        model.save_pretrained(folder / "pruned", max_shard_size="200MB")
        del model
        again = (
            loaded(folder / "pruned", blocks, folder / "again")
            if is_large
            else AutoModelForCausalLM.from_pretrained(folder / "pruned", dtype=torch.bfloat16)
        )
        with torch.no_grad():
            if not torch.equal(again(batches[0]).logits, expected):
                raise SystemExit("the saved model gives other logits")
        forward = forward_seconds(again, batches)
    streams = 2 * 2 * len(batches) * batches[0].numel() * hidden
    allowed = 2 * 2 * vocabulary * hidden + 8 * 4 * block + streams
    return {
        "blocks": blocks,
        "how": "wanda" if is_large else "admm, recovered",
        "model MiB": round(2 * numel / MIB),
        "block MiB in float32": round(4 * block / MIB, 1),
        "streams MiB": round(streams / MIB, 1),
        "peak MiB": round(peak / MIB),
        "allowed MiB": round(allowed / MIB),
        "resident MiB in all": round(resident_in_all / MIB),
        "seconds": round(seconds, 1),
        "reading the files": round(reading, 1),
        "seconds a block": round(seconds / blocks, 2),
        "of which solving": round(sum(row.seconds for row in report) / blocks, 2),
        "of which matching": round(sum(r.seconds for r in report.recovery) / blocks, 2) if report.recovery else "",
        "forward of a block": round(forward, 2),
    }


@torch.no_grad()
def forward_seconds(model: torch.nn.Module, batches: list[torch.Tensor]) -> float:
    """Seconds of the second block, on all batches, after the first block has loaded everything else."""
    times: list[float] = []
    block = model.model.layers[1]
    block.register_forward_pre_hook(lambda *_: times.append(-time.perf_counter()))
    block.register_forward_hook(lambda *_: times.append(time.perf_counter()))
    for batch in batches:
        model(batch)
    return sum(times)


def main() -> None:
    """Print and write one row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="the model of 8 GiB")
    parser.add_argument("--tiny", action="store_true", help="two small models")
    parser.add_argument("--measure", nargs=2, metavar=("SIZE", "BLOCKS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure[0], int(args.measure[1]))))
        return
    if args.tiny:
        for blocks in (2, 3):
            show(measure("tiny", blocks))
        return
    rows = []
    for size, blocks in [("large", 21)] if args.large else [("small", count) for count in (12, 24, 48)]:
        command = [sys.executable, __file__, "--measure", size, str(blocks)]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        rows.append(show(json.loads(done.stdout.splitlines()[-1])))
    write_csv(rows, RESULTS / ("walk_memory_large.csv" if args.large else "walk_memory.csv"))


if __name__ == "__main__":
    main()
