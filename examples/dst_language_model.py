"""Dynamic sparse training of a small transformer on the Python standard library's own source text.

    python examples/dst_language_model.py          # every method at 90 % and 95 %: about 20 minutes on one core
    python examples/dst_language_model.py --tiny   # every method, a few steps

A byte-level language model: 2 blocks of width 128, contexts of 96 bytes. The Linear layers of the blocks are
sparse, with equal nonzeros for all methods; embeddings, norms and the output layer are dense. The measure is the loss
on held-out files. The text is that of the Python installation which runs the script, so no network is needed.
"""

import argparse
import math
import platform
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rows import write_rows
from torch import Tensor, nn
from torch.nn import functional as F

from sparsekit_ao import GMP, SET, DynamicSparsifier, RigL, Static, schedules

WIDTH, HEADS, BLOCKS, CONTEXT, BATCH = 128, 4, 2, 96, 16
STEPS, UPDATE_EVERY, FRACTION, PEAK_LR = 2500, 50, 0.3, 3e-3
LEVELS = (0.90, 0.95)
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
Make = Callable[[torch.optim.Optimizer, float, int, int], DynamicSparsifier]


def replaces(until: int, every: int) -> dict[str, Any]:
    """When SET and RigL update and how much they replace, the same for both."""
    return {"until": until, "update_every": every, "update_fraction": schedules.cosine(FRACTION, 0.0, until)}


METHODS: dict[str, Make] = {
    "static": lambda o, level, until, every: Static(level, optimizer=o),
    "SET": lambda o, level, until, every: SET(level, optimizer=o, init="erk", **replaces(until, every)),
    "RigL": lambda o, level, until, every: RigL(level, optimizer=o, **replaces(until, every)),
    "GMP": lambda o, level, until, every: GMP(level, optimizer=o, until=until, update_every=every, prune="global"),
}


class Block(nn.Module):
    """Causal attention and an MLP, each after a norm and with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, bytes, width] -> the same shape."""
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class LanguageModel(nn.Module):
    """Logits of the next of 128 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128)

    def forward(self, text: Tensor) -> Tensor:
        """[batch, bytes] -> [batch, bytes, 128]."""
        x = self.embed(text) + self.position(torch.arange(text.shape[1]))
        return self.head(self.last(self.blocks(x)))


def main(argv: Sequence[str] | None = None) -> None:
    """Train every method at every level on the same batches; print and write the losses."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    start, (text, held_out) = time.perf_counter(), read_text(limit=60 if args.tiny else None)
    print(f"{len(text):,} bytes to train on, {len(held_out):,} held out", flush=True)
    runs: list[tuple[str, float, Make | None]] = [("dense", 0.0, None)]
    runs += [(name, level, make) for level in LEVELS for name, make in METHODS.items()]
    rows = []
    for name, level, make in runs:
        found, nonzeros = train(make, level, text, held_out, args)
        rows.append(
            {"method": name, "level": level, "loss": round(found, 4), "nonzeros": nonzeros, "steps": args.steps}
        )
        print(f"{rows[-1]}  {time.perf_counter() - start:.0f} s", flush=True)
    print_table(rows)
    args.out.mkdir(parents=True, exist_ok=True)
    machine = {"threads": args.threads, "python": platform.python_version(), "torch": torch.__version__}
    write_rows(rows, args.out / "dst_language_model.csv", machine)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps of each run (default: {STEPS})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("out/dst_language_model"), help="folder for the CSV")
    parser.add_argument("--tiny", action="store_true", help="a smoke test: 60 files, 20 small steps")
    args = parser.parse_args(argv)
    args.batch = 2 if args.tiny else BATCH
    args.every = 10 if args.tiny else UPDATE_EVERY
    args.steps = 2 * args.every if args.tiny else args.steps
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    return args


