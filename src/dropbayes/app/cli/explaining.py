r"""The texts of the commands: a table before a fit, the model after it, and why a model predicts what it does.

The commands, whose options are read without any of this, import it when they are called.
"""

import importlib.metadata
import itertools
import math
import shlex
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from rich.console import RenderableType
from torch import Tensor

from dropbayes.app.cli.messages import bold, escaped, note, table
from dropbayes.app.cli.rows import Rows, filled_value
from dropbayes.app.models.fields import EnsembleFields
from dropbayes.app.models.model import Model
from dropbayes.app.models.predictor import location
from dropbayes.app.models.storage import calibration_text, range_text
from dropbayes.app.tables.training import TrainingRows
from dropbayes.estimators.columns import Cells, Column
from dropbayes.estimators.columns.dates import date_inputs
from dropbayes.estimators.columns.notation import PLAIN
from dropbayes.estimators.columns.schema import column_values
from dropbayes.estimators.ensembles import check_finite
from dropbayes.linear import shapley
from dropbayes.population import network
from dropbayes.predictive import Mixture
from dropbayes.predictive.scoring import ClassOutcomes, RegressionOutcomes, ScoreValue, score_values
from dropbayes.runtime import __version__
from dropbayes.runtime.formatting import count, plain_number
from dropbayes.runtime.validation import NumpyArray


def column_lines(rows: TrainingRows) -> Iterator[RenderableType]:
    schema = rows.schema
    reason = "a numeric target"
    if schema.task == "classification":
        classes = sorted({str(label) for label in rows.y})
        reason = f"{len(classes)} classes: {_abbreviated_list(classes)}"
    elif schema.target_notation != PLAIN:
        reason = f"a numeric target, written as {schema.target_notation.example}"
    yield f"{bold(schema.task)} of {bold(schema.target)} ({escaped(reason)})"
    sizes = [count(len(rows.x), "row"), count(len(schema.columns), "column"), count(len(schema.inputs), "input")]
    dropped = f"; {count(rows.n_dropped, 'row')} without a target dropped" if rows.n_dropped else ""
    yield f"{', '.join(sizes)}{dropped}\n"
    missing = {name: f"{n:,}" for name, n in rows.missing.items() if n}
    lines = [[c.name, c.kind, str(len(c.inputs)), missing.get(c.name, ""), _read(c)] for c in schema.columns]
    lines += [[name, "left out", "0", "", reason] for name, reason in schema.left_out.items()]
    shown: list[list[str]] = []
    for _, run in itertools.groupby(lines, key=lambda line: line[1:]):
        alike = list(run)
        if len(alike) > 20:  # neighbouring columns that are read alike stand in one line
            name = f"{alike[0][0]} to {alike[-1][0]}, {len(alike):,} columns"
            alike = [[name, alike[0][1], f"{sum(int(line[2]) for line in alike):,}", *alike[0][3:]]]
        shown += alike
    yield table("", ["column", "kind", "inputs", "missing", "how it is read"], shown[:60], numbers=(2, 3))
    if len(shown) > 60:
        yield f"… and {len(shown) - 60:,} more lines; `dropbayes explain` lists every column"
    yield ""


def _read(column: Column) -> str:
    """How a column is read, in words."""
    if column.kind == "category":
        texts = f"one input for each of {len(column.categories)}: {_abbreviated_list(list(column.categories))}"
        return texts + ("; one for missing" if column.flagged else "")
    how = "" if column.notation == PLAIN else f"numbers written as {column.notation.example}"
    if column.kind == "date":
        how = f"dates as {', '.join(column.parts)}"
    if not column.flagged:
        return how or "as it is"
    median = "" if column.kind == "boolean" else "the median "
    return f"{how}{'; ' if how else ''}missing taken as {median}{filled_value(column)}, and flagged"


def _abbreviated_list(texts: list[str]) -> str:
    return ", ".join(texts[:4]) + (", …" if len(texts) > 4 else "")


