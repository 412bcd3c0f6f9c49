"""Tests of `dropbayes bench`."""

import json

from tests.command_line import run


def test_bench_prints_ratios():
    found = json.loads(run("bench", "--n-draws", 2, "--repeats", 1, "--json").text)
    assert len(found["cases"]) == 5
    assert all(case["against_loop"] > 0 and case["against_repeated_batch"] > 0 for case in found["cases"])
    assert "How many times faster than ..., with 2 draws" in run("bench", "--n-draws", 2, "--repeats", 1).text
