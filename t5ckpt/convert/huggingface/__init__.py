"""Converts a T5 between T5X's checkpoints and Hugging Face's directories of safetensors, without changing a bit."""

from __future__ import annotations

from t5ckpt.convert.huggingface.export import export_hf
from t5ckpt.convert.huggingface.import_ import import_hf

__all__ = ['export_hf', 'import_hf']