def note_target(rows: TrainingRows, task: str | None) -> None:
    """Notes on a target that is probably not what it seems, or too rare to learn."""
    name = rows.schema.target
    distinct, counts = np.unique(rows.y, return_counts=True)
    if rows.schema.task == "classification":
        if task is None and distinct.tolist() == ["0", "1"]:
            note(f"{name!r} holds 0 and 1, which are classes; to predict a number use --task regression.")
        if rare := [str(label) for label, n in zip(distinct, counts, strict=True) if n < 5]:
            note(f"fewer than 5 rows of {_abbreviated_list(rare)}: their probabilities cannot be learned well.")
    elif len(distinct) <= min(10, len(rows.y) / 2) and np.all(distinct == np.round(distinct)):
        note(f"{name!r} has only {len(distinct)} whole values; if they are classes use --task classification.")


def result_lines(model: Model, found: dict[str, Any]) -> Iterator[str]:
    estimator, population = model.ensemble, model.ensemble.population_
    each = [f"{drop_prob:.4g}" for drop_prob in population.drop_prob[0].tolist()]
    n_tried = len(estimator.search_scores_)
    tried = f" (the best of {n_tried} on held-out rows)" if n_tried > 1 else ""
    drop = each[0] if len(set(each)) == 1 else ", ".join(each)
    yield f"drop probability {drop}; weight decay {population.members[0].weight_decay:g}{tried}"
    yield f"{count(len(population), 'network')}, {count(int(estimator.n_draws), 'draw')} of each per prediction"
    if found.get("noise") == "constant":
        precision = estimator.precision_
        yield f"noise: standard deviation {plain_number(precision**-0.5)} (precision τ = {plain_number(precision)})"
    if found.get("target_transform", "none") != "none":
        yield f"learned: {estimator.transform_.unit}"
    if found["held_out_log_likelihood"] is not None:
        of = "target's own distribution" if model.schema.task == "regression" else "class shares"
        baseline = f"{plain_number(estimator.baseline_score_)} of the {of} alone"
        yield f"held-out log-likelihood {plain_number(found['held_out_log_likelihood'])} nats per row ({baseline})"
    yield f"\nwritten to {bold(found['model'])} after {found['seconds']:.1f} s of training"


def note_settings(model: Model) -> None:
    """Notes on settings of the fit that a user would change."""
    if not bool((model.ensemble.population_.drop_prob > 0).any()):
        note("nothing is dropped, so that draws differ only between networks; the epistemic variance is too small.")
    for name, value in model.ensemble.search_edges_.items():
        is_drop = name == "drop_prob"
        factor, words = (2, "drop probability") if is_drop else (10, name.replace("_", " "))
        beyond = ",".join(f"{v:g}" for v in (value / factor, value, value * factor) if v < 1 or not is_drop)
        option = name.replace("_", "-")
        note(f"the best {words}, {value:g}, is at the edge of those tried; --{option} {beyond} tries beyond it.")


def note_order(model: Model, rows: TrainingRows, cells: pa.Table) -> None:
    """Notes on rows that resemble their neighbours, of which folds of single rows say too much good."""
    from sklearn.base import clone

    for column in rows.schema.columns:
        if column.kind not in ("number", "date") or len(rows.x) < 50:
            continue
        values = column_values(column, Cells(cells[column.name], column.name, str, rows.schema.missing))[rows.kept]
        steps = np.diff(values)
        n_distinct, n_runs = len(np.unique(values)), 1 + int((steps != 0).sum())
        in_order = bool((steps >= 0).all() or (steps <= 0).all())
        counts_time = column.kind == "date" or column.name.casefold() in ("year", "time", "t", "trend")
        if in_order and n_distinct > 2 and (counts_time or np.allclose(steps, steps[0], rtol=0.1, atol=0.0)):
            # Networks with the settings of the fit, scored on random folds and on those that follow what was learned.
            settings = {"hidden": model.ensemble.hidden_, "drop_prob": model.ensemble.drop_prob_}
            probes = [clone(model.ensemble).set_params(**settings, n_networks=1, verbose=False) for _ in range(2)]
            with warnings.catch_warnings(action="ignore"):  # what they warn of is not true of the model
                for probe, times in zip(probes, (None, np.unique(values, return_inverse=True)[1]), strict=True):
                    probe.fit(rows.x, rows.y, sample_weight=rows.weight, times=times)
            at_random, forward = (float(max(probe.search_scores_)) for probe in probes)
            if forward < at_random - 0.1:
                fault = f"the rows are in order of {column.name!r}: held out at random they score"
                scores = f"{plain_number(at_random)} nats per row, held out after those learned from"
                remedy = f"to predict rows that come later, fit with --time {shlex.quote(column.name)}"
                note(f"{fault} {scores} {plain_number(forward)}; {remedy}.")
            return
        if column.kind == "number" and n_distinct == n_runs and 10 <= n_distinct <= len(values) / 2:
            each = plain_number(len(values) / n_distinct, digits=2)
            fault = f"{column.name!r} repeats in runs: {n_distinct:,} values of about {each} rows"
            remedy = f"fit with --group {shlex.quote(column.name)} to hold them out together"
            note(f"{fault}; if rows of one value belong together, {remedy}.")
            return


