"""The paper's experiments, one module per figure or table, each run as `python -m dropbayes.experiments.<name>`."""
