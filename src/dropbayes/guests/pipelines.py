"""Pipelines of transformers under draws: which answers the draws give, how often, and how sure of them they are."""

import statistics
from typing import Any

from torch import nn

from dropbayes.guests.procedures import each_draw
from dropbayes.sampling import Sampling


def answers(
    pipe: Any, inputs: Any, *, n_draws: int = 100, seed: int = 0, sampling: Sampling = Sampling(), **settings: Any
) -> list[list[dict[str, Any]]]:
    """For each input, every answer that a draw gives: the pipeline's own entry, its score a mean over those draws.

    An entry (a label, an entity with its place) has two more items: `std`, the standard deviation of the score, and
    `share`, the share of the draws that gave this answer. The most frequent comes first.

    The pipeline, of transformers, gives entries with a `score`: for classes of texts, tokens or images. It takes one
    input or a list, is called with the `settings` (`batch_size`, `top_k`, ...) and runs once for each draw; the others
    are as in `draws`.
    """
    if not isinstance(getattr(pipe, "model", None), nn.Module):
        remedy = "Make it with transformers.pipeline(task, model=...)"
        raise TypeError(f"`pipe` must be a pipeline with a model of torch; got {type(pipe).__name__}. {remedy}.")
    several = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    runs = each_draw(pipe.model, lambda: pipe(several, **settings), n_draws=n_draws, seed=seed, sampling=sampling)
    runs = [run if len(run) == len(several) else [run] for run in runs]  # some give the entries of one input alone
    return [_summary([run[index] for run in runs]) for index in range(len(several))]


def _summary(runs: list[Any]) -> list[dict[str, Any]]:
    """The distinct entries among the answers to one input, one answer for each draw."""
    scores: dict[Any, list[float]] = {}
    for run in runs:
        for entry in [run] if hasattr(run, "keys") else run:
            match entry:
                case {"score": score, **others}:
                    scores.setdefault(tuple(others.items()), []).append(float(score))
                case _:
                    raise TypeError(f"`pipe` must give entries with a `score`; got {entry!r}. Use `each_draw` instead.")
    found = []
    for answer, values in sorted(scores.items(), key=lambda item: -len(item[1])):
        moments = {"score": statistics.fmean(values), "std": statistics.pstdev(values)}
        found.append({**dict(answer), **moments, "share": len(values) / len(runs)})
    return found
