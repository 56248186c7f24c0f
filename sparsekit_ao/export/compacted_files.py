"""Folders of compacted transformers models: written so that `from_pretrained` or `load_pretrained` constructs them.

Where the config describes the smaller model, the folder is an ordinary checkpoint. Where it does not, the folder holds
the config of the dense model, the weights of the smaller one, and the manifest that makes the one to the other.
"""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import SparsityError
from ..removal.attributes import Change, apply_changes
from ..removal.manifest import cut_to
from ..removal.results import Compaction, Conversion

MANIFEST = "manifest.json"


def save_compacted(model: Any, report: Compaction, path: str | Path, **kwargs: Any) -> Conversion:
    """Save a compacted model; see `save_pretrained`."""
    folder, name = Path(path), type(model).__name__
    written = report.not_in_config == ""
    changes = [Change(**change) for change in report.manifest["attributes"]]
    of_config = [change for change in changes if "config" in change.path.split(".")[:-1]]
    if not written:
        apply_changes(model, [Change(path=c.path, was=c.now, now=c.was) for c in reversed(of_config)])
    try:
        model.save_pretrained(folder, **kwargs)
    finally:
        if not written:
            apply_changes(model, of_config)
    (folder / MANIFEST).unlink(missing_ok=True)
    if written:
        note = f"{name}.from_pretrained loads it"
    else:
        report.save(folder / MANIFEST)
        why = f" ({report.not_in_config})" if report.not_in_config else ""
        note = (
            f"the config does not describe the smaller model{why}: {name}.from_pretrained cannot load it, "
            f"export.load_pretrained({str(path)!r}, {name}) does"
        )
    _check(load_pretrained(folder, type(model)), model, folder)
    return Conversion(
        target="save_pretrained",
        converted=tuple(dict.fromkeys(change.path for change in of_config)) if written else (),
        left={},
        before=report.before.bytes,
        after=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        notes=(note,),
    )


def load_pretrained(path: str | Path, model_class: Any, **kwargs: Any) -> nn.Module:
    """Load a compacted model that `save_pretrained(model, report, path)` wrote, whether or not its config describes it.

    Args:
        path: folder.
        model_class: class of the model, or an `AutoModel...` class.
        kwargs: for `from_pretrained`, where the config describes the model; else for its constructor.

    Returns:
        The model, in eval mode as after `from_pretrained`.

    Raises:
        SparsityError: weights are missing, or the manifest is of another model.

    >>> model = load_pretrained("smaller", transformers.AutoModelForCausalLM)  # doctest: +SKIP
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig

    folder = Path(path)
    if not (folder / MANIFEST).exists():
        found: nn.Module = model_class.from_pretrained(folder, **kwargs)
        return found
    config = AutoConfig.from_pretrained(folder)
    make = model_class.from_config if hasattr(model_class, "from_config") else model_class._from_config
    model: nn.Module = cut_to(make(config, **kwargs), folder / MANIFEST)
    values: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        values |= load_file(file)
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    loaded = {id(own[name]) for name in values if name in own}
    missing = [name for name in model.state_dict() if name not in values and id(own[name]) not in loaded]
    if missing or not values:
        raise SparsityError(f"load_pretrained: {folder} holds no values of {', '.join(missing[:5])}")
    model.load_state_dict(values, strict=False)
    return model.eval()


def _check(loaded: nn.Module, model: nn.Module, folder: Path) -> None:
    found = loaded.state_dict()
    for name, tensor in model.state_dict().items():
        if name not in found or not tensor.detach().cpu().equal(found[name].to(tensor.dtype).cpu()):
            raise SparsityError(f"save_pretrained: what is loaded from {folder} has other values of {name}")
