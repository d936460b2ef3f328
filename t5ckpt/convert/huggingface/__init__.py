"""Converts a T5 between T5X's checkpoints and Hugging Face's directories of safetensors, without changing a bit."""
