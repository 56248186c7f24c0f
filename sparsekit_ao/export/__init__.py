"""Save and convert masked or pruned models for use elsewhere: state dicts, files, formats of other libraries."""

from ..checkpoints import Conversion, load_masks, load_pretrained, save_pretrained
from ..masking import dense_state_dict
from .lora import merge_lora
from .quantization import quantize
from .two_four import to_2_4
from .weights import ExportRow, LayerReport, check, report

__all__ = ["Conversion", "ExportRow", "LayerReport", "check", "dense_state_dict", "load_masks", "load_pretrained"]
__all__ += ["merge_lora", "quantize", "report", "save_pretrained", "to_2_4"]
