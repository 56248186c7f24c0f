"""Groups of rows that keep the same inputs (`examples/gathered_linear.py`), on a CPU, against the dense Linear.

    python examples/benchmarks/gathered.py         # the table, and a CSV under examples/benchmarks/results/
    python examples/benchmarks/gathered.py --minilm  # MiniLM with such layers, beside removal of its units
    python examples/benchmarks/gathered.py --tiny  # a smoke test: one small size, without CSV

Square layers with biases in float32, pruned by `row_groups`. Outputs are compared with the pruned layer's
before anything is timed. The layers of one width and number of tokens run interleaved in one process, in another order
each time, small ones several times in a run. A gain is the dense layer's time over the gathered layer's, of the fastest
runs and of the median ones.

With `--minilm`, half of the weights of all-MiniLM-L6-v2 are dropped in groups of rows by `one_shot`, or half of the
FLOPs by `shrink`. Both score, compensate and recover on the same 1,024 sentences without labels. A row has the cosine
of embeddings of held-out sentences to the dense model's, and the fastest of interleaved runs of one sentence and of 32.
"""

import argparse
import copy
import random
import statistics
import sys
import time
from pathlib import Path

import torch
from machine import RESULTS, show, write_csv
from torch import Tensor, nn

from sparsekit_ao import ScopeSparsifier
from sparsekit_ao.removal import shrink

sys.path.append(str(Path(__file__).parent.parent))
from gathered_linear import row_groups, to_gathered
from minilm import BATCH, batched, embed, load_model, shuffled, similarity, split_sentences

WIDTHS, TOKENS, ROWS, LEVELS = (1024, 2048, 4096), (1, 16, 512), (32, 128, 1024), (0.5, 0.75)
DENSE = ("dense", 0.0)


def gathered(width: int, rows: int, level: float, x: Tensor) -> nn.Module:
    """A pruned layer after its conversion; it must give the pruned layer's outputs."""
    model = nn.Sequential(nn.Linear(width, width))
    sparsifier = ScopeSparsifier(**row_groups(rows, level))
    sparsifier.prepare(model)
    sparsifier.step()
    sparsifier.squash_mask()
    expected = model(x)
    to_gathered(model, ["0"], rows)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    return model[0]


def times(layers: dict, x: Tensor, repeat: int) -> dict:
    """Milliseconds of a call in every run of each layer."""
    calls, order = max(1, 2**25 // (x.numel() * x.shape[-1])), random.Random(0)
    found: dict = {name: [] for name in layers}
    for _ in range(repeat + 2):
        for name in order.sample(list(layers), len(layers)):
            start = time.perf_counter()
            for _ in range(calls):
                layers[name](x)
            found[name].append((time.perf_counter() - start) * 1e3 / calls)
    return {name: values[2:] for name, values in found.items()}  # the first runs touch new memory


@torch.no_grad()
def rows_of(width: int, tokens: int, rows: tuple[int, ...], repeat: int) -> list[dict]:
    """The rows of one width and number of tokens, printed."""
    torch.manual_seed(0)
    x = torch.randn(tokens, width)
    layers: dict = {DENSE: nn.Linear(width, width)}
    layers |= {(n, level): gathered(width, n, level, x) for n in rows for level in LEVELS}
    found, lines = times(layers, x, repeat), []
    for (name, level), values in found.items():
        line = {"width": width, "tokens": tokens, "rows of a group": name, "sparsity": level}
        for key, value in (("fastest", min), ("median", statistics.median)):
            line |= {
                f"{key} ms": round(value(values), 4),
                f"gain, {key}": round(value(found[DENSE]) / value(values), 2),
            }
        lines.append(show(line))
    return lines


def minilm(repeat: int) -> list[dict]:
    """Quality and time of MiniLM with groups of rows, and without units."""
    tokenizer, dense = load_model()
    train, held_out = split_sentences()
    batches, data = batched(tokenizer, held_out), batched(tokenizer, shuffled(train)[:1024])
    full = next(batch for batch in batches[len(batches) // 2 :] if len(batch["input_ids"]) == BATCH)
    inputs = {"one sentence": {name: values[:1] for name, values in full.items()}, "32 sentences": full}
    models = {"dense": dense}
    for rows in (8, 32, 128):
        model, sparsifier = copy.deepcopy(dense), ScopeSparsifier(**row_groups(rows, 0.5))
        sparsifier.prepare(model)
        sparsifier.one_shot(data, token_mask="attention_mask", recover=True, progress=False)
        sparsifier.squash_mask()
        models[f"groups of {rows} rows"] = model
    keys: dict = {"budget": "flops", "keep_config": False, "token_mask": "attention_mask", "recover": True}
    models["removed units"], _ = shrink(dense, full, 0.5, "obs", batches=data, **keys)
    cosines = {name: similarity(embed(model, batches), embed(dense, batches)) for name, model in models.items()}
    for rows in (8, 32, 128):
        model = models[f"groups of {rows} rows"]
        to_gathered(model, [name for name, layer in model.named_modules() if type(layer) is nn.Linear], rows)
    found: dict = {(name, size): [] for name in models for size in inputs}
    with torch.no_grad():
        for _ in range(repeat + 2):
            for name, size in random.Random(0).sample(list(found), len(found)):
                start = time.perf_counter()
                models[name](**inputs[size])
                found[name, size].append((time.perf_counter() - start) * 1e3)
    times = {key: f"{min(values[2:]):.1f}" for key, values in found.items()}
    columns = {name: {f"ms of {size}": times[name, size] for size in inputs} for name in models}
    return [show({"model": name, "cosine": f"{cosines[name]:.4f}", **columns[name]}) for name in models]


def main() -> None:
    """Print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=31, help="runs of each layer")
    parser.add_argument("--minilm", action="store_true", help="the table of MiniLM, in place of that of layers")
    parser.add_argument("--no-csv", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a smoke test: a small size, once, without CSV")
    args = parser.parse_args()
    if args.minilm and args.tiny:
        parser.error("--minilm has no tiny form; leave out one of the two")
    torch.set_num_threads(args.threads)
    widths, tokens, rows = ((128,), (1, 4), (32, 128)) if args.tiny else (WIDTHS, TOKENS, ROWS)
    lines = minilm(args.repeat) if args.minilm else []
    for width in () if args.minilm else widths:
        for n in tokens:
            lines += rows_of(width, n, rows, 1 if args.tiny else args.repeat)
    if not (args.no_csv or args.tiny):
        write_csv(lines, RESULTS / f"gathered{'_minilm' * args.minilm}.csv")


if __name__ == "__main__":
    main()
