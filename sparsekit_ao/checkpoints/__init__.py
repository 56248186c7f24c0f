"""Folders of transformers models: saved with masks, manifest and card, loaded, and their vocabularies made smaller."""

from .conversion import Conversion
from .masks import load_masks
from .pretrained import load_pretrained, save_pretrained
from .vocabulary import shrink_vocabulary

__all__ = ["Conversion", "load_masks", "load_pretrained", "save_pretrained", "shrink_vocabulary"]
