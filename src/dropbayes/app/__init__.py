"""The application on public names of the library: tables, model folders, report, command line, server, jobs, page."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dropbayes.app.models.model import Model, load
    from dropbayes.app.models.predictor import Predictor

__all__ = ["Model", "Predictor", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dropbayes.app.models import model  # on first use: `--help` is answered before pyarrow could be imported

    return getattr(model, name)
