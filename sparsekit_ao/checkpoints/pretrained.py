"""Save and load folders of Hugging Face models: `save_pretrained`, `load_pretrained`, and the command's loading."""

import functools
import inspect
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..errors import SparsityError, check_writable, is_number
from ..masking import dense_state_dict_of, select
from ..models.loading import offloaded_values
from ..models.names import is_of_transformers, owner_of, uncompiled_name
from ..oneshot.prune_report import PruneReport
from ..oneshot.quality import QualityReport
from ..removal.manifest import cut_to
from ..removal.removal_report import ShrinkReport
from ..removal.sizes import Change, apply_changes, reverse_changes
from ..version import __version__
from .card import CARD, is_unchanged, model_card
from .conversion import Conversion
from .masks import MASKS, Masks, adapted, masked_tensors, save_masks

MANIFEST = "manifest.json"
Evaluation = Mapping[str, tuple[float, float]] | QualityReport  # {name: (number before, number after)}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"  # transformers' names


def save_pretrained(
    model: Any,
    sparsifier: Masks | ShrinkReport | PruneReport,
    path: str | Path,
    *,
    evaluation: Evaluation = MappingProxyType({}),
    **kwargs: Any,
) -> Conversion:
    """Save a masked, pruned or compacted transformers model so that `from_pretrained` loads it.

    Masked values are written under their plain names. The masks are written to `masks.safetensors`, with one bit for
    each element. The masked values of a transformers `PreTrainedModel` are computed file by file (`max_shard_size`,
    5 GB by default); those of another model are computed together before the first file is written. If the config is
    not known to describe a compacted model, the dense model's config and `manifest.json` are written, which
    `load_pretrained` reads.

    A model card, `README.md`, says how the model was made, what the report and `evaluation` say, how to load it (and a
    tokenizer that is in the folder already), and how to run it fast. A card that was changed by hand stays as it is.

    Args:
        model: A transformers model, or a masked or pruned one with a method `save_pretrained(path, state_dict=...)`.
        sparsifier: The sparsifier of the model, before or after `squash_mask`; or a dict {name: mask}; or the report
            that `prune`, `shrink` or `compact` returned. With that of `prune`, no masks are written.
        path: The folder to write. Masks and a manifest that an earlier call left there are replaced or removed.
        evaluation: For the model card: what `quality` returned, or {name: (number before, number after)}, such as the
            accuracies of the dense model and of this one.
        kwargs: Further arguments of `model.save_pretrained`.

    Returns:
        A `Conversion`. For a masked model, `before` counts the bytes of the masked tensors. `after` counts the same
        bytes (these tensors are written dense) plus those of the file of masks. For a compacted model, `before` counts
        the bytes of the dense model, `after` those of the written files, and a note says how to load them.

    Raises:
        SparsityError: The model has no such method, or has adapters that are not merged; no tensor of the model has the
            name and shape of a mask; a tensor is not zero where its mask drops; the folder cannot be written; or a file
            does not hold the values that were written.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> class Model(torch.nn.Sequential):
    ...     def save_pretrained(self, path, state_dict):
    ...         save_file(state_dict, Path(path) / "model.safetensors")
    >>> model, sparsifier = Model(torch.nn.Linear(8, 4)), sparsekit_ao.ScopeSparsifier(0.5)
    >>> sparsifier.prepare(model)
    >>> sparsifier.step()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(model, sparsifier, folder).converted
    ...     int(sparsekit_ao.export.load_masks(folder)["0.weight"].sum())
    ('0.weight',)
    16
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if not callable(getattr(model, "save_pretrained", None)):
        raise SparsityError(f"save_pretrained: {type(model).__name__} has no method save_pretrained")
    parameters = inspect.signature(model.save_pretrained).parameters.values()
    if not any(p.name == "state_dict" or p.kind is p.VAR_KEYWORD for p in parameters):
        raise SparsityError(
            f"save_pretrained: {type(model).__name__}.save_pretrained takes no state_dict. Squash a deep copy and save "
            "that: copied = copy.deepcopy(model); sparsifier.squash_mask(model=copied); copied.save_pretrained(path)"
        )
    if adapted(model) or callable(getattr(model, "get_base_model", None)):
        raise SparsityError("save_pretrained: the model has adapters; call export.merge_lora(model, sparsifier) first")
    is_pairs = isinstance(evaluation, Mapping) and all(map(_is_pair, evaluation.values()))
    if not is_pairs and not isinstance(evaluation, QualityReport):
        raise SparsityError(
            "save_pretrained: evaluation must be {name: (number before, number after)}, such as {'accuracy': (0.91, "
            f"0.9)}}, with .item() of a tensor, or what quality returned; got {evaluation!r:.80}"
        )
    did_something = getattr(sparsifier, "call", True)
    if isinstance(sparsifier, ShrinkReport):  # a dry run says how long the call would take
        did_something = math.isnan(sparsifier.seconds)
    if not did_something:
        raise SparsityError(
            f"save_pretrained: this {type(sparsifier).__name__} is of a call that returned no changed model, such as a "
            "dry run; give the report that prune or shrink returned with the model, or the sparsifier"
        )
    if isinstance(sparsifier, ShrinkReport) and not is_of_transformers(model, "PreTrainedModel"):
        raise SparsityError(
            f"save_pretrained: {type(model).__name__} is no model of transformers, so nothing would load its smaller "
            "shapes; save report.save(file) and model.state_dict(), and load them by removal.cut_to(dense_model, file)"
        )
    read_from = getattr(getattr(getattr(model, "config", None), "quantization_config", None), "quant_method", None)
    check_writable(path, f"save_pretrained: path={str(path)!r}", sum(p.nbytes for p in model.parameters()))
    folder = Path(path).resolve()
    from safetensors import SafetensorError  # an optional package

    with ExitStack() as stack:
        if read_from == "gguf" and all(p.is_floating_point() for p in model.parameters()):  # transformers refuses it
            for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
                stack.callback(setattr, owner, name, vars(owner).pop(name, None))
        save = _save_compacted if isinstance(sparsifier, ShrinkReport) else _save_masked
        try:
            return save(model, sparsifier, folder, evaluation, **kwargs)  # type: ignore[arg-type]
        except (OSError, SafetensorError) as error:
            why = f"{folder} cannot be written, or not read again ({error}). Nothing of the model was changed"
            raise SparsityError(f"save_pretrained: {why}; make room on the disk, or save it elsewhere") from error


def _is_pair(value: object) -> bool:
    """Return whether a value is two numbers."""
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_number, value))


def _save_masked(
    model: Any, sparsifier: Masks | PruneReport, folder: Path, evaluation: Evaluation, **kwargs: Any
) -> Conversion:
    """Save a masked or pruned model and its masks, and compare what was written with the masked values."""
    masks: dict[str, Tensor] = {}  # `prune` registers none
    if isinstance(sparsifier, PruneReport):
        names = dict.fromkeys(row.tensor for row in sparsifier).keys()
        lines = [*sparsifier.above(), *sparsifier.below()[:2]]
    else:
        masks = {name: mask for name, _, _, mask in masked_tensors([model], sparsifier, "save_pretrained")}
        names = masks.keys()
        kept, total = (sum(int(of(mask)) for mask in masks.values()) for of in (Tensor.count_nonzero, Tensor.numel))
        lines = [f"{len(masks)} masks drop {1 - kept / max(total, 1):.1%} of the elements of their tensors"]
    # Only transformers is known to read the values of a state dict file by file, so only its models get lazy values.
    lazy = _LazyMasked.of if is_of_transformers(model, "PreTrainedModel") else select
    values = _to_write(model, dense_state_dict_of(model, lazy))
    read = _reader(model)
    for name, mask in masks.items():
        wrong = ((value := read(name)) != 0).logical_and(~mask.to(value.device)).nonzero()
        if len(wrong):
            raise SparsityError(
                f"save_pretrained: {name} is not zero at {wrong[0].tolist()}, which its mask drops ({len(wrong):,} "
                "such values): it was changed after squash_mask, or the mask is another model's. Apply the mask first."
            )
    if "max_shard_size" in inspect.signature(model.save_pretrained).parameters:
        kwargs = {"max_shard_size": "5GB"} | kwargs
    with _written_together(folder) as unchecked:
        model.save_pretrained(unchecked, state_dict=dict(values), **kwargs)
        if not isinstance(sparsifier, PruneReport):
            save_masks(masks, unchecked)
        compared = set()
        for name, tensor in _read_back(model, unchecked, names):
            if not _same_bits(tensor, read(name)):
                raise SparsityError(f"save_pretrained: what was written does not hold the masked values of {name}")
            compared.add(name)
        if missing := names - compared:
            raise SparsityError(f"save_pretrained: what was written does not hold the masked values of {min(missing)}")
        of_card = _write_card(unchecked, folder, model, sparsifier, lines, evaluation)
    dense_bytes = sum(getattr(*owner_of(model, name)).nbytes for name in names)
    mask_bytes = (folder / MASKS).stat().st_size if masks else 0
    note = "the weights are saved dense, with their zeros" + f"; {MASKS} adds {mask_bytes:,} bytes" * bool(masks)
    keys: dict[str, Any] = {"before": dense_bytes, "after": dense_bytes + mask_bytes, "notes": (note, *of_card)}
    return Conversion(target="save_pretrained", converted=tuple(names), **keys)


@contextmanager
def _written_together(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder; its files replace those of an earlier model in `folder` if no error is raised."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder if folder.is_dir() else folder.parent) as parent:
        unchecked = Path(parent) / folder.name
        unchecked.mkdir()
        yield unchecked
        # Earlier files are removed first, so that no interruption leaves those of two models beside each other.
        shards = [file.name for file in folder.glob("model-*-of-*.safetensors")]
        for stale in (MANIFEST, MASKS, WEIGHTS, INDEX, "generation_config.json", *shards):
            (folder / stale).unlink(missing_ok=True)
        written = [file for file in unchecked.rglob("*") if file.is_file()]
        for file in sorted(written, key=lambda file: file.name == MASKS):  # masks last, after any weights
            target = folder / file.relative_to(unchecked)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.replace(target)


def _write_card(
    unchecked: Path,
    folder: Path,
    model: nn.Module,
    report: Masks | ShrinkReport | PruneReport,
    lines: Sequence[str],
    evaluation: Evaluation,
) -> tuple[str, ...]:
    """Write a model card; return a note instead if the folder has one of somebody else."""
    if (card := folder / CARD).exists() and not is_unchanged(card.read_text("utf-8", "replace")):
        return (f"{card} is not as save_pretrained wrote it, so it is kept; it may describe another model",)
    base = str(getattr(getattr(model, "config", None), "_name_or_path", ""))
    packages = ("torch", "transformers") if is_of_transformers(model, "PreTrainedModel") else ("torch",)
    if isinstance(evaluation, QualityReport):
        measured = evaluation.cells()
    else:
        measured = [(str(name), f"{before:.4g}", f"{after:.4g}") for name, (before, after) in evaluation.items()]
        measured[:0] = [("", "dense", "this model")] if measured else []
    text = model_card(
        folder.name,
        type(model).__name__,
        module=type(model).__module__,
        base=base if re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists() else "",
        parameters=sum(p.numel() for p in model.parameters()),
        call=getattr(report, "call", ""),
        versions={package: version(package) for package in packages} | {"sparsekit_ao": __version__},
        lines=lines,
        evaluation=measured,
        is_smaller=isinstance(report, ShrinkReport),
        has_manifest=(unchecked / MANIFEST).exists(),
        has_tokenizer=(folder / "tokenizer_config.json").exists(),  # transformers' name
    )
    (unchecked / CARD).write_text(text, "utf-8")
    return ()


class _LazyMasked(Tensor):
    """A masked weight that is computed each time its values are read, so that it takes no memory of its own."""

    mask: Tensor

    @classmethod
    def of(cls, weight: Tensor, mask: Tensor) -> Tensor:
        """Return the masked weight, which is computed later; a sharded or quantized one is computed at once."""
        if type(weight) is not Tensor:
            return select(weight, mask)
        lazy = weight.as_subclass(cls)
        lazy.mask = mask
        return lazy

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        lazy: Any = next(iter(args), None)
        other_args, kwargs = args[1:], kwargs or {}
        name = func.__name__ if isinstance(lazy, cls) else ""
        with torch._C.DisableTorchFunctionSubclass():
            if name in ("chunk", "detach", "squeeze"):  # a view of the weight under the same view of the mask
                views = (func(tensor, *other_args, **kwargs) for tensor in (lazy.as_subclass(Tensor), lazy.mask))
                return _pytree.tree_map(cls.of, *views)
            # Of the whole state dict, transformers reads views, shapes and addresses; of one shard at a time, values.
            if name in ("__get__", "data_ptr", "size", "untyped_storage"):  # `__get__` reads attributes such as shape
                attribute = func(lazy.as_subclass(Tensor), *other_args, **kwargs)
                if not isinstance(attribute, Tensor):  # tensors, such as `.T`, hold values: they are masked below
                    return attribute
            plain = _pytree.tree_map_only(cls, lambda t: select(t.as_subclass(Tensor), t.mask), (args, kwargs))
            return func(*plain[0], **plain[1])


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have one dtype, one shape, and equal bytes."""
    views = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*views)


