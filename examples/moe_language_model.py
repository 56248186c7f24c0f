"""Prune a trained mixture of experts in one pass, without labels; at equal bytes, prune in experts or remove experts.

    python examples/moe_language_model.py          # a quarter of an hour on one core, most of it for training once
    python examples/moe_language_model.py --tiny   # every structure and method, in seconds

The model is a Qwen3-MoE of transformers: 3 layers of width 128, each with 8 experts, of which 2 are active, and 1.4
million parameters, 1.2 million of them in experts. The text is that of dst_language_model.py. It is trained dense once;
then copies of it are pruned by every method and measured on held-out files. "recovered" then trains the blocks to give
what the dense model's blocks give (`recover`). The last structures are in the experts alone: 2:4, half of the experts
removed (REAP), and experts that are narrower by the units that matter least, at the bytes of 2:4. Prints rows and
writes a CSV. Bytes are those of float32 weights that are not zero, and of one bit for each weight of a tensor with
zeros, which 2:4 and a bitmap of single elements take alike.

SparseGPT of LLM Compressor runs beside, with its default settings, where it is installed (pip install llmcompressor).
"""

import argparse
import copy
import importlib.util
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from dst_language_model import read_text, warm_then_cosine, windows
from rows import write_rows
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from sparsekit_ao import prune, recover
from sparsekit_ao.coupling import expert_couplings
from sparsekit_ao.removal import shrink, shrink_experts

LAYERS, EXPERTS, WIDTH, STEPS, BATCH, CALIBRATION = 3, 8, 128, 1500, 32, 16
STRUCTURES: dict[str, dict[str, Any]] = {"2:4": {"sparsity_level": "2:4"}, "50 %": {"sparsity_level": 0.5}}
# (score, compensation) by name.
METHODS: dict[str, tuple[str, str | None]] = {
    "magnitude": ("magnitude", None),
    "wanda": ("wanda", None),
    "wanda + least squares": ("wanda", "least_squares"),
    "sparsegpt": ("wanda", "sparsegpt"),
    "admm": ("wanda", "admm"),
}
IN_EXPERTS, FEWER, NARROWER = "2:4 in experts", "half of the experts", "narrower experts"
THEIRS = "SparseGPT of LLM Compressor"
Pruned = Callable[[], nn.Module]


