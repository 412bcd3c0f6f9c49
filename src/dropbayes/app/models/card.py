"""The card of a model: a readable summary of its target, inputs, origin and scores."""

from __future__ import annotations

import html
import json
import re
from typing import Any

from dropbayes.estimators.columns.schema import Column, Schema

Origin = dict[str, Any]
"""The origin of a fit as JSON values: file, rows, settings, versions, scores, calibration."""


def range_text(column: Column) -> str:
    """The range of a column's values in the training rows.

    Example:
        >>> range_text(Column("a", "number", low=0.5, high=2.0))
        '0.5 to 2'
    """
    if column.kind == "category":
        return ", ".join(column.categories[:8]) + (", …" if len(column.categories) > 8 else "")
    if column.kind == "boolean":
        return "true or false"
    if column.low is None or column.high is None:
        return ""
    if column.kind == "date":
        import numpy as np

        return " to ".join(str(np.datetime64(int(day), "D")) for day in (column.low, column.high))
    return f"{column.low:.6g} to {column.high:.6g}"


def card(schema: Schema, origin: Origin, *, name: str) -> str:
    """The card as Markdown; `name` is that of the model's folder."""
    lines = [
        f"# {_escape(schema.target)}: a model of dropbayes",
        "",
        f"{schema.task.capitalize()} of {_escape(schema.target)} with uncertainty, by dropout networks.",
        "",
        "## Use",
        "",
        "```python",
        "import dropbayes as db",
        "",
        f"model = db.load({json.dumps(name)})",
        "model.predict(frame)  # a data frame with the columns below",
        "```",
        "",
        "## Columns",
        "",
        "| column | kind | training rows |",
        "|---|---|---|",
        *(f"| {_escape(c.name)} | {c.kind} | {_escape(range_text(c))} |" for c in schema.columns),
        *(f"| {_escape(name)} | left out | {_escape(reason)} |" for name, reason in schema.left_out.items()),
        "",
        "## Origin",
        "",
        *(f"- {name}: {value}" for name, value in _facts(origin).items()),
    ]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    """The text on one line, in which a reader of Markdown finds no HTML, link, code or cell."""
    return re.sub(r"([\\`\[|])", r"\\\1", html.escape(" ".join(text.splitlines()), quote=False))


def _facts(origin: Origin) -> dict[str, str]:
    facts = {"data": f"{_escape(origin.get('file', 'unknown'))}, {origin.get('n_rows', 0):,} rows"}
    for name in ("sha256", "command"):
        if name in origin:
            label = "SHA-256 of the data" if name == "sha256" else name
            text = _escape(str(origin[name]))
            facts[label] = f"`{origin[name]}`" if name == "command" and text == origin[name] else text
    for name in ("settings", "scores", "versions"):
        if origin.get(name):
            texts = {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in origin[name].items()}
            facts[name] = ", ".join(f"{key} {text}" for key, text in texts.items())
    if text := calibration_text(origin):
        facts["calibration"] = _escape(text)
    return facts


def calibration_text(origin: Origin) -> str:
    """How a model was calibrated, if it was."""
    if (calibration := origin.get("calibration")) is None:
        return ""
    factor = f", factor {calibration['values'][0]:.4g}" if calibration["method"] == "scale" else ""
    return f"{calibration['method']}{factor}, on {calibration['n_rows']:,} rows of {calibration['file']}"
