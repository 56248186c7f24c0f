"""The command `python -m sparsekit_ao`: prune or shrink a folder of transformers, or report what one holds."""

import argparse
import codecs
import inspect
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checkpoints import save_pretrained
from .checkpoints.card import CARD
from .checkpoints.pretrained import MANIFEST, load_folder, load_tokenizer
from .errors import SparsityError, check_writable, did_you_mean
from .export import report
from .oneshot import mixed, prune, quality
from .oneshot.quality import MEAN
from .oneshot.walk import check_options
from .patterns import parse
from .removal import shrink
from .sparsifiers import ScopeSparsifier
from .structure import checked_level

CALLS: dict[str, Callable[..., Any]] = {"prune": prune, "shrink": shrink}
OF_COMMAND = {"model", "batches", "example_inputs", "forward", "couplings", "inplace", "dry_run"}
BATCH = 4  # windows of tokens in a batch
MEASURED = 8192  # tokens of the held-out text, at most
HELD_OUT = 10  # one document, or part of the text, of so many is held out
SEED = 0  # of the order of windows


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 2 after an error, which is printed in one line."""
    args = _parser().parse_args(argv)
    args.line = ["python", "-m", "sparsekit_ao", *(sys.argv[1:] if argv is None else argv)]
    try:
        (_report if args.command == "report" else _run)(args)
    except (SparsityError, OSError) as error:
        print(f"sparsekit_ao: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sparsekit_ao", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("prune", "drop weights"), ("shrink", "remove units"), ("report", "show what a folder holds")):
        command = commands.add_parser(name, help=what)
        command.add_argument("folder", type=Path, help="a checkpoint of transformers, or a GGUF file")
        if name == "report":
            continue
        text = "text, or JSON lines whose field 'text' is a document"
        command.add_argument(
            "--data", action="append", metavar="[KIND=]FILE", help=f"{text}; may be given several times"
        )
        command.add_argument("--held-out", action="append", metavar="[KIND=]FILE", help="text to measure on only")
        command.add_argument("--tokens", type=int, default=32768, help="to calibrate on, at most (default: 32768)")
        command.add_argument("--length", type=int, help="tokens of a window (default: 256, or the model's maximum)")
        command.add_argument("--recipe", type=Path, help=f"a YAML file with arguments of `{name}`")
        command.add_argument("--out", type=Path, help="the folder to write")
        command.add_argument("--dry-run", action="store_true", help="say what would be done, and write nothing")
        # Those below are arguments of the call; the recipe may have the others.
        command.add_argument("--recover", action="store_true", default=None, help="train blocks to match dense ones")
        command.add_argument("--exclude", nargs="+", metavar="NAME", help="names or globs of tensors and modules")
        if name == "shrink":
            command.add_argument("--ratio", type=float, help="the fraction to remove (default: 0.5); see --budget")
            of = "what --ratio is of: each layer's units (layer, the default; the model loses less) or the model's cost"
            command.add_argument("--budget", choices=("layer", "units", "flops", "parameters"), help=of)
            continue
        command.add_argument("--pattern", help="such as 2:4")
        command.add_argument("--sparsity-level", type=float, help="the fraction of weights to drop, without --pattern")
        command.add_argument("--device", help="where blocks are pruned, such as cuda")
        command.add_argument("--checkpoint", help="a folder from which the same command continues if interrupted")
    return parser


def _run(args: argparse.Namespace) -> None:
    """Load a model, prune or shrink it, compare it with the dense one on held-out tokens, and save it."""
    call = CALLS[args.command]
    keys = _recipe(args.recipe, call) if args.recipe else {}
    names = _names(call)
    keys |= {name: value for name, value in vars(args).items() if name in names and value is not None}
    if args.out is None and not args.dry_run:
        raise SparsityError("give --out, the folder to write, or --dry-run")
    if args.out is not None and args.out.resolve() == args.folder.resolve():
        raise SparsityError(f"--out is {args.folder}, the folder of the dense model; give another one")
    if (args.folder / MANIFEST).exists():
        raise SparsityError(f"the config in {args.folder} does not describe its model; begin with the dense model")
    is_cut = args.length and not args.held_out
    if args.data is None and (args.command == "shrink" or is_cut or args.recover):
        raise SparsityError("shrink, --length and --recover need --data, a file with typical text")
    files = _files(args)
    if (least := min(args.tokens, 2 if args.length is None else args.length)) < 2:
        raise SparsityError(f"--tokens and --length must be at least 2, got {least}")
    if args.tokens < 2 * len(args.data or ()):
        raise SparsityError(f"--tokens must be at least 2 for each of {len(args.data)} files, got {args.tokens}")
    checked_level(vars(args).get("ratio") or 0, "--ratio: ")
    pattern, level = keys.pop("pattern", None), keys.get("sparsity_level")
    ScopeSparsifier(level, pattern=pattern)  # raises errors of these, too
    if pattern is not None:
        keys["sparsity_level"] = pattern if level is None else replace(parse(pattern), sparsity_level=level)
    check_options(args.command, *map(keys.get, ("device", "stream_memory", "checkpoint", "compensate")))
    if args.out is not None:
        check_writable(args.out, f"--out: {args.out}")
    with tempfile.TemporaryDirectory() as offload_folder:
        model = load_folder(args.folder, offload_folder)
        tokenizer = load_tokenizer(args.folder, is_needed=bool(files))
        used, held_out = _windows(tokenizer, model, args, files) if files else ({}, {})
        batches = mixed(_batches(used, BATCH)) if used else None
        if files:
            counts = [sum(ids.numel() for ids in windows.values()) for windows in (used, held_out)]
            each = f" ({counts[0] // len(used):,} of each kind)" if len(used) > 1 else ""
            print(f"{counts[0]:,} tokens to calibrate on{each}, " * bool(used) + f"{counts[1]:,} tokens held out")
            length = next(iter(held_out.values())).shape[1]
            args.line += [f"--tokens={args.tokens}", f"--length={length}"]  # the last ones of a line count
        keys |= {"inplace": True} if args.command == "prune" else {}  # offloaded models cannot be copied
        if args.dry_run:
            print(call(model, batches=batches, dry_run=True, **keys)[1])
            return
        check_writable(args.out, f"--out: {args.out}", sum(p.nbytes for p in model.parameters()))
        result, found = call(model, batches=batches, **keys)
        print(found)
        evaluation = _measured(args, model, result, held_out) if files else {}
        if tokenizer is not None:  # first, so that the card names it
            tokenizer.save_pretrained(args.out)
        made = f"# {shlex.join(args.line)}\n# (windows of text in an order drawn with seed {SEED})\n{found.call}"
        print(save_pretrained(result, replace(found, call=made), args.out, evaluation=evaluation))


def _names(call: Callable[..., Any]) -> set[str]:
    """Return the arguments of a call that a command line or a recipe may give, and `pattern` beside a level."""
    names = inspect.signature(call).parameters.keys() - OF_COMMAND
    return names | {"pattern"} if "sparsity_level" in names else names


def _recipe(path: Path, call: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments in a YAML file; their names are those of the call."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise SparsityError("--recipe needs PyYAML: pip install pyyaml") from None
    try:
        # YAML reads 2:4 as the number 124 in base 60, so texts with a colon are taken as they are written.
        values, texts = (yaml.load(path.read_text("utf-8"), Loader=one) for one in (yaml.SafeLoader, yaml.BaseLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SparsityError(f"--recipe: {path} is not YAML: {error}") from error
    if not isinstance(values, Mapping):
        raise SparsityError(f"--recipe: {path} must hold names and values, such as `pattern: 2:4`")
    names = _names(call)
    for name in values:
        if name not in names:
            known = f"it takes {', '.join(sorted(names))}.{did_you_mean(str(name), names)}"
            raise SparsityError(f"--recipe: {call.__name__} takes no {name!r} from a recipe; {known}")
    return {name: texts[name] if ":" in texts[name] else value for name, value in values.items()}


def _files(args: argparse.Namespace) -> dict[str, tuple[str, Path]]:
    """Return {kind: (option, file)} of --data and --held-out; a kind that is not given is the name of the file."""
    files = dict[str, tuple[str, Path]]()
    for option, given in (("--data", args.data), ("--held-out", args.held_out)):
        for value in given or ():
            kind, _, name = value.rpartition("=") if not Path(value).exists() else ("", "", value)
            file, kind = Path(name), kind or Path(name).stem
            if not (file.is_file() and file.stat().st_size):
                raise SparsityError(f"{option}: {file} is not a file, or it is empty; give one with typical text")
            if kind in files or kind == MEAN:
                why = "is the name of the mean" if kind == MEAN else "was given before"
                raise SparsityError(f"{option}: the kind {kind!r} {why}; give another one: {option} KIND={file}")
            if option == "--held-out" and any(file.samefile(other) for of, other in files.values() if of == "--data"):
                why = "is also given by --data, which holds out a tenth of it"
                raise SparsityError(f"{option}: {file} {why}; give another file, or leave it out")
            files[kind] = option, file
    return files


def _windows(
    tokenizer: Any, model: Any, args: argparse.Namespace, files: Mapping[str, tuple[str, Path]]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return {kind: windows of token ids, int64 [windows, length]} to calibrate on, as many of each, and held out."""
    if model.config.is_encoder_decoder or not getattr(tokenizer, "is_fast", False):
        kind = "decoder or an encoder" if model.config.is_encoder_decoder else "model with a fast tokenizer"
        raise SparsityError(f"--data needs a {kind}, got {type(model).__name__} with {type(tokenizer).__name__}")
    tokens = args.tokens // (len(args.data or ()) or 1)
    most = getattr(model.config, "max_position_embeddings", None) or tokens
    longest = min(tokens, most, tokenizer.model_max_length)  # RoBERTa's has more positions than it can use
    length = min(256, longest) if args.length is None else args.length
    if not 2 <= length <= longest:
        limit = "--tokens for each kind, or the model's maximum"
        raise SparsityError(f"--length must be from 2 to {longest} ({limit}), got {length}")
    found = {kind: _windows_of(tokenizer, *file, tokens, length) for kind, file in files.items()}
    used = {kind: windows for kind, (windows, _) in found.items() if files[kind][0] == "--data"}
    count = min(map(len, used.values()), default=0)
    if count < max(map(len, used.values()), default=0):
        shortest = next(files[kind][1] for kind, windows in used.items() if len(windows) == count)
        print(f"{shortest} is short, so only {count * length:,} tokens of each kind are used")
    return {kind: windows[:count] for kind, windows in used.items()}, {kind: held for kind, (_, held) in found.items()}


