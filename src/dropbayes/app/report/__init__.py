"""One self-contained page on how good, how sure and how well calibrated a model is."""

from dropbayes.app.report.page import report

__all__ = ["report"]
