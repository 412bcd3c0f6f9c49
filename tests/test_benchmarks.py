"""What the benchmarks keep of their runs; that they are importable is checked with their types."""

import json
import subprocess

from benchmarks import history
from benchmarks.history import Goal


def test_a_goal_is_met_at_its_bound_and_missed_beyond_it():
    assert Goal("speed", 20.0, at_least=20).met and not Goal("speed", 19.9, at_least=20).met
    assert Goal("memory", 50.0, at_most=50).met and not Goal("memory", 50.1, at_most=50).met


def test_missed_goals_are_printed_with_figure_and_bound(tmp_path, capsys):
    goals = [Goal("speed", 10.6, at_least=20), Goal("memory", 30, at_most=50)]
    history.write("trial", {"speed": 10.6}, goals, folder=tmp_path)
    assert capsys.readouterr().out == "\n1 of 2 goals met; missed:\n- speed: 10.6 (goal: at least 20)\n"


def test_every_run_is_added_to_the_history_and_the_last_is_a_file_of_its_own(tmp_path):
    for speed in (1.0, 2.0):
        history.write("trial", {"speed": speed}, folder=tmp_path)
    past = [json.loads(line) for line in (tmp_path / "history" / "trial.jsonl").read_text().splitlines()]
    assert [run["speed"] for run in past] == [1.0, 2.0]
    assert json.loads((tmp_path / "trial.json").read_text()) == past[-1]


def test_figures_carry_their_commit_and_processor():
    about = history.environment()
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=history.RESULTS)
    if head.returncode == 0:
        assert head.stdout.startswith(about["commit"].split(",")[0])
    assert about["cpu"] and about["torch"] and about["date"].count("-") == 2
