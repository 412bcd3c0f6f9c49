"""Functions of the page's modules, called in node."""

import json
import pathlib
import shutil
import subprocess

import numpy as np
import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent.parent
WEB = ROOT / "src" / "dropbayes" / "app" / "page" / "web"
NODE = shutil.which("node")

needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")


def call_all(calls):
    """The results of `(module, function, *arguments)`, in one process."""
    lines = "".join(json.dumps([module, name, values], default=_typed) + "\n" for module, name, *values in calls)
    command = [NODE, str(HERE / "call.mjs"), str(WEB)]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def call(module, name, *values):
    """What `name` of `module` returns."""
    return call_all([(module, name, *values)])[0]


def _typed(value):
    kinds = {"float32": "$float32", "float64": "$float64", "uint8": "$uint8", "int8": "$int8"}
    if isinstance(value, np.ndarray):
        return {kinds[value.dtype.name]: value.ravel().tolist()}
    raise TypeError(type(value).__name__)
