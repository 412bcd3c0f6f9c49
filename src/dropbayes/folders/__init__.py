"""Whole models of tables, and the folders they are kept in: one model for the command line and for Python."""

from dropbayes.folders.model import Model, load
from dropbayes.folders.prediction import column_names, label_sets, prediction_columns
from dropbayes.folders.storage import CARD, COLUMNS, FORMAT, MODEL, check_place

__all__ = [
    "CARD",
    "COLUMNS",
    "FORMAT",
    "MODEL",
    "Model",
    "check_place",
    "column_names",
    "label_sets",
    "load",
    "prediction_columns",
]
