"""Qwen3-TTS without Ray and without HTTP: text to frames to PCM. Importable on any machine."""
