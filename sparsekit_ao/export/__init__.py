"""A masked or pruned model for use elsewhere: dense state dicts, files, formats of other libraries."""

from ..masking import dense_state_dict
from ..removal.results import Conversion
from .check import check
from .compacted_files import load_pretrained
from .coreml import coreml_metadata
from .fbgemm import fbgemm, load_fbgemm
from .openvino import openvino
from .pretrained import load_masks, merge_lora, save_pretrained
from .quantization import quantize
from .report import LayerReport, LayerRow, report
from .sparse_file import load_sparse, save_sparse
from .two_four import load_2_4, pack_2_4

__all__ = [
    "Conversion",
    "LayerReport",
    "LayerRow",
    "check",
    "coreml_metadata",
    "dense_state_dict",
    "fbgemm",
    "load_2_4",
    "load_fbgemm",
    "load_masks",
    "load_pretrained",
    "load_sparse",
    "merge_lora",
    "openvino",
    "pack_2_4",
    "quantize",
    "report",
    "save_pretrained",
    "save_sparse",
]
