"""Tables in files: CSV and Parquet, read and written in blocks."""

from dropbayes.app.tables.reading import Source, open_table, regroup
from dropbayes.app.tables.training import ColumnProblems, Reading, TrainingRows, training_rows
from dropbayes.app.tables.writing import Sink, without_formulas, write_whole

__all__ = [
    "ColumnProblems",
    "Reading",
    "Sink",
    "Source",
    "TrainingRows",
    "open_table",
    "regroup",
    "training_rows",
    "without_formulas",
    "write_whole",
]
