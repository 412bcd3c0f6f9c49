"""Complete models of tables, and predictors: in two modules, as a network's needs neither scikit-learn nor tables."""
