"""`dropbayes predict --engine`: Parquet folders predicted by many workers."""

from __future__ import annotations

from dropbayes.app.cli.messages import out, print_json
from dropbayes.app.distributed import predict_parquet
from dropbayes.app.models.predictor import Predictor

__all__ = ["predict"]


def predict(
    model_path: str,
    data: str,
    *,
    folder: str,
    coverage: float,
    n_draws: int | None,
    seed: int | None,
    prefix: str | None,
    allow_new: bool,
    engine: str,
    workers: int | None,
    address: str | None,
    as_json: bool,
) -> None:
    """Writes the predictions of a model for Parquet files into a folder; see `dropbayes predict --help`."""
    predictor = Predictor.load(model_path, n_draws=n_draws, seed=seed, coverage=coverage, allow_new=allow_new)
    try:
        n_rows = predict_parquet(
            predictor, data, folder, engine=engine, n_workers=workers, address=address, prefix=prefix
        )
    except ModuleNotFoundError as error:
        raise ImportError(f"{error.name} is not installed: pip install 'dropbayes[{engine}]'.") from None
    if as_json:
        print_json({"output": folder, "n_rows": n_rows, "engine": engine, "n_draws": predictor.total_draws})
        return
    from rich.markup import escape

    out().print(f"{n_rows:,} rows predicted, written to [bold]{escape(folder)}[/bold]")
