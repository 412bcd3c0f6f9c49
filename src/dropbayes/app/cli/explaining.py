r"""`dropbayes explain`: a model described, from its columns to its sites, and why it is unsure of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dropbayes import app
from dropbayes.app.cli import options
from dropbayes.app.cli.messages import bold, escaped, print_result, table
from dropbayes.runtime.formatting import plain_number

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import Tensor

    from dropbayes.app.cli.rows import Rows
    from dropbayes.runtime.arrays import NumpyArray


def explain(
    model: options.ModelFolder,
    data: Annotated[str | None, typer.Argument(metavar="[DATA]", help="A CSV or Parquet file of rows.")] = None,
    rows: Annotated[int, typer.Option(help="How many rows to explain: those it is least sure of.", min=1)] = 5,
    background: Annotated[
        str | None, options.file(help="Rows to compare with, such as those of training; by default their mean alone.")
    ] = None,
    allow_new: options.AllowNew = False,
    delimiter: options.Delimiter = None,
    encoding: options.Encoding = None,
    as_json: options.Json = False,
) -> None:
    """Describe a model, or say why it predicts what it does.

    Without rows: the columns with their ranges, the sizes of the networks, drop probabilities, precision and
    length-scales.

    With rows: for each column what it adds to the prediction, and its share of the epistemic variance (for classes, of
    the mutual information), against typical rows.
    """
    fitted = app.load(model)
    if data is None:
        about = facts(fitted)
        print_result({"model": str(fitted.path), **about}, _lines(fitted, about), as_json=as_json)
        return
    from dropbayes.app.cli.rows import joined_rows, windows
    from dropbayes.app.tables import open_table

    def read(table: str, title: str) -> Rows:
        with open_table(table, delimiter=delimiter, encoding=encoding) as source:
            return joined_rows(windows(fitted, source, allow_new=allow_new, title=title))

    typical = None if background is None else read(background, "background").encoded.x
    given = read(data, "read")
    found = reasons(fitted, given.encoded.x, typical, n_rows=rows)
    for one in found:
        one["place"] = given.place(one["row"])
        for name, part in one["columns"].items():
            part["value"] = str(given.table[name][one["row"]].as_py())
    result = {"model": str(fitted.path), "target": fitted.schema.target, "rows": found}
    print_result(result, _reason_lines(fitted, found), as_json=as_json)


def reasons(
    model: app.Model, x: NumpyArray, background: NumpyArray | None = None, *, n_rows: int = 5
) -> list[dict[str, Any]]:
    """Why a model predicts what it does and why it is unsure, for the rows it is least sure of.

    Both are Shapley values of the columns against the background, by default the mean of the training rows.
    """
    import torch

    from dropbayes.app.models.fields import check_finite
    from dropbayes.app.models.predictor import Predictor, location
    from dropbayes.linear import shapley

    predictor, columns = Predictor(model), model.schema.columns
    answers = ("mean", "epistemic") if predictor.classes is None else ("probabilities", "mutual_information")

    def values(inputs: Tensor) -> Tensor:
        """The prediction, for classes the probability of each, and last what the model does not know of it."""
        found = predictor.predict_inputs(inputs.numpy())
        check_finite(found, location)
        return torch.cat([torch.from_numpy(found[name]).view(len(inputs), -1) for name in answers], 1)

    inputs = torch.from_numpy(x)
    every = values(inputs)
    rows = every[:, -1].argsort(descending=True, stable=True)[:n_rows]
    mean = model.ensemble.population_.x_mean[:1, : x.shape[1]].double().cpu()
    owners = torch.tensor([number for number, column in enumerate(columns) for _ in column.inputs])
    typical = mean if background is None else torch.from_numpy(background)
    found = []
    for row, shares in zip(rows.tolist(), shapley(values, inputs[rows], typical, columns=owners), strict=True):
        best = int(every[row, :-1].argmax())
        stated, typically, *parts = (
            {"prediction": float(numbers[best]), "uncertainty": float(numbers[-1])}
            for numbers in (every[row], every[row] - shares.sum(0), *shares)
        )
        label = {} if predictor.classes is None else {"predicted": str(predictor.classes[best])}
        named = dict(zip((column.name for column in columns), parts, strict=True))
        found.append({"row": row, **label, **stated, "typical": typically, "columns": named})
    return found


def _reason_lines(model: app.Model, found: list[dict[str, Any]]) -> Iterator[RenderableType]:
    for one in found:
        answer = f"{plain_number(one['prediction'])}, epistemic deviation {plain_number(one['uncertainty'] ** 0.5)}"
        if "predicted" in one:
            doubt = f"mutual information {plain_number(one['uncertainty'])}"
            answer = f"{one['predicted']} with probability {plain_number(one['prediction'])}, {doubt}"
        parts = sorted(one["columns"].items(), key=lambda named: -named[1]["uncertainty"])
        lines = []
        for name, part in [*parts, ("(typical rows)", {**one["typical"], "value": ""})]:
            share = part["uncertainty"] / (one["uncertainty"] or 1.0)
            adds = f"{part['prediction']:+.4g}"
            lines.append([name, part["value"], adds, f"{round(100 * share)} %", "█" * round(20 * share)])
        heads = ["column", "value", "adds to the prediction", "share of the uncertainty", ""]
        yield table(f"{one['place']}: {model.schema.target} {answer}", heads, lines, numbers=(2, 3))
        yield ""


def facts(model: app.Model) -> dict[str, Any]:
    r"""The numbers that define a model.

    The weight decay λ stands beside half the mean squared error of standardised targets (for classes, beside the mean
    negative log-likelihood: τ = 1). With N rows and the precision τ in standardised units, the prior length-scale it
    amounts to is $l = \sqrt{2 N \lambda \tau / p}$, the inverse of [GG16, eq:weightdecay_tau_relation].
    """
    from dropbayes.app.models.storage import range_text

    estimator, population, schema = model.ensemble, model.ensemble.population_, model.schema
    best = max(map(float, estimator.search_scores_), default=math.nan)
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
        "held_out_log_likelihood": best if math.isfinite(best) else None,
        "origin": model.origin,
    }
    if schema.task == "classification":
        return about | {"classes": [str(label) for label in estimator.classes_]}
    precision = None if estimator.noise == "heteroscedastic" else float(population.precision[0, 0])
    return about | {"noise": estimator.noise, "target_transform": estimator.transform_.name, "precision": precision}


def _layers(model: app.Model) -> list[dict[str, Any]]:
    """The weight layers of the first network, each with the site before it; no site where nothing is dropped."""
    from dropbayes.population import network

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


def _lines(model: app.Model, about: dict[str, Any]) -> Iterator[RenderableType]:
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


def _properties(model: app.Model, about: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from dropbayes.app.models.storage import calibration_text

    sizes = "-".join(str(n) for n in (len(model.schema.inputs), *about["hidden"], about["layers"][-1]["n_outputs"]))
    n_networks, n_draws = about["n_networks"], about["n_draws"]
    yield "networks", f"{n_networks} of {sizes}, {about['activation']}; {about['n_weights']:,} weights each"
    yield "draws", f"{n_draws} per prediction, {n_draws // n_networks} of each network"
    if about["task"] == "classification":
        yield "classes", ", ".join(about["classes"])
    elif about["noise"] == "student":
        yield "noise", "Student's t, its scale depends on the input"
    elif about["noise"] == "heteroscedastic":
        yield "noise", "heteroscedastic: Gaussian, its variance depends on the input"
    if about.get("target_transform", "none") != "none":
        yield "learned", f"{model.ensemble.transform_.unit}; noise and precision are in its scale"
    if (precision := about.get("precision")) is not None:
        yield "precision τ", f"{plain_number(precision)}: noise of standard deviation {plain_number(precision**-0.5)}"
    yield "training rows N", f"{about['n_data']:,}"
    if about["held_out_log_likelihood"] is not None:
        yield "held-out log-likelihood", f"{plain_number(about['held_out_log_likelihood'])} nats per row"
    if text := calibration_text(model.origin):
        yield "calibration", text
