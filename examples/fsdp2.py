"""Prune a sharded model with one budget over all its layers: FSDP2 on two ranks, on CPU.

    torchrun --nproc-per-node 2 examples/fsdp2.py

A small transformer with Llama's layers is trained to continue a repeating sequence, while its sparsity rises to 80
percent of all linear weights together. The masks are chosen over both ranks by summing counts; weights are not
gathered. The script prints the bytes that a rank sent for a selection, and those that gathering would have sent.
"""

import argparse

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from sparsekit_ao import ScopeSparsifier
from sparsekit_ao.schedules import cubic


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each after a norm and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> the same shape."""
        h = self.before_attention(x)
        q, k, v = (p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Transformer(nn.Module):
    """Tokens to logits, with learned positions."""

    def __init__(self, tokens: int, width: int, heads: int, depth: int, length: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, tokens, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length] -> [batch, length, tokens]."""
        h = self.token(x) + self.place(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class Sent:
    """Counts the bytes that are passed to all-reduces inside a `with` block."""

    total = 0

    def __enter__(self) -> "Sent":
        self._real = distributed.all_reduce
        distributed.all_reduce = self._count
        return self

    def _count(self, tensor: Tensor, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.total += tensor.numel() * tensor.element_size()
        return self._real(tensor, *args, **kwargs)

    def __exit__(self, *_: object) -> None:
        distributed.all_reduce = self._real


def batch(step: int, rank: int, tokens: int, length: int) -> Tensor:
    """Sequences that repeat eight random tokens."""
    g = torch.Generator().manual_seed(2 * step + rank)
    return torch.randint(tokens, (8, 8), generator=g).repeat(1, length // 8 + 1)[:, : length + 1]


def main() -> None:
    """Train and prune on every rank; print the results on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a smaller model, fewer steps")
    args = parser.parse_args()
    width, depth, steps = (32, 1, 20) if args.tiny else (256, 4, 120)
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rank, tokens, length = distributed.get_rank(), 64, 32

    model = Transformer(tokens, width, 4, depth, length)
    sparsifier = ScopeSparsifier(0.0, scope_coupling="all")
    sparsifier.prepare(model, [{"tensor_fqn": r"re:blocks\..*\.(q|k|v|o|gate|up|down)\.weight"}])
    for block in model.blocks:  # prepare, then fully_shard, then the optimizer
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    level, sent, updates = cubic(0.0, 0.8, steps // 2), Sent(), 0
    for step in range(steps):
        if step % 10 == 0:
            for group in sparsifier.groups:
                group["sparsity_level"] = level(step)
            with sent:
                sparsifier.step()
            updates += 1
        x = batch(step, rank, tokens, length)
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % (steps // 4) == 0:
            print(f"step {step}: sparsity {level(step):.2f}, loss {loss.item():.3f}")

    report = sparsifier.report()
    sparsifier.check()
    sparsifier.squash_mask()
    weights = report.elements
    if rank == 0:
        print(f"loss {loss.item():.3f}; {weights:,} weights, {report.sparsity:.4f} of them zero")
        print(f"held on this rank: {sum(r.mask_bytes for r in report):,} bytes of masks")
        print(f"sent for one selection: {sent.total // updates:,} bytes; gathering would take {4 * weights:,}")
    distributed.barrier()  # no rank exits while another still communicates
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
