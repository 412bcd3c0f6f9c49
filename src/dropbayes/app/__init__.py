"""The application: tables, models in folders, the report, the command line, the server, jobs and the page.

It stands on public names of the library alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dropbayes.app.models.model import Model, load
    from dropbayes.app.models.predictor import Predictor

__all__ = ["Model", "Predictor", "load"]


def __getattr__(name: str) -> Any:
    import importlib

    if name in __all__:  # on first use: the command line answers `--help` before pyarrow could be imported
        home = "predictor" if name == "Predictor" else "model"
        return getattr(importlib.import_module(f"dropbayes.app.models.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
