"""Save and convert masked or pruned models for use elsewhere: state dicts, files, formats of other libraries."""

from ..masking import dense_state_dict
from .gathered import GatheredLinear, to_gathered
from .lora import merge_lora
from .pretrained import load_masks, load_pretrained, save_pretrained
from .quantization import quantize
from .two_four import load_2_4, pack_2_4, to_2_4
from .weights import Conversion, ExportRow, LayerReport, check, report

__all__ = [
    "Conversion",
    "ExportRow",
    "GatheredLinear",
    "LayerReport",
    "check",
    "dense_state_dict",
    "load_2_4",
    "load_masks",
    "load_pretrained",
    "merge_lora",
    "pack_2_4",
    "quantize",
    "report",
    "save_pretrained",
    "to_2_4",
    "to_gathered",
]
