r"""`dropbayes explain`: what a model is, from its columns to its sites."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from dropbayes.app.cli.messages import number, out, print_json, table
from dropbayes.app.models.card import range_text
from dropbayes.app.models.model import Model, load
from dropbayes.population import network
from dropbayes.sampling import sites

_NOISE_WORDS = {
    "student": "Student's t, its scale depends on the input",
    "heteroscedastic": "heteroscedastic: Gaussian, its variance depends on the input",
}

__all__ = ["explain", "facts"]


def explain(model_path: str, *, as_json: bool) -> None:
    """Describes a model; see `dropbayes explain --help`."""
    model = load(model_path)
    about = facts(model)
    if as_json:
        print_json({"model": str(model.path), **about})
    else:
        _show(model, about)


def facts(model: Model) -> dict[str, Any]:
    r"""The numbers that define a model.

    The weight decay λ stands beside half the mean squared error of standardised targets (for classes, beside the mean
    negative log-likelihood: τ = 1). With N rows and the precision τ in standardised units, the prior length-scale it
    amounts to is $l = \sqrt{2 N \lambda \tau / p}$, the inverse of [GG16, eq:weightdecay_tau_relation].
    """
    estimator, population = model.ensemble, model.ensemble.population_
    n_data = int(model.origin["n_rows"])
    net = network(population, 0).eval()
    example = torch.zeros(
        1, population.weights[0].shape[1], dtype=population.weights[0].dtype, device=population.device
    )
    layers = []
    regression = model.schema.task == "regression"
    has_precision = regression and estimator.noise != "heteroscedastic"
    standard = float(population.precision[0, 0] * population.y_scale[0, 0] ** 2) if has_precision else 1.0
    decay = float(population.members[0].weight_decay)
    found_sites = {site.before: site for site in sites(net, example)}
    for name, layer in net.named_children():
        if isinstance(layer, nn.Linear):
            site = found_sites.get(name)  # none where nothing is dropped
            drop_prob = 0.0 if site is None else float(site.drop_prob or 0.0)
            layers.append({
                "site": None if site is None else site.path, "kind": None if site is None else site.kind,
                "drop_prob": drop_prob, "weight_layer": name,
                "n_inputs": layer.in_features, "n_outputs": layer.out_features, "weight_decay": decay,
                "length_scale": math.sqrt(2 * n_data * decay * standard / (1 - drop_prob)),
            })  # fmt: skip
    about: dict[str, Any] = {
        "task": model.schema.task,
        "target": model.schema.target,
        "n_data": n_data,
        "n_networks": len(population),
        "n_draws": int(estimator.n_draws) * len(population),
        "hidden": list(estimator.hidden_),
        "activation": population.activation,
        "n_weights": sum(
            w[0].numel() + b[0].numel() for w, b in zip(population.weights, population.biases, strict=True)
        ),
        "layers": layers,
        "columns": [
            {"name": c.name, "kind": c.kind, "inputs": list(c.inputs), "training_rows": range_text(c)}
            for c in model.schema.columns
        ],
        "left_out": model.schema.left_out,
        "held_out_log_likelihood": float(estimator.search_scores_.max()) if len(estimator.search_scores_) else None,
        "origin": model.origin,
    }
    if regression:
        about["noise"] = estimator.noise
        about["target_transform"] = estimator.transform_.name
        about["precision"] = float(population.precision[0, 0]) if has_precision else None
    else:
        about["classes"] = [str(label) for label in estimator.classes_]
    return about


def _show(model: Model, about: dict[str, Any]) -> None:
    from rich.markup import escape

    console = out()
    sizes = "-".join(str(n) for n in (len(model.schema.inputs), *about["hidden"], about["layers"][-1]["n_outputs"]))
    console.print(f"[bold]{about['task']}[/bold] of [bold]{escape(about['target'])}[/bold]", end="")
    console.print(f", fitted on {about['n_data']:,} rows of {escape(str(model.origin.get('file', 'a table')))}\n")
    rows = [
        [
            "networks",
            f"{about['n_networks']} of {sizes}, {about['activation']}; {about['n_weights']:,} weights each",
        ],
        [
            "draws",
            f"{about['n_draws']} per prediction, {about['n_draws'] // about['n_networks']} of each network",
        ],
    ]
    if about["task"] == "classification":
        rows.append(["classes", ", ".join(about["classes"])])
    elif about["noise"] in _NOISE_WORDS:
        rows.append(["noise", _NOISE_WORDS[about["noise"]]])
    if about.get("target_transform", "none") != "none":
        rows.append(["learned", f"{model.ensemble.transform_.unit}; noise and precision are in its scale"])
    if about.get("precision") is not None:
        rows.append(
            [
                "precision τ",
                f"{number(about['precision'])}: noise of standard deviation {number(about['precision'] ** -0.5)}",
            ]
        )
    rows.append(["training rows N", f"{about['n_data']:,}"])
    if about["held_out_log_likelihood"] is not None:
        rows.append(["held-out log-likelihood", f"{number(about['held_out_log_likelihood'])} nats per row"])
    if "calibration" in model.origin:
        calibration = model.origin["calibration"]
        rows.append(
            ["calibration", f"{calibration['method']}, on {calibration['n_rows']:,} rows of {calibration['file']}"]
        )
    console.print(table("", ["what", "value"], rows))
    console.print()
    layers = [
        [
            str(i),
            entry["kind"] or "nothing",
            f"{entry['drop_prob']:.4g}",
            f"{entry['n_inputs']} → {entry['n_outputs']}",
            f"{entry['weight_decay']:.3g}",
            f"{entry['length_scale']:.3g}",
        ]
        for i, entry in enumerate(about["layers"], start=1)
    ]
    heads = ["before layer", "dropped by", "drop probability", "sizes", "weight decay λ", "length-scale l"]
    console.print(table("Sites: where a draw is random", heads, layers, numbers=(0, 2, 4, 5)))
    console.print()
    columns = [[c["name"], c["kind"], str(len(c["inputs"])), c["training_rows"]] for c in about["columns"]]
    columns += [[name, "left out", "0", reason] for name, reason in about["left_out"].items()]
    console.print(
        table(
            "Columns: what it reads", ["column", "kind", "inputs", "values in the training rows"], columns, numbers=(2,)
        )
    )
