"""What the README says is so: its commands, fields, keys and files exist, and none is left out."""

import re
from pathlib import Path

from deployments.app import AppArgs
from deployments.schemas import SpeechBody

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)[1]


def first_column(text):
    """The names in the first column of every table row, `…_x` spelled out after the name before it."""
    names = []
    for cell in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", cell):
            prefix = names[-1].split("_")[0] if name.startswith("…") else ""
            names.append(prefix + name.removeprefix("…"))
    return names


def test_every_command_is_a_verb_of_the_makefile():
    verbs = set(re.findall(r"^([a-z0-9-]+):.*##", MAKEFILE, re.MULTILINE))
    used = set(re.findall(r"\bmake ([a-z][a-z0-9-]*)", README)) - {"alone"}
    assert {"serve", "test"} <= used <= verbs


def test_the_api_table_has_every_field_once():
    assert sorted(first_column(section("API"))) == sorted(SpeechBody.model_fields)


def test_the_configuration_table_has_every_key_once():
    assert sorted(first_column(section("Configuration"))) == sorted(AppArgs.model_fields)


def test_every_picture_it_shows_is_there_and_small():
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert pictures
    for picture in pictures:
        assert 1_000 < (ROOT / picture).stat().st_size < 300_000, picture


def test_every_file_it_names_exists():
    known = {
        path.name
        for folder in ("deployments", "qwen3tts_core", "serve_configs", "tests")
        for path in (ROOT / folder).rglob("*")
    }
    for name in re.findall(r"\b([a-z_]+\.(?:py|yaml))\b", README):
        assert name in known, name