def facts(model: Model) -> dict[str, Any]:
    r"""The numbers that define a model.

    The weight decay λ stands beside half the mean squared error of standardised targets (for classes, beside the mean
    negative log-likelihood: τ = 1). With N rows and the precision τ in standardised units, the prior length-scale it
    amounts to is $l = \sqrt{2 N \lambda \tau / p}$, the inverse of [GG16, eq:weightdecay_tau_relation].
    """
    estimator, population, schema = model.ensemble, model.ensemble.population_, model.schema
    score = getattr(estimator, "held_out_score_", math.nan)
    about = {
        "task": schema.task,
        "target": schema.target,
        "n_data": int(model.origin["n_rows"]),
        "n_networks": len(population),
        "n_draws": int(estimator.n_draws) * len(population),
        "hidden": list(estimator.hidden_),
        "activation": population.activation,
        "n_weights": sum(parameter[0].numel() for parameter in (*population.weights, *population.biases)),
        "layers": _layers(model),
        "columns": [
            {"name": c.name, "kind": c.kind, "inputs": list(c.inputs), "training_rows": range_text(c)}
            for c in schema.columns
        ],
        "left_out": schema.left_out,
        "held_out_log_likelihood": score if math.isfinite(score) else None,
        "origin": model.origin,
    }
    if schema.task == "classification":
        return about | {"classes": [str(label) for label in estimator.classes_]}
    precision = None if estimator.noise == "heteroscedastic" else float(population.precision[0, 0])
    return about | {"noise": estimator.noise, "target_transform": estimator.transform_.name, "precision": precision}


def _layers(model: Model) -> list[dict[str, Any]]:
    """The weight layers of the first network, each with the site before it; no site where nothing is dropped."""
    population, n_data = model.ensemble.population_, int(model.origin["n_rows"])
    has_precision = model.schema.task == "regression" and model.ensemble.noise != "heteroscedastic"
    precision = float(population.precision[0, 0] * population.y_scale[0, 0] ** 2) if has_precision else 1.0
    decay = float(population.members[0].weight_decay)
    modules: list[Any] = list(network(population, 0).named_children())  # dropout, linear, activation, dropout ...
    return [
        {
            "site": path if dropout.p else None,
            "kind": "dropout" if dropout.p else None,
            "drop_prob": dropout.p,
            "weight_layer": name,
            "n_inputs": layer.in_features,
            "n_outputs": layer.out_features,
            "weight_decay": decay,
            "length_scale": math.sqrt(2 * n_data * decay * precision / (1 - dropout.p)),
        }
        for (path, dropout), (name, layer) in zip(modules[::3], modules[1::3], strict=True)
    ]


def model_lines(model: Model, about: dict[str, Any]) -> Iterator[RenderableType]:
    file = escaped(model.origin.get("file", "a table"))
    yield f"{bold(about['task'])} of {bold(about['target'])}, fitted on {about['n_data']:,} rows of {file}\n"
    yield table("", ["what", "value"], _properties(model, about))
    yield ""
    layers = []
    for i, layer in enumerate(about["layers"], start=1):
        sizes, prior = f"{layer['n_inputs']} → {layer['n_outputs']}", (layer["weight_decay"], layer["length_scale"])
        dropped = layer["kind"] or "nothing", f"{layer['drop_prob']:.4g}"
        layers.append([str(i), *dropped, sizes, *(f"{value:.3g}" for value in prior)])
    heads = ["before layer", "dropped by", "drop probability", "sizes", "weight decay λ", "length-scale l"]
    yield table("Sites: where a draw is random", heads, layers, numbers=(0, 2, 4, 5))
    yield ""
    columns = [[c["name"], c["kind"], str(len(c["inputs"])), c["training_rows"]] for c in about["columns"]]
    columns += [[name, "left out", "0", reason] for name, reason in about["left_out"].items()]
    heads = ["column", "kind", "inputs", "values in the training rows"]
    yield table("Columns: what it reads", heads, columns, numbers=(2,))


