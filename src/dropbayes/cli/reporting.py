"""`dropbayes report`: a model's predictions against a table, as one page."""

from __future__ import annotations

import shlex
from typing import Any

import numpy as np

from dropbayes import folders
from dropbayes.cli.messages import count, note, out, print_json
from dropbayes.cli.predictions import targets, windows
from dropbayes.runtime.version import __version__
from dropbayes.tables import open_table, quoted, write_whole

__all__ = ["report"]


def report(
    model_path: str,
    data: str,
    *,
    output: str,
    title: str | None,
    n_draws: int | None,
    seed: int | None,
    delimiter: str | None,
    encoding: str | None,
    allow_new: bool,
    as_json: bool,
) -> None:
    """Writes a report; see `dropbayes report --help`."""
    model = folders.load(model_path).with_draws(n_draws=n_draws, seed=seed)
    xs: list[Any] = []
    ys: list[Any] = []
    n_absent = 0
    with open_table(data, delimiter=delimiter, encoding=encoding) as source:
        shown_columns: dict[str, list[Any]] = {name: [] for name in source.names if name != model.schema.target}
        for window in windows(model, source, block_rows=None, allow_new=allow_new, title="read", with_target=True):
            y, present = targets(model, window, source)
            n_absent += int((~present).sum())
            xs.append(window.x[present])
            ys.append(y[present])
            rows = window.table.filter(present)
            for name, values in shown_columns.items():
                values.extend(rows[name].to_pylist())
    x, y = np.concatenate(xs), np.concatenate(ys)
    if not len(x):
        raise ValueError(f"{source.label}, column {quoted(model.schema.target)}: no row has a value to score against.")
    if n_absent:
        note(f"{count(n_absent, 'row')} without a target left out.")
    from dropbayes.report import report as page

    y = y if model.schema.task == "regression" else model.estimator.classes_[y]
    html = page(
        model.estimator, x, y, target=model.schema.target, shown=shown_columns,
        title=title or f"{model.schema.target}: {source.label}",
        done=_done(model, source.label, len(x), model_path, data, output, n_draws, seed),
        n_draws=n_draws, seed=model.estimator.seed_ if seed is None else seed,
    )  # fmt: skip
    write_whole(output, html)
    if as_json:
        print_json({"model": str(model.path), "data": source.label, "n_rows": len(x), "output": output})
    elif output != "-":
        from rich.markup import escape

        out().print(f"report on {len(x):,} rows written to [bold]{escape(output)}[/bold]")


def _done(
    model: folders.Model, label: str, n_rows: int, model_path: str, data: str, output: str,
    n_draws: int | None, seed: int | None,
) -> dict[str, str]:  # fmt: skip
    """What the page says was done, in order."""
    command = ["dropbayes", "report", model_path, data, "-o", output]
    command += ["--n-draws", str(n_draws)] if n_draws is not None else []
    command += ["--seed", str(seed)] if seed is not None else []
    origin = model.origin
    versions = {"dropbayes": __version__, **origin.get("versions", {})}
    return {
        "data": f"{label}, {n_rows:,} rows",
        "model": f"{model.schema.task}, fitted on {origin['n_rows']:,} rows of {origin['file']}",
        "settings": ", ".join(f"{name}={value}" for name, value in origin.get("settings", {}).items()),
        "draws": f"{int(model.estimator.n_draws)} of each of {len(model.estimator.population_)} networks",
        "seed": str(model.estimator.seed_),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "command": shlex.join(command),
    }
