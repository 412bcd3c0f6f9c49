"""Tables in files: CSV and Parquet read and written in blocks, and their columns as a matrix of numbers."""

from dropbayes.tables.cells import MISSING, labels, numbers
from dropbayes.tables.columns import Column, Encoded, Schema, check_columns, encoded, inferred, kind_of
from dropbayes.tables.reading import Source, open_table, regrouped
from dropbayes.tables.writing import Sink, neutral, write_whole

__all__ = [
    "MISSING",
    "Column",
    "Encoded",
    "Schema",
    "Sink",
    "Source",
    "check_columns",
    "encoded",
    "inferred",
    "kind_of",
    "labels",
    "neutral",
    "numbers",
    "open_table",
    "regrouped",
    "write_whole",
]
