"""Columns of a table as inputs of a network: their roles, and numbers, labels and dates in their cells."""

from dropbayes.estimators.columns.cells import Cells
from dropbayes.estimators.columns.inference import LeftOut, column_of
from dropbayes.estimators.columns.schema import Column, Encoded, Schema, check_columns, encode

__all__ = ["Cells", "Column", "Encoded", "LeftOut", "Schema", "check_columns", "column_of", "encode"]
