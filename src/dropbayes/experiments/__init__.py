"""The experiments of the paper, one module per figure or table, each run as `python -m dropbayes.experiments.<name>`."""
