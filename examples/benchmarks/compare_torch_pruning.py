"""Half of all units removed from networks of many architectures: by sparsekit_ao and by Torch-Pruning.

    pip install torch-pruning transformers pytest       # torchvision and timm add their networks
    python examples/benchmarks/compare_torch_pruning.py # the table, and a CSV under examples/benchmarks/results/

Networks are those of `tests/coupling/test_every_architecture.py`, with random weights. Both libraries get a model and
inputs and shall drop half of the channels; what else a user of Torch-Pruning must name (layers whose outputs are the
model's, numbers of heads) is taken from our discovery and from the config. Attributes are not repaired by hand after
its pruning, as some of its examples do. Then the smaller model is compared with the dense model in which the removed
units are zero: sparsekit_ao does so itself, and for Torch-Pruning this script writes zeros into the layers of its
groups. The result is "exact" (a relative difference of at most 1e-4), "other outputs" (with the difference; LayerNorms
that lost channels are among them), "does not run", "error" or "nothing removed".
"""

import argparse
import contextlib
import copy
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from machine import RESULTS, show, write_csv
from torch import Tensor, nn
from torch.utils import _pytree

from sparsekit_ao.coupling import discover
from sparsekit_ao.coupling.discovery import FrozenAxis
from sparsekit_ao.removal import shrink

sys.path += [str(Path(__file__).parents[2] / "tests" / folder) for folder in ("helpers", "coupling")]
from test_every_architecture import ALL, make

LIMIT = 120  # seconds for a network
LIMIT_OF_PRUNING = 6  # seconds for Torch-Pruning and one more for each million parameters: it is quick, or does not end
TOLERANCE = 1e-4
RESULTS_OF_A_TRY = ("exact", "nothing removed", "other outputs", "does not run", "error")  # best first
Found = tuple[str, float, float, str]  # result, fraction of parameters removed, seconds, details


