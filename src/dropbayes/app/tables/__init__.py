"""Tables in files: CSV and Parquet, read and written in blocks."""

from dropbayes.app.tables.reading import Source, open_table, regroup
from dropbayes.app.tables.writing import Sink, without_formulas

__all__ = ["Sink", "Source", "open_table", "regroup", "without_formulas"]
