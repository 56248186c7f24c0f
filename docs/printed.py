"""What the Python blocks of a page print, which the site shows below each block.

The tests run the blocks of all pages (`run`) and keep what they print in `docs/_generated/printed`. The site reads it
from there; pages that have changed since, or were not run, are run before Sphinx replaces modules for the reference.
"""

import contextlib
import copy
import io
import json
import pathlib
import re
import tempfile
import warnings
from typing import Any

import torch

BLOCK = re.compile(r"```python( before)?\n(.*?)```\n", flags=re.DOTALL)
PRINTS = re.compile(r"^ *# prints: (.+)\n", flags=re.MULTILINE)  # a line that must be printed
SAVED = pathlib.Path(__file__).parent / "_generated/printed"
LINES = 30  # of an output on a page; the middle of longer ones is left out


def run(name: str, text: str) -> list[str]:
    """Run the blocks of a page from top to bottom, and return what each prints."""
    names: dict[str, Any] = {"__name__": "page"}
    outputs = []
    torch.manual_seed(0)  # a page prints the same each time
    for found in BLOCK.finditer(text):
        lines_above = text.count("\n", 0, found.start(2))  # so that a traceback names the line of the page
        code = compile("\n" * lines_above + found[2], name, "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            if found[1]:  # what another library did, on copies
                models = {key for key in code.co_names if isinstance(names.get(key), torch.nn.Module)}
                _run_before(code, names | {key: copy.deepcopy(names[key]) for key in models})
            else:
                exec(code, names)
        outputs.append(printed.getvalue())
    return outputs


def _run_before(code: Any, names: dict[str, Any]) -> None:
    """Run a block of another library, if that is installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(code, names)
        except ModuleNotFoundError as e:
            if not (e.name or "").startswith(("torchao", "torch_pruning", "torch.ao")):
                raise


def save(name: str, text: str, outputs: list[str]) -> None:
    """Keep what the blocks of a page print."""
    SAVED.mkdir(parents=True, exist_ok=True)
    (SAVED / f"{name.replace('/', '.')}.json").write_text(json.dumps([text, outputs]))


def saved(name: str, text: str) -> list[str] | None:
    """Return what the blocks of a page print; None if it has changed since, or was not run."""
    file = SAVED / f"{name.replace('/', '.')}.json"
    of_text, outputs = json.loads(file.read_text()) if file.exists() else ("", None)
    return outputs if of_text == text else None


def run_all(root: pathlib.Path) -> None:
    """Run the pages below `docs/` that print, if they were not run since they changed."""
    for path in sorted((root / "docs").rglob("*.md")):
        name, text = str(path.relative_to(root)), path.read_text()
        if "_generated" not in name and "print(" in text and saved(name, text) is None:
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                save(name, text, run(name, text))


def page(name: str, text: str) -> str:
    """Return a page with what its blocks print."""
    left = iter(saved(name, text) or [""] * len(BLOCK.findall(text)))

    def with_output(found: re.Match[str]) -> str:
        lines = next(left).rstrip().splitlines()
        if len(lines) > LINES:
            lines[LINES - 10 : -9] = ["..."]
        shown = "\n".join(line.rstrip() for line in lines)
        return PRINTS.sub("", found[0]) + (f"\n````text\n{shown}\n````\n" if lines and not found[1] else "")

    return BLOCK.sub(with_output, text)
