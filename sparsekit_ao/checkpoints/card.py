"""The model card that `save_pretrained` writes, in the form of Hugging Face, as text from values."""

from collections.abc import Mapping, Sequence
from hashlib import sha256

CARD = "README.md"
_DIGEST = "<!-- Written by sparsekit_ao, which replaces this card unless its text is changed. SHA-256: "


def is_unchanged(card: str) -> bool:
    """Return whether a card is as `model_card` returned it, by the digest at its end."""
    text, _, digest = card.rpartition(_DIGEST)
    return digest.strip(" ->\n") == sha256(text.encode()).hexdigest()


def model_card(
    title: str,
    name: str,
    *,
    module: str,
    base: str,
    parameters: int,
    call: str,
    versions: Mapping[str, str],
    lines: Sequence[str],
    evaluation: Sequence[Sequence[str]],
    is_smaller: bool,
    has_manifest: bool,
    has_tokenizer: bool,
) -> str:
    """Return the card of a model.

    Args:
        title: The name of its folder.
        name, module: The name of its class, and of the module that defines the class.
        base: The repository of the model that it was made from; "" if it has none.
        parameters: The number of its parameters.
        call: The call that made it, as text; "" if it is not known.
        versions: {package: its version}.
        lines: Lines of the report.
        evaluation: The head and the rows of a table of what was measured; empty if nothing was.
        is_smaller: Whether units left the model; else it has zeros.
        has_manifest, has_tokenizer: Whether its folder has a manifest, and a tokenizer.
    """
    is_transformers = "transformers" in versions
    head = [*["library_name: transformers"] * is_transformers, "tags:", "- sparsekit_ao", "- pruned"]
    head += [f"base_model: {base}"] * bool(base)
    used = ", ".join(f"{package} {version}" for package, version in versions.items())
    load = f"{name}.from_pretrained(folder)"
    module = "transformers" if module.startswith("transformers.") else module
    imports, place = f"from {module} import {name}\n", f"\nfolder = {title!r}  # the folder of this card"
    if has_manifest:
        why = f"# {name}.from_pretrained cannot load it, since no config describes its layers.\n"
        load = f"export.load_pretrained(folder, {name})"
        imports = f"{why}{imports}from sparsekit_ao import export\n"
    if has_tokenizer:
        imports += "from transformers import AutoTokenizer\n"
        load += "\ntokenizer = AutoTokenizer.from_pretrained(folder)"
    fast = "It is a smaller dense model, which runs faster everywhere."
    if not is_smaller:
        fast = (
            "Zeros alone make nothing smaller or faster: a file format or a kernel has to use them.\n"
            "`print(sparsekit_ao.export.report(model))` lists the patterns of the weights.\n"
            "`sparsekit_ao.export.to_2_4(model.half().cuda())` runs those in 2:4 on the sparse tensor cores of NVIDIA\n"
            "GPUs (Ampere or newer). A compressor such as zstd makes the files smaller."
        )
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in evaluation]
    rows = [f"| {' | '.join(row)} |" for row in cells]
    rows[1:1] = ["|---" * len(cells[0]) + "|"] if rows else []
    sections = {
        "How it was made": f"```python\n{call}\n```\n\n{used}" if call else used,
        "Report": "\n".join(["```text", *lines, "```"]),
        "Evaluation": "\n".join(rows),
        "How to load it": f"```python\n{imports}{place}\nmodel = {load}\n```",
        "How to run it fast": fast,
    }
    texts = [f"## {heading}\n\n{text}\n" for heading, text in sections.items() if text]
    what = f"A {name} with {parameters:,} parameters, pruned with sparsekit_ao."
    text = "\n".join(["---", *head, "---", "", f"# {title}", "", what, "", *texts, ""])
    return f"{text}{_DIGEST}{sha256(text.encode()).hexdigest()} -->\n"
