"""Qwen3-TTS without Ray and without HTTP: text to frames to PCM. Importable on any machine.

"Spec N" in docstrings is section N of `model/SPEC.md`: what the checkpoints hold and compute.
"""