def _read_back(model: Any, folder: Path, names: Set[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, saved tensor) one by one, from the files, or by `from_pretrained` if some were renamed or split."""
    from safetensors import safe_open

    places = []  # pairs (file, name of a tensor in it)
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            places += [(path, name) for name in set(file.keys()) & names if path.name != MASKS]
    if len({name for _, name in places}) == len(names) or not hasattr(model, "from_pretrained"):
        for path, name in places:
            with safe_open(path, framework="pt") as file:
                yield name, file.get_tensor(name)
        return
    with tempfile.TemporaryDirectory(dir=folder) as offloaded:
        on_disk = {"device_map": {"": "disk"}, "offload_folder": offloaded} if find_spec("accelerate") else {}
        read = _reader(type(model).from_pretrained(folder, **on_disk))  # so that memory holds one tensor at a time
        for name in names:
            yield name, read(name)


def _reader(model: nn.Module) -> Callable[[str], Tensor]:
    """Return a function of a name that reads a parameter or buffer, also one that accelerate has offloaded."""
    offloaded = offloaded_values(model)

    def read(name: str) -> Tensor:
        tensor = getattr(*owner_of(model, name))
        return offloaded.get(id(tensor), tensor.detach)()

    return read


def _to_write(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict under the names that `from_pretrained` knows, with the values of offloaded tensors."""
    read, has_map = _reader(model), hasattr(model, "hf_device_map")  # then transformers reads them, file by file
    return {uncompiled_name(n): read(n) if t.is_meta and not has_map else t for n, t in state.items()}


def _save_compacted(
    model: Any, report: ShrinkReport, folder: Path, evaluation: Evaluation, **kwargs: Any
) -> Conversion:
    """Save an ordinary checkpoint if the config describes the model, and otherwise the dense config and a manifest."""
    name = type(model).__name__
    note = f"{name}.from_pretrained loads it"
    report = replace(report, manifest=json.loads(uncompiled_name(json.dumps(report.manifest))))
    kwargs = {"state_dict": _to_write(model, model.state_dict())} | kwargs
    with _written_together(folder) as unchecked:
        if report.not_in_config == "":
            model.save_pretrained(unchecked, **kwargs)
        else:
            _save_with_manifest(model, report, unchecked, **kwargs)
            note = f"the config does not describe the smaller model ({report.not_in_config})"
            if report.not_in_config is None:  # `compact` does not fit the config to the smaller model
                note = "the config was not fitted to the smaller model, so it is that of the dense model"
            note += f": {name}.from_pretrained cannot load it, export.load_pretrained({str(folder)!r}, {name}) does"
        try:
            loaded = load_pretrained(unchecked, type(model)).state_dict()
        except SparsityError as e:
            why = str(e).replace(str(unchecked), "what was written")  # the temporary folder is gone when this is read
            raise SparsityError(
                f"save_pretrained: the saved model cannot be loaded, so {folder} is left as it was: {why}. A model "
                "that was made smaller twice can be saved if its config described it after the first time."
            ) from e
        read = _reader(model)
        for key in map(uncompiled_name, model.state_dict()):
            tensor = read(key).cpu()
            if key not in loaded or not tensor.equal(loaded[key].to(tensor.dtype).cpu()):
                raise SparsityError(
                    f"save_pretrained: the saved model was loaded with other values of {key}, so {folder} is left as "
                    "it was"
                )
        after = sum(file.stat().st_size for file in unchecked.glob("*.safetensors"))
        rows = [f"{row.name}: {row}" for row in report.couplings] if len(report.couplings) == 1 else []
        lines = [*report.above(), *rows, *report.below()[:3]]
        notes = (note, *_write_card(unchecked, folder, model, report, lines, evaluation))
    return Conversion(target="save_pretrained", converted=(), before=report.before.bytes, after=after, notes=notes)


def _save_with_manifest(model: Any, report: ShrinkReport, folder: Path, **kwargs: Any) -> None:
    """Save the weights and the manifest with the config of the dense model; the model itself keeps its config."""
    manifest = report.manifest
    changes = [Change(**change) for change in manifest["attributes"]]
    config_changes = [change for change in changes if "config" in change.path.split(".")[:-1]]
    for path, dense_value in manifest["config"].items():
        *names, key = path.split(".")
        now = functools.reduce(getattr, names, model).to_dict()[key]  # `per_layer_config` reads as another object
        config_changes.insert(0, Change(path=path, was=dense_value, now=now))  # while the larger number holds
    if "save_original_format" in inspect.signature(model.save_pretrained).parameters:
        # Tensors keep the names that they have in the model, since `load_pretrained` does not convert names.
        kwargs = {"save_original_format": False} | kwargs
    apply_changes(model, reverse_changes(config_changes))
    try:
        model.save_pretrained(folder, **kwargs)
    finally:
        apply_changes(model, config_changes)
    report.save(folder / MANIFEST)


def load_pretrained(path: str | Path, model_class: Any, **kwargs: Any) -> nn.Module:
    """Load a compacted model that `save_pretrained` wrote, in eval mode, whether or not its config describes it.

    Args:
        path: The folder that `save_pretrained` wrote.
        model_class: The class of the model, or an `AutoModel...` class.
        kwargs: Arguments of `from_pretrained` if the folder has no manifest, and of the constructor if it has one.

    Returns:
        The model.

    Raises:
        SparsityError: A file is missing or damaged, the manifest or the weights belong to another model, or the weights
            are neither in `model.safetensors` nor in files that an index lists.

    >>> model = load_pretrained("smaller", transformers.AutoModelForCausalLM)  # doctest: +SKIP
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, GenerationConfig

    folder = Path(path)
    try:
        if not (folder / MANIFEST).exists():
            return model_class.from_pretrained(folder, **kwargs)
        if not isinstance(manifest := json.loads((folder / MANIFEST).read_text()), dict):
            raise ValueError(f"{MANIFEST} is not a JSON object")
        own = getattr(model_class, "config_class", None)  # of a class that transformers may not know
        config, values = (own or AutoConfig).from_pretrained(folder), _weights(folder)
        is_given = (folder / "generation_config.json").exists()
        generation = GenerationConfig.from_pretrained(folder) if is_given else None
    except SparsityError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, SafetensorError) as e:  # damaged files
        raise SparsityError(f"load_pretrained: {folder} cannot be read: {type(e).__name__}: {e}") from e
    make = model_class.from_config if hasattr(model_class, "from_config") else model_class._from_config
    model = cut_to(make(config, **kwargs), manifest)
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name, value in values.items():
        if name not in tensors or tensors[name].shape != value.shape:
            shape = tuple(tensors[name].shape) if name in tensors else "no such tensor"
            raise SparsityError(f"load_pretrained: {folder} holds {name} {tuple(value.shape)}; the model has {shape}")
    covered = {id(tensors[name]) for name in values}  # a tied tensor is written under one of its names
    missing = [name for name in model.state_dict() if name not in values and id(tensors[name]) not in covered]
    if missing:
        raise SparsityError(f"load_pretrained: {folder} holds no values of {', '.join(missing[:5])}")
    model.load_state_dict(values, strict=False)
    if generation is not None:
        vars(model)["generation_config"] = generation
    return model.eval()


def _weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of `model.safetensors`, or of all files that the index lists; further `model*` files raise."""
    from safetensors.torch import load_file

    single, index, where = folder / WEIGHTS, folder / INDEX, "load_pretrained: "
    if single.exists() == index.exists():
        both = "both" if single.exists() else "neither"
        raise SparsityError(f"{where}{folder} must hold either {WEIGHTS} or {INDEX}, but holds {both}")
    files, expected = {WEIGHTS}, WEIGHTS
    if index.exists():
        file_of = json.loads(index.read_text()).get("weight_map")
        if not (isinstance(file_of, dict) and all(Path(file).name == file for file in file_of.values())):
            raise SparsityError(f"{where}{INDEX} must map names to files of its folder under 'weight_map'")
        files, expected = {*file_of.values()}, f"those of {INDEX}"
    if unlisted := {file.name for file in folder.glob("model*.safetensors")} - files:
        raise SparsityError(
            f"{where}{folder} holds {min(unlisted)} beside {expected}; move away files that belong to another model"
        )
    if single.exists():
        return load_file(single)
    tensors: dict[str, Tensor] = {}
    for file in sorted(files):
        for name, tensor in load_file(folder / file).items():
            if file_of.get(name) != file:
                raise SparsityError(f"{where}{file} holds {name}, but {INDEX} names {file_of.get(name)} for it")
            tensors[name] = tensor
    if absent := file_of.keys() - tensors.keys():
        raise SparsityError(f"{where}{file_of[min(absent)]} does not hold {min(absent)}, although {INDEX} says so")
    return tensors


def load_folder(path: Path, offload_folder: str) -> Any:
    """Return the model of a folder or GGUF file, in eval mode."""
    try:
        import transformers
    except ImportError:
        raise SparsityError("the command needs transformers: pip install transformers") from None
    if not path.exists():
        raise SparsityError(f"there is no file or folder {path}")
    folder = path if path.is_dir() else path.parent
    keys: dict[str, Any] = {} if path.is_dir() else {"gguf_file": path.name}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **keys)
        name = (config.architectures or ["AutoModelForCausalLM" if keys else "AutoModel"])[0]
        model_class = getattr(transformers, name)
    except Exception as error:  # damaged and foreign files raise errors of many classes
        raise SparsityError(f"{path} is not a checkpoint that transformers reads: {error}") from error
    size, free = sum(file.stat().st_size for file in folder.glob("*.safetensors")), _free_memory()
    if not keys and not (folder / MANIFEST).exists() and size > free:
        keys = {"device_map": "auto", "max_memory": {"cpu": free // 2}, "offload_folder": offload_folder}
    return load_pretrained(folder, model_class, **keys).eval()


def load_tokenizer(path: Path, is_needed: bool) -> Any:
    """Return the tokenizer of a folder or GGUF file; None if it has none and none is needed."""
    from transformers import AutoTokenizer

    try:
        if path.is_dir():
            return AutoTokenizer.from_pretrained(path)
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # damaged and foreign files raise errors of many classes
        if is_needed:
            raise SparsityError(f"--data needs a tokenizer, and {path} has none: {error}") from error
        return None


def _free_memory() -> int:
    """The bytes of memory that are free, without psutil (which accelerate installs) as many as any model needs."""
    try:
        import psutil  # type: ignore[import-untyped]
    except ImportError:
        return sys.maxsize
    return psutil.virtual_memory().available
