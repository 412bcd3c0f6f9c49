"""Columns of a table as inputs of a network: their roles, and numbers, labels and dates in their cells."""

from dropbayes.columns.cells import MISSING, labels, numbers
from dropbayes.columns.encoding import Encoded, encode
from dropbayes.columns.inference import LeftOut, Problem, column_of, kind_of
from dropbayes.columns.notation import Notation, notation_of
from dropbayes.columns.schema import Column, Schema, check_columns

__all__ = [
    "MISSING",
    "Column",
    "Encoded",
    "LeftOut",
    "Notation",
    "Problem",
    "Schema",
    "check_columns",
    "column_of",
    "encode",
    "kind_of",
    "labels",
    "notation_of",
    "numbers",
]
