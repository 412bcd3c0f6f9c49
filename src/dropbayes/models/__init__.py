"""Whole models of tables, kept in folders, and models as pure functions from columns to predictions.

The command line, Python, the engines and the servers use the same `Model` and the same `Predictor`. Each has a
module of its own, because a `Predictor` of a network needs neither scikit-learn nor the tables.
"""