def _properties(model: Model, about: dict[str, Any]) -> Iterator[tuple[str, str]]:
    sizes = "-".join(str(n) for n in (len(model.schema.inputs), *about["hidden"], about["layers"][-1]["n_outputs"]))
    n_networks, n_draws = about["n_networks"], about["n_draws"]
    yield "networks", f"{n_networks} of {sizes}, {about['activation']}; {about['n_weights']:,} weights each"
    yield "draws", f"{n_draws} per prediction, {n_draws // n_networks} of each network"
    if about["task"] == "classification":
        yield "classes", ", ".join(about["classes"])
    noise = {"student": "Student's t, its scale", "heteroscedastic": "heteroscedastic: Gaussian, its variance"}
    if about.get("noise") in noise:
        yield "noise", f"{noise[about['noise']]} depends on the input"
    if about.get("target_transform", "none") != "none":
        yield "learned", f"{model.ensemble.transform_.unit}; noise and precision are in its scale"
    if (precision := about.get("precision")) is not None:
        yield "precision τ", f"{plain_number(precision)}: noise of standard deviation {plain_number(precision**-0.5)}"
    yield "training rows N", f"{about['n_data']:,}"
    if about["held_out_log_likelihood"] is not None:
        yield "held-out log-likelihood", f"{plain_number(about['held_out_log_likelihood'])} nats per row"
    if text := calibration_text(model.origin):
        yield "calibration", text


def ranges(model: Model) -> dict[str, tuple[float, float]]:
    """The ends of each number, and of each date as a decimal year."""
    ranges = {}
    for column in model.schema.columns:
        if column.kind in ("number", "date") and column.low is not None and column.high is not None:
            ends = np.array([column.low, column.high])
            low, high = date_inputs(ends, ("year",))[:, 0] if column.kind == "date" else ends
            ranges[column.name] = (float(low), float(high))
    return ranges


def provenance(model: Model, data: str, command: str) -> dict[str, str]:
    """The origin of the page, in the order of what was done."""
    origin = model.origin
    versions = {**origin.get("versions", {}), "dropbayes": __version__}
    n_draws, n_networks = int(model.ensemble.n_draws), len(model.ensemble.population_)
    facts = {
        "data": data,
        "model": f"{model.schema.task}, fitted on {origin['n_rows']:,} rows of {origin['file']}",
        "SHA-256 of the training data": origin.get("sha256", ""),
        "settings": ", ".join(f"{name}={value}" for name, value in origin.get("settings", {}).items()),
        "calibration": calibration_text(origin),
        "draws": f"{n_draws} from " + ("one network" if n_networks == 1 else f"each of {n_networks} networks"),
        "seed of the draws": str(model.ensemble.seed_),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "to fit": origin.get("command", ""),
        "to repeat": command,
    }
    return {name: text for name, text in facts.items() if text}


def versions() -> dict[str, str]:
    others = ("torch", "numpy", "scikit-learn", "pyarrow")
    return {"dropbayes": __version__, **{name: importlib.metadata.version(name) for name in others}}


def scores_of(columns: Mapping[str, NumpyArray]) -> tuple[dict[str, ScoreValue], dict[str, float]]:
    """The scores that are shown, and their values for a prediction that is the same for every row."""
    also: tuple[str, ...] = ("balanced_accuracy", "class_auroc")
    if "labels" in columns:
        labels, probabilities = columns["labels"], columns["probabilities"]
        shares = np.bincount(labels, minlength=probabilities.shape[1]) / len(labels)
        of_sets = ("set_coverage", "set_size") if "sets" in columns else ()
        values = score_values(ClassOutcomes(labels, probabilities, sets=columns.get("sets")), (*also, *of_sets))
        constant = score_values(ClassOutcomes(labels, np.tile(shares, (len(labels), 1))), also)
    else:
        also, y = ("interval_width", "interval_score", "crps"), torch.from_numpy(columns["y"])
        rows: dict[str, Any] = {name: columns[name] for name in columns if name not in ("epistemic", "aleatoric")}
        values, constant, spread = score_values(RegressionOutcomes(**rows), also), {}, y.std(correction=0)
        if spread > 0:
            rows = RegressionOutcomes.columns(Mixture(y.mean().expand(1, len(y)), spread), y, ranked=slice(None))
            constant = score_values(RegressionOutcomes(**rows), also)
    return values, {name: one.value for name, one in constant.items()}