def main(argv: Sequence[str] | None = None) -> None:
    """Train once, prune by every method, print and write the losses."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    start, (text, held) = time.perf_counter(), read_text(limit=60 if args.tiny else None)
    dense = train(text, args)
    print(f"trained in {time.perf_counter() - start:.0f} s", flush=True)
    rows = [row_of("dense", "", dense, held, "", args)]
    source = torch.Generator().manual_seed(2)
    calibration = [inputs for inputs, _ in windows(text, args.calibration, args.batch, source)]
    for structure, method, pruned in runs(dense, calibration):
        start = time.perf_counter()
        model = pruned()
        rows.append(row_of(structure, method, model, held, round(time.perf_counter() - start, 1), args))
        if method in ("admm", "reap") or structure == NARROWER:
            recover(model, dense, calibration, progress=False)
            rows.append(row_of(structure, "recovered", model, held, round(time.perf_counter() - start, 1), args))
    args.out.mkdir(parents=True, exist_ok=True)
    machine = {"steps": args.steps, "threads": args.threads, "python": platform.python_version()}
    machine |= {"torch": torch.__version__, "transformers": transformers.__version__}
    write_rows(rows, args.out / "moe_language_model.csv", machine)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps (default: {STEPS})")
    parser.add_argument(
        "--calibration", type=int, default=CALIBRATION, help=f"batches of {BATCH} windows (default: {CALIBRATION})"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("out/moe_language_model"), help="folder for the CSV")
    parser.add_argument("--tiny", action="store_true", help="a smoke test: 60 files, a small model, 10 small steps")
    args = parser.parse_args(argv)
    args.batch = 2 if args.tiny else BATCH
    args.steps = 10 if args.tiny else args.steps
    args.calibration = 2 if args.tiny else args.calibration
    if args.steps < 1 or args.calibration < 1:
        parser.error("--steps and --calibration must be at least 1")
    return args


def train(text: Tensor, args: argparse.Namespace) -> Qwen3MoeForCausalLM:
    """The dense mixture."""
    model = untrained(args)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.05 + 0.95 * warm_then_cosine(t / args.steps))
    for inputs, targets in windows(text, args.steps, args.batch, torch.Generator().manual_seed(args.seed)):
        output = model(inputs, output_router_logits=True)
        loss = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        (loss + model.config.router_aux_loss_coef * output.aux_loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
    return model.eval()


def untrained(args: argparse.Namespace) -> Qwen3MoeForCausalLM:
    """The mixture before it is trained."""
    torch.manual_seed(args.seed)
    width = 16 if args.tiny else WIDTH
    config = Qwen3MoeConfig(
        hidden_size=width,
        moe_intermediate_size=width,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=width // 4,
        vocab_size=128,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        router_aux_loss_coef=0.01,
    )
    return Qwen3MoeForCausalLM(config)


def runs(dense: nn.Module, calibration: Sequence[Tensor]) -> Iterator[tuple[str, str, Pruned]]:
    """Every structure and method, and a call that returns a pruned copy."""
    for structure, keys in STRUCTURES.items():
        for method, (score, compensation) in METHODS.items():
            keys = {**keys, "score": score, "compensate": compensation}
            yield structure, method, partial(pruned_by, dense, calibration, **keys)
        if importlib.util.find_spec("llmcompressor") is not None:
            yield structure, THEIRS, partial(by_llmcompressor, dense, structure, calibration)
    for method in ("magnitude", "admm"):
        score, compensation = METHODS[method]
        keys = {"sparsity_level": "2:4", "score": score, "compensate": compensation, "exclude": ["*self_attn*"]}
        yield IN_EXPERTS, method, partial(pruned_by, dense, calibration, **keys)
    yield FEWER, "reap", lambda: shrink_experts(dense, calibration)[0]
    units = expert_couplings(dense)["expert_units"]
    yield NARROWER, "wanda", lambda: shrink(dense, None, 15 / 32, "wanda", batches=calibration, couplings=[units])[0]


def pruned_by(dense: nn.Module, calibration: Sequence[Tensor], **keys: Any) -> nn.Module:
    """A pruned copy."""
    return prune(dense, batches=calibration, progress=False, **keys)[0]


def by_llmcompressor(dense: nn.Module, structure: str, calibration: Sequence[Tensor]) -> nn.Module:
    """A copy, pruned by SparseGPT of LLM Compressor, with modules in the place of packed experts."""
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linearize import linearize_moe
    from llmcompressor.modifiers.pruning import SparseGPTModifier
    from torch.utils.data import DataLoader
    from transformers import ProcessorMixin

    model = copy.deepcopy(dense)
    mask = "2:4" if structure == "2:4" else "0:0"
    modifier = SparseGPTModifier(
        sparsity=0.5, mask_structure=mask, targets=["Qwen3MoeDecoderLayer"], ignore=["re:.*gate$", "lm_head"]
    )
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        model.name_or_path = model.config.name_or_path = folder  # whose config it reads
        linearize_moe(model)
        data = DataLoader([{"input_ids": batch} for batch in calibration], batch_size=None)
        oneshot(
            model=model,
            processor=ProcessorMixin(),
            dataset=data,
            num_calibration_samples=len(calibration),
            recipe=modifier,
        )
    return model


def row_of(
    structure: str, method: str, model: nn.Module, held: Tensor, seconds: float | str, args: argparse.Namespace
) -> dict[str, Any]:
    """A row of the CSV, printed."""
    row = {"structure": structure, "method": method, "loss": round(held_out_loss(model, held, args), 4)}
    row |= {"seconds": seconds, "bytes": kept_bytes(model)}
    print(row, flush=True)
    return row


@torch.no_grad()
def held_out_loss(model: nn.Module, held: Tensor, args: argparse.Namespace) -> float:
    """The mean cross-entropy in nats per byte over fixed windows of the held-out text."""
    rows = windows(held, 2 if args.tiny else 100, args.batch, torch.Generator().manual_seed(1))
    losses = [F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten()) for inputs, targets in rows]
    return torch.stack(losses).mean().item()


def kept_bytes(model: nn.Module) -> int:
    """Bytes of the float32 weights that are not zero, and of one bit for each weight of a tensor with zeros."""
    zeros = [(p.numel(), int((p == 0).sum())) for p in model.parameters()]
    return sum(4 * (count - zero) + (count // 8 if 4 * zero > count else 0) for count, zero in zeros)


if __name__ == "__main__":
    main()