def read_text(limit: int | None) -> tuple[Tensor, Tensor]:
    """The standard library's source as bytes below 128: (training, held-out); the hash of a file's name decides."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p for p in root.rglob("*.py") if not LEFT_OUT & set(p.relative_to(root).parts))[:limit]
    parts: dict[bool, list[bytes]] = {False: [b""], True: [b""]}
    for path in paths:
        is_held_out = zlib.crc32(str(path.relative_to(root)).encode()) % 10 == 0
        parts[is_held_out].append(path.read_bytes().decode("ascii", "replace").replace("\ufffd", "?").encode())
    train, held = (torch.frombuffer(bytearray(b"".join(parts[k])), dtype=torch.uint8).long() for k in (False, True))
    return train, held


def windows(text: Tensor, count: int, batch: int, source: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of (random windows of the text, the byte that follows each byte)."""
    for _ in range(count):
        at = torch.randint(len(text) - CONTEXT - 1, (batch,), generator=source)
        rows = torch.stack([text[i : i + CONTEXT + 1] for i in at.tolist()])
        yield rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train(make: Make | None, level: float, text: Tensor, held: Tensor, args: argparse.Namespace) -> tuple[float, int]:
    """One run: the held-out loss and the nonzeros of the blocks' Linear layers."""
    model, sparsifier = fit(make, level, text, args)
    layers = [m for m in model.blocks.modules() if isinstance(m, nn.Linear)]
    nonzeros = sum(m.weight.numel() for m in layers)
    if sparsifier is not None:
        nonzeros = sum(row.kept for row in sparsifier.report())
        sparsifier.check()
        sparsifier.squash_mask()
    return held_out_loss(model, held, tiny=args.tiny), nonzeros


def fit(
    make: Make | None, level: float, text: Tensor, args: argparse.Namespace
) -> tuple[LanguageModel, DynamicSparsifier | None]:
    """Train one model."""
    torch.manual_seed(args.seed)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: warm_then_cosine(t / args.steps))
    sparsifier = None if make is None else make(optimizer, level, max(int(0.75 * args.steps), 1), args.every)
    if sparsifier is not None:
        sparsifier.prepare(model, linears(model))
    for inputs, targets in windows(text, args.steps, args.batch, torch.Generator().manual_seed(args.seed)):
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        if sparsifier is not None:
            sparsifier.take_gradients()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if sparsifier is not None:
            sparsifier.step()
    return model, sparsifier


@torch.no_grad()
def held_out_loss(model: nn.Module, held: Tensor, tiny: bool = False) -> float:
    """The mean loss over fixed windows of the held-out text."""
    count, batch = (4, 2) if tiny else (200, BATCH)
    losses = [loss_of(model, *rows) for rows in windows(held, count, batch, torch.Generator().manual_seed(1))]
    return torch.stack(losses).mean().item()


def warm_then_cosine(progress: float) -> float:
    """Linear warm-up over a twentieth of the run, then a half cosine down to 0."""
    return min(progress / 0.05, 0.5 + 0.5 * math.cos(math.pi * progress)) if progress else 0.01


def linears(model: LanguageModel) -> list[dict[str, str]]:
    """A config of the blocks' Linear layers."""
    names = [n for n, m in model.blocks.named_modules() if isinstance(m, nn.Linear)]
    return [{"tensor_fqn": f"blocks.{n}.weight"} for n in names]


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Held-out loss by level and method."""
    print(f"\nheld-out loss (nats per byte); dense {rows[0]['loss']:.3f}")
    print("| sparsity | nonzeros | " + " | ".join(METHODS) + " |")
    for level in LEVELS:
        found = {r["method"]: r for r in rows if r["level"] == level}
        nonzeros = "/".join(sorted({str(r["nonzeros"]) for r in found.values()}))
        print(f"| {level:.2f} | {nonzeros} | " + " | ".join(f"{found[n]['loss']:.3f}" for n in METHODS) + " |")


if __name__ == "__main__":
    main()
