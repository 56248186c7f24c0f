"""Pages from the scripts in `examples/tutorials`, with the output of their last full run.

A script is cut into cells by lines that are `# %%`; comment lines right after one are Markdown. `python
docs/tutorial_pages.py NAME` runs a script at full size, cell by cell, and saves what each prints in
`examples/tutorials/outputs/NAME.txt`; building the site only reads these files.
"""

import contextlib
import io
import pathlib
import re
import sys

SCRIPTS = pathlib.Path(__file__).parent.parent / "examples/tutorials"
MARK = "# %%"


def cells_of(source: str) -> list[tuple[str, str]]:
    """(Markdown, code) of every cell; the first cell's Markdown is the script's docstring."""
    title, rest = re.fullmatch(r'"""(.*?)"""\n(.*)', source, flags=re.DOTALL).groups()  # type: ignore[union-attr]
    first, *others = re.split(rf"^{MARK}\n", rest, flags=re.MULTILINE)
    cells = [(title.strip(), first.strip())]
    for cell in others:
        lines = cell.splitlines()
        text = 0
        while text < len(lines) and lines[text].startswith("#"):
            text += 1
        prose = "\n".join(line[1:].removeprefix(" ") for line in lines[:text])
        cells.append((prose, "\n".join(lines[text:]).strip()))
    return cells


def run(name: str) -> list[str]:
    """What each cell of a script prints."""
    path = SCRIPTS / f"{name}.py"
    sys.path.insert(0, str(SCRIPTS))  # as `python examples/tutorials/NAME.py` does
    names, outputs = {"__name__": "__main__", "__file__": str(path)}, []
    for _, code in cells_of(path.read_text()):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, str(path), "exec"), names)
        outputs.append(out.getvalue().rstrip())
        print(outputs[-1], flush=True)
    return outputs


def page(name: str) -> str:
    """A tutorial as Markdown.

    Raises:
        ValueError: the saved output has another number of cells than the script; run it again.
    """
    cells = cells_of((SCRIPTS / f"{name}.py").read_text())
    saved = (SCRIPTS / f"outputs/{name}.txt").read_text().split(f"{MARK}\n")
    if len(saved) != len(cells):
        raise ValueError(f"outputs/{name}.txt has {len(saved)} cells, the script {len(cells)}: run it again")
    parts = []
    for (text, code), output in zip(cells, saved, strict=True):
        parts.append(text)
        parts += [f"```python\n{code}\n```"] if code else []
        parts += [f"Output:\n\n```text\n{output.strip()}\n```"] if output.strip() else []
    title, *rest = parts
    note = (
        f"*This page is generated from the script `examples/tutorials/{name}.py`, which runs in seconds with `--tiny`. "
        "The output comes from a full run on two CPU cores.*"
    )
    head, _, intro = title.partition("\n")
    return "\n\n".join([f"# {head.rstrip('.')}", note, intro.strip(), *rest]) + "\n"


def write_all(folder: pathlib.Path) -> None:
    """Write every tutorial's Markdown into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(SCRIPTS.glob("*.py")):
        (folder / f"tutorial_{path.stem}.md").write_text(page(path.stem))


if __name__ == "__main__":
    chosen = sys.argv.pop(1)
    (SCRIPTS / f"outputs/{chosen}.txt").write_text(f"\n{MARK}\n".join(run(chosen)) + "\n")