def main() -> None:
    """Every network through both; print and write the rows and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="networks (default: all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    missing = [package for package in ("torchvision", "timm", "transformers") if find_spec(package) is None]
    if missing:
        print(f"{', '.join(missing)} not installed: their networks are left out, and no CSV is written")
    rows = []
    for name in ALL:
        if name.partition(" ")[0] in missing or (args.names and name not in args.names):
            continue
        network = partial(make, name)
        row: dict[str, Any] = {"network": name}
        for library, prune in (("sparsekit_ao", ours), ("Torch-Pruning", theirs)):
            result, removed, seconds, details = measured(prune, network)
            row |= {
                f"{library} result": result,
                f"{library} removed": f"{removed:.3f}",
                f"{library} seconds": f"{seconds:.2f}",
            }
            row |= {f"{library} details": " ".join(details.split())[:160]}
        rows.append(show(row))
        if not args.names and not missing:
            write_csv(rows, RESULTS / "compare_torch_pruning.csv")
    for library in ("sparsekit_ao", "Torch-Pruning"):
        print(library, dict(Counter(row[f"{library} result"] for row in rows)))


def measured(prune: Callable[[nn.Module, Any], Found], make: Callable[[], tuple[nn.Module, Any]]) -> Found:
    """What one library does with a network; errors and more than `LIMIT` seconds are results, too."""
    model, inputs = make()
    try:
        with limited(LIMIT):
            return prune(model, inputs)
    except Exception as e:
        return "error", 0.0, 0.0, f"{type(e).__name__}: {e}"


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise a TimeoutError after so many seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def ours(model: nn.Module, inputs: Any) -> Found:
    """Half of the units of every coupling."""
    start = time.perf_counter()
    everything = {"*": 0.5, "width": 0.5}
    _, report = shrink(model, inputs, everything, "norm", keep_config=False)
    removed = 1 - report.after.parameters / report.before.parameters
    details = f"{len(report.left_out)} couplings left out"
    return "exact" if removed else "nothing removed", removed, time.perf_counter() - start, details


def theirs(model: nn.Module, inputs: Any) -> Found:
    """Half of the channels of every group, by the group's L2 norm."""
    frozen = [row for row, _ in discover(model, inputs).frozen]
    last = [row for row in frozen if row.why.startswith("output")]
    found: list[Found] = []
    for rows, number in ((last, heads), (frozen, heads), (frozen, lambda _: {})):
        try:
            with limited(LIMIT_OF_PRUNING + parameters(model) // 10**6):
                found.append(torch_pruned(copy.deepcopy(model), inputs, rows, number))
        except Exception as e:
            found.append(("error", 0.0, 0.0, f"{type(e).__name__}: {e}"))
        if found[-1][0] == "exact":
            break  # else it is tried with more ignored layers, and without numbers of heads
    return max(found, key=lambda one: (-RESULTS_OF_A_TRY.index(one[0]), one[1]))


def torch_pruned(model: nn.Module, inputs: Any, frozen: Sequence[FrozenAxis], number: Callable[..., Any]) -> Found:
    """As `theirs`; layers that write a frozen axis are ignored layers."""
    masked, before = copy.deepcopy(model), parameters(model)
    last = [layer for row in frozen for place in row.places for layer in writers(model, *place)]
    start = time.perf_counter()
    import torch_pruning as tp

    pruner = tp.pruner.BasePruner(
        model,
        inputs,
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=0.5,
        ignored_layers=last,
        num_heads=number(model),
        forward_fn=run,
    )
    names = {id(module): name for name, module in model.named_modules()}
    left: dict[tuple[str, bool], list[int]] = {}  # of a layer, its channels of the dense model that are still there
    zeroing = 0.0
    for group in pruner.step(interactive=True):
        begun = time.perf_counter()
        channels: dict[tuple[str, bool], set[int]] = {}
        for dependency, indices in group:
            name = names.get(id(dependency.target.module))
            if name:
                channels.setdefault((name, "in_channels" in dependency.handler.__name__), set()).update(indices)
        for (name, reads), indices in channels.items():
            own = left.setdefault((name, reads), list(range(1 << 16)))
            zero(masked.get_submodule(name), reads, [own[at] for at in sorted(indices)])
            left[name, reads] = [channel for at, channel in enumerate(own) if at not in indices]
        zeroing += time.perf_counter() - begun
        group.prune()
    seconds = time.perf_counter() - start - zeroing
    removed = 1 - parameters(model) / before
    try:
        with torch.no_grad():
            difference = max(relative(a, b) for a, b in zip(run(masked, inputs), run(model, inputs), strict=True))
    except Exception as e:
        return "does not run", removed, seconds, f"{type(e).__name__}: {e}"
    if not removed:
        return "nothing removed", removed, seconds, ""
    return "exact" if difference <= TOLERANCE else "other outputs", removed, seconds, f"difference {difference:.1e}"


def writers(model: nn.Module, name: str, dimension: int) -> list[nn.Module]:
    """The layer of a tensor, if this dimension is its output."""
    layer = model.get_submodule(name.rpartition(".")[0])
    transposed = isinstance(layer, (nn.Embedding, nn.modules.conv._ConvTransposeNd)) or type(layer).__name__ == "Conv1D"
    return [layer] if dimension == int(transposed) else []


def parameters(model: nn.Module) -> int:
    """The number of elements."""
    return sum(p.numel() for p in model.parameters())


def heads(model: nn.Module) -> dict[nn.Module, int]:
    """Numbers of heads of the projections that have usual names, for Torch-Pruning."""
    config = getattr(model, "config", None)
    queries = getattr(config, "num_attention_heads", None) or getattr(config, "num_heads", None)
    keys = getattr(config, "num_key_value_heads", None) or queries
    of = {"q_proj": queries, "query": queries, "q": queries, "k_proj": keys, "v_proj": keys}
    of |= {"key": keys, "value": keys, "k": keys, "v": keys}
    layers = [(m, of.get(name.rpartition(".")[2])) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    return {module: number for module, number in layers if isinstance(number, int)}


def run(model: nn.Module, inputs: Any) -> list[Tensor]:
    """The tensors of the output that have floating point."""
    args, keys = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    output = model(*(args if isinstance(args, tuple) else (args,)), **keys)
    return [t for t in _pytree.tree_leaves({"out": output}) if isinstance(t, Tensor) and t.is_floating_point()]


def zero(module: nn.Module, reads: bool, indices: list[int]) -> None:
    """Zeros in what reads or writes these channels of a layer of the dense model."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    is_grouped = getattr(module, "groups", 1) > 1
    if weight is None or isinstance(module, nn.MultiheadAttention) or (is_grouped and reads):
        return  # what a grouped layer reads is zero where it is written
    with torch.no_grad():
        swapped = isinstance(module, (nn.modules.conv._ConvTransposeNd, nn.Embedding)) and not is_grouped
        dimension = int(reads != swapped) if weight.ndim > 1 else 0
        weight.index_fill_(dimension, torch.tensor([i for i in indices if i < weight.shape[dimension]]), 0.0)
        if bias is not None and (weight.ndim == 1 or not reads):
            bias[indices] = 0.0


def relative(want: Tensor, found: Tensor) -> float:
    """The largest difference relative to the largest value."""
    if want.shape != found.shape:
        return float("inf")
    return float((want - found).abs().max() / want.abs().max().clamp(min=1e-12))


if __name__ == "__main__":
    main()
