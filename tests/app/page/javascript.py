"""Functions of the page's modules, called in node."""

import atexit
import functools
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


@functools.cache
def _node():
    """One process for all calls: its start takes longer than most of them."""
    command = [NODE, str(HERE / "call.mjs"), str(WEB)]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(started.communicate)
    return started


def call_all(calls):
    """The results of `(module, function, *arguments)`."""
    return [call(*each) for each in calls]


def call(module, name, *values):
    """What `name` of `module` returns."""
    node = _node()
    node.stdin.write(json.dumps([module, name, values], default=_typed) + "\n")
    node.stdin.flush()
    answer = node.stdout.readline()
    if not answer:  # the error is on standard error, and the next call starts another process
        _node.cache_clear()
    assert answer, f"{name} of {module} failed"
    return json.loads(answer)


def _typed(value):
    kinds = {"float32": "$float32", "float64": "$float64", "uint8": "$uint8", "int8": "$int8"}
    if isinstance(value, np.ndarray):
        return {kinds[value.dtype.name]: value.ravel().tolist()}
    raise TypeError(type(value).__name__)