def _windows_of(tokenizer: Any, option: str, file: Path, tokens: int, length: int) -> tuple[Tensor, Tensor]:
    """Return windows of a file to calibrate on, and held-out ones, drawn by a fixed seed; all of --held-out is so."""
    try:
        data: Any = np.memmap(file, mode="r")  # of which only what is needed is read
        lines = data.tobytes().splitlines() if file.suffix in (".jsonl", ".json") else []
        documents = [json.loads(line)["text"].encode() for line in lines if line.strip()]
        data = b"\n\n".join(documents) if lines else data
        parts = data[: -len(data) // HELD_OUT], data[-len(data) // HELD_OUT :]
        if option == "--held-out":
            parts = data, data
        elif len(documents) >= HELD_OUT:
            data = b"\n\n".join(document for at, document in enumerate(documents, 1) if at % HELD_OUT)
            parts = data, b"\n\n".join(documents[HELD_OUT - 1 :: HELD_OUT])
        used, held_out = (_drawn(tokenizer, *of, length) for of in zip(parts, (tokens, MEASURED), strict=True))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SparsityError(f"{option}: {file} must be text, or JSON lines with a field 'text': {error}") from error
    if not (len(used) and len(held_out)):
        raise SparsityError(f"{option}: {file} is too short: give {HELD_OUT * length} tokens or a smaller --length")
    return used, held_out


def _drawn(tokenizer: Any, text: Any, tokens: int, length: int) -> Tensor:
    """Return windows at even distances in a text, given as bytes, of so many tokens together, or of all that it has."""

    def windows_of(part: Any) -> list[list[int]]:
        whole = bytes(part).lstrip(bytes(range(0x80, 0xC0)))  # from the first character that is not cut to the last
        part = codecs.getincrementaldecoder("utf-8")().decode(whole)
        # Each window gets the tokens that the tokenizer adds to a text, such as [CLS] and [SEP].
        ids = tokenizer(part, truncation=True, max_length=length, return_overflowing_tokens=True)["input_ids"]
        return [window for window in ids if len(window) == length]

    count, windows = max(1, tokens // length), list[list[int]]()
    distance = len(text) // count
    for at in range(0, count * distance, max(1, distance)):
        space = re.search(rb"\s", bytes(text[at : at + 64])) if at else None  # windows begin with a word
        part = text[at + space.end() if space else at : at + distance]
        windows += (windows_of(part[: 8 * length]) or windows_of(part))[:1]  # 8 bytes nearly always hold a token
    windows = windows if len(windows) == count else (every := windows_of(text))[:: max(1, len(every) // count)]
    tokenizer("")  # without truncation, which would be saved with the tokenizer
    return torch.tensor(windows)[torch.randperm(len(windows), generator=torch.Generator().manual_seed(SEED))[:count]]


def _batches(windows: Mapping[str, Tensor], size: int) -> dict[str, list[dict[str, Tensor]]]:
    return {kind: [{"input_ids": ids} for ids in of_kind.split(size)] for kind, of_kind in windows.items()}


def _measured(args: argparse.Namespace, dense: Any, result: Any, held_out: Mapping[str, Tensor]) -> Any:
    """Print and return how close the result is to the dense model; say so if it cannot be measured, and return {}."""
    with tempfile.TemporaryDirectory() as offload_folder:
        try:
            if args.command == "prune":  # which has changed the model in place
                dense = load_folder(args.folder, offload_folder)
            found = quality(dense, result, _batches(held_out, 1))
        except Exception as error:  # the result of what may be hours of work is saved all the same
            print(f"sparsekit_ao: the result cannot be measured: {type(error).__name__}: {error}", file=sys.stderr)
            return {}
    print(f"on held-out text, compared with the dense model:\n{found}")
    return found


def _report(args: argparse.Namespace) -> None:
    """Print what the weights of a folder look like, and how the card says it was made."""
    with tempfile.TemporaryDirectory() as offload_folder:
        print(report(load_folder(args.folder, offload_folder)))
    card = args.folder / CARD
    text = card.read_text("utf-8", "replace") if card.exists() else ""
    made = re.search(r"^## How it was made\n.*?(?=^## |\Z)", text, re.S | re.M)
    print(made[0] if made else f"{args.folder} has no model card of this library")


if __name__ == "__main__":
    sys.exit(main())
