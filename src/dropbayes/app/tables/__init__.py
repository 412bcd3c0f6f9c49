"""Tables in files: CSV and Parquet, read and written in blocks."""

from dropbayes.app.tables.reading import Source, open_table, regroup
from dropbayes.app.tables.writing import is_parquet, without_formulas, write_tables

__all__ = ["Source", "is_parquet", "open_table", "regroup", "without_formulas", "write_tables"]
