"""Texts of seven kinds, each divided into texts to calibrate on and held-out ones.

Docstrings, source code and a manual come with Python. The other kinds are read from a folder into which two downloads
were unpacked: the wheel of chatterbot-corpus (`pip download --no-deps chatterbot-corpus`; PyYAML reads it) and Debian's
packages fortunes and debian-handbook (`apt-get download fortunes debian-handbook`, unpacked by `dpkg -x`). Kinds whose
files are not there are left out. A third of the items of each kind is held out, by a hash of their names.

`completed_headers` is one kind more, which a model writes itself: what it makes of headers of functions of Python's
standard library.
"""

import ast
import html
import re
import sysconfig
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from minilm import stdlib_files
from smollm2 import split_texts
from tasks import TASKS

Texts = tuple[list[str], list[str]]  # to calibrate on, held out


def texts_by_kind(folder: Path) -> dict[str, Texts]:
    """The texts of every kind that is there; the folder need not exist."""
    from pydoc_data.topics import topics

    python = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    handbook = folder / "usr/share/doc/debian-handbook/html"
    found = {
        "docstrings": split_texts(),
        "code": divided((path.name, path.read_text(errors="ignore")[:20000]) for path in python),
        "manual": divided(sorted(topics.items())),
        "handbook": divided(pages(handbook / "en-US")),
        "quotations": divided(quotations(folder / "usr/share/games/fortunes")),
        "dialogues": divided(dialogues(folder / "chatterbot_corpus/data/english")),
        "German": divided(pages(handbook / "de-DE")),
    }
    return {kind: texts for kind, texts in found.items() if all(texts)}


@torch.no_grad()
def completed_headers(tokenizer: Any, model: Any, counts: tuple[int, int], tokens: int = 128, batch: int = 32) -> Texts:
    """So many headers of functions of the standard library, each with what the model makes of it.

    A header is the line with `def` and the first paragraph of the docstring; none has the name of a task of `tasks`.
    The model's own body is sampled at a temperature of 0.7 by a fixed seed, in `tokens` tokens.
    """
    tasks = {header.split("(")[0] for header, _, _ in TASKS}
    headers: list[tuple[str, str]] = []
    for top, path in stdlib_files():
        for node in ast.parse(path.read_bytes()).body:
            if not isinstance(node, ast.FunctionDef) or f"def {node.name}" in tasks:
                continue
            if docstring := ast.get_docstring(node):
                what = " ".join(docstring.split("\n\n")[0].split())
                headers.append((top, f'def {node.name}({ast.unparse(node.args)}):\n    """{what}"""\n'))
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    texts: Texts = [], []
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # `generate` takes no generator
        for part, own, count in zip(divided(headers), texts, counts, strict=True):
            drawn = [part[i] for i in torch.randperm(len(part), generator=generator)[:count]]
            for at in range(0, len(drawn), batch):
                inputs = tokenizer(drawn[at : at + batch], return_tensors="pt", padding=True)
                ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=True, temperature=0.7)
                own += tokenizer.batch_decode(ids, skip_special_tokens=True)
    return texts


def divided(items: Iterable[tuple[str, str]]) -> Texts:
    """Divide named texts: a third is held out."""
    texts: Texts = [], []
    for name, text in items:
        texts[zlib.crc32(name.encode()) % 3 == 0].append(text)
    return texts


def pages(folder: Path) -> Iterable[tuple[str, str]]:
    """The text of the HTML pages of a folder."""
    for path in sorted(folder.glob("*.html")):
        text = re.sub(r"(?s)<(script|style|head).*?</\1>", " ", path.read_text(errors="ignore"))
        yield path.name, re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", text))).strip()


def quotations(folder: Path) -> Iterable[tuple[str, str]]:
    """Quotations, without pictures of characters and the offensive ones, which have files of their own."""
    for path in sorted(folder.glob("*")):
        if path.is_file() and path.suffix not in (".dat", ".u8") and "ascii" not in path.name:
            for number, text in enumerate(path.read_text(errors="ignore").split("\n%\n")):
                yield f"{path.name}{number}", text


def dialogues(folder: Path) -> Iterable[tuple[str, str]]:
    """Questions and answers; twenty that follow each other are held out together."""
    for path in sorted(folder.glob("*.yml")):
        import yaml  # type: ignore[import-untyped]

        for number, lines in enumerate(yaml.safe_load(path.read_text(errors="ignore")).get("conversations", [])):
            yield f"{path.name}{number // 20}", "\n".join(f"- {line}" for line in lines)
