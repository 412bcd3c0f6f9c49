"""The paper's experiments, one module per figure or table.

`python -m experiments NAME` runs one of `NAMES`; `python -m experiments.uci` runs the table of the
UCI sets with its own options.
"""

__all__ = ["NAMES"]

NAMES = (
    "adversarial",
    "co2",
    "convolution",
    "posteriors",
    "reinforcement",
    "recurrent",
    "rotation",
    "solar",
    "toy",
    "uci",
)
