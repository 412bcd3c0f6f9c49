"""Tables in files: CSV and Parquet read and written in blocks, and their columns as a matrix of numbers."""

from dropbayes.runtime.renames import earlier_name
from dropbayes.tables.cells import MISSING, labels, numbers
from dropbayes.tables.columns import Column, Schema, check_columns
from dropbayes.tables.encoding import Encoded, encode
from dropbayes.tables.inference import LeftOut, Problem, column_of, kind_of
from dropbayes.tables.notation import Notation, notation_of
from dropbayes.tables.reading import Source, open_table, quote, regroup
from dropbayes.tables.training import ColumnProblems, Reading, TrainingRows, training_rows
from dropbayes.tables.writing import Sink, without_formulas, write_whole

__all__ = [
    "MISSING",
    "Column",
    "ColumnProblems",
    "Encoded",
    "LeftOut",
    "Notation",
    "Problem",
    "Reading",
    "Schema",
    "Sink",
    "Source",
    "TrainingRows",
    "check_columns",
    "column_of",
    "encode",
    "kind_of",
    "labels",
    "notation_of",
    "numbers",
    "open_table",
    "quote",
    "regroup",
    "training_rows",
    "without_formulas",
    "write_whole",
]

quoted = earlier_name("quoted", quote)
regrouped = earlier_name("regrouped", regroup)
