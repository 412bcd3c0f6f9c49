"""The README's examples run as they stand."""

import pathlib
import re
from typing import Any

import numpy as np
import torch
from torch import nn

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()


def test_every_python_example_of_the_readme_runs(capsys):
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    table = rng.normal(size=(60, 3))
    names: dict[str, Any] = {
        "net": nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)).eval(),
        "x": torch.randn(5, 4),
        "y": torch.randn(5, 2),
        "tau": 4.0,
    }
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(examples) == 4
    for example in examples:
        if "DropoutRegressor" in example:  # the same lines, on a table, with a shorter search
            names |= {"X": table, "y": table.sum(1), "X_new": table[:4]}
            example = example.replace("DropoutRegressor()", "DropoutRegressor(n_steps=100, n_networks=1)")
        exec(example, names)
        if "add_dropout" in example:
            names["net"] = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)).eval()
    assert "before weight layer" in capsys.readouterr().out
    assert names["std"].shape == (4,) and (names["std"] > 0).all()


def test_the_readme_shows_the_two_commands():
    assert "make demo" in README and "make test" in README
