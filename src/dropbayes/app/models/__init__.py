"""Complete models of tables, stored in folders, and predictors: models as pure functions of columns.

The command line, Python, the engines and the servers use the same `Model` and the same `Predictor`. Each has its
own module, because a `Predictor` of a network needs neither scikit-learn nor the tables.
"""
