"""What the Grafana dashboard asks of Prometheus."""

import json
import re
from pathlib import Path

DASHBOARD = json.loads(
    (Path(__file__).parents[1] / "serve_configs" / "grafana" / "qwen3tts.json").read_text(encoding="utf-8")
)
OURS = "ray_qwen3tts_"


def expressions():
    """Every panel's PromQL, and the query of each variable."""
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    variables = DASHBOARD["templating"]["list"]
    return asked + [v["query"]["query"] for v in variables if v["type"] == "query"]


def metric_names():
    """Every metric that an expression names."""
    return {name for text in expressions() for name in re.findall(r"\b(?:ray|qwen3tts)_[a-z0-9_]+", text)}