def _typical_row(model: Model) -> NumpyArray:
    """The medians and the most frequent categories of the training rows: their mean lies between all of them."""
    shares, row = iter(model.ensemble.population_.x_mean[0].tolist()), list[float]()
    for column in model.schema.columns:
        own = list(itertools.islice(shares, len(column.inputs)))
        if column.kind == "category":  # which may be the missing one
            row += np.eye(len(own))[np.argmax(own)].tolist()
        else:
            fill = np.array([column.fill])
            row += [*(date_inputs(fill, column.parts)[0] if column.kind == "date" else fill)]
            row += [float(own[-1] > 0.5)] * column.flagged
    return np.array([row])


def reasons(model: Model, given: Rows, background: NumpyArray | None, *, n_rows: int) -> list[dict[str, Any]]:
    """Why a model predicts what it does and why it is unsure, for the rows it is least sure of.

    Both are Shapley values of the columns against the background, by default one typical row.
    """
    fields, columns = EnsembleFields(model), model.schema.columns
    answers = ("mean", "epistemic") if fields.classes is None else ("probabilities", "mutual_information")

    def values(inputs: Tensor) -> Tensor:
        """The prediction, for classes the probability of each, and last what the model does not know of it."""
        blocks = [fields(some.numpy(), fields.n_draws, fields.seed, 0.0, "sampling") for some in inputs.split(2048)]
        found = {name: np.concatenate([block[name] for block in blocks]) for name in answers}
        check_finite(found, location)
        return torch.cat([torch.from_numpy(found[name]).view(len(inputs), -1) for name in answers], 1)

    every = values(x := torch.from_numpy(given.encoded.x))
    rows = every[:, -1].argsort(descending=True, stable=True)[:n_rows]
    owners = torch.tensor([number for number, column in enumerate(columns) for _ in column.inputs])
    typical = torch.from_numpy(_typical_row(model) if background is None else background)
    found = []
    with warnings.catch_warnings(action="ignore"):  # rows that are put together may be far from those of training
        attributed = shapley(values, x[rows], typical, columns=owners)
    for row, shares in zip(rows.tolist(), attributed, strict=True):
        best = int(every[row, :-1].argmax())
        kinds = every[row], every[row] - shares.sum(0), *shares
        stated, typically, *parts = ({"prediction": float(one[best]), "uncertainty": float(one[-1])} for one in kinds)
        label = {} if fields.classes is None else {"predicted": str(fields.classes[best])}
        cells = {column.name: str(given.table[column.name][row].as_py()) for column in columns}
        named = {name: {**part, "value": cell} for (name, cell), part in zip(cells.items(), parts, strict=True)}
        found.append({"row": row, **label, **stated, "typical": typically, "columns": named, "place": given.place(row)})
    return found


def reason_lines(model: Model, found: list[dict[str, Any]]) -> Iterator[RenderableType]:
    for one in found:
        answer = f"{plain_number(one['prediction'])}, epistemic deviation {plain_number(one['uncertainty'] ** 0.5)}"
        if "predicted" in one:
            doubt = f"mutual information {plain_number(one['uncertainty'])}"
            answer = f"{one['predicted']} with probability {plain_number(one['prediction'])}, {doubt}"
        parts = sorted(one["columns"].items(), key=lambda named: -named[1]["uncertainty"])
        parts.append(("(typical rows)", {**one["typical"], "value": ""}))
        longest = max(one["uncertainty"], *(part["uncertainty"] for _, part in parts)) or 1.0
        lines = []
        for name, part in parts:
            share, bar = part["uncertainty"] / (one["uncertainty"] or 1.0), round(20 * part["uncertainty"] / longest)
            lines.append([name, part["value"], f"{part['prediction']:+.4g}", f"{round(100 * share)} %", "█" * bar])
        heads = ["column", "value", "adds to the prediction", "share of the uncertainty", ""]
        yield table(f"{one['place']}: {model.schema.target} {answer}", heads, lines, numbers=(2, 3))
        yield ""
