"""Tests of `dropbayes reproduce`."""

import json

import pytest

from tests.command_line import run


def test_reproduce_knows_the_experiments():
    from dropbayes.cli.reproducing import NAMES
    from dropbayes.experiments import reproduction

    assert reproduction.NAMES == NAMES


def test_reproduce_runs_an_experiment_with_its_settings(tmp_path, monkeypatch):
    from dropbayes.experiments import reproduction
    from dropbayes.experiments.record import Findings

    seen = {}

    def stand_in(name, **rest):
        seen.update(name=name, **rest)
        print("a line of the experiment")
        return Findings("A title", ["It came out."], {"rmse": 0.5})

    monkeypatch.setattr(reproduction, "reproduce", stand_in)
    options = ["--quick", "--out", tmp_path, "--device", "cpu", "--set", "seed=7", "--json"]
    result = run("reproduce", "toy", *options)
    assert json.loads(result.text)["metrics"] == {"rmse": 0.5}
    assert "a line of the experiment" in result.err
    assert seen["name"] == "toy" and seen["settings"].seed == 7 and seen["device"] == "cpu"
    assert "It came out." in run("reproduce", "toy", "--quick").text


def test_reproduce_uci_passes_every_argument_on(monkeypatch):
    from dropbayes.experiments.record import Findings
    from dropbayes.experiments.uci import run as uci

    seen = []

    def main(arguments):
        seen.append(arguments)
        print("a line of the experiment")
        return Findings("The UCI table", ["It came out."], {"yacht": {"rmse": 0.5}})

    monkeypatch.setattr(uci, "main", main)
    told = ["--csv", "my.csv", "--target", "y", "--method", "best"]
    result = run("reproduce", "uci", *told, "--quick", "--out", "o", "--json")
    assert seen == [["--quick", "--device", "auto", *told, "--out", "o"]]
    assert json.loads(result.text)["metrics"] == {"yacht": {"rmse": 0.5}}
    assert "a line of the experiment" in result.err


def test_reproduce_uci_reports_wrong_arguments():
    result = run("reproduce", "uci", "--csv", "my.csv")
    assert result.code == 2 and "`--csv` and `--target` go together" in result.err


@pytest.mark.parametrize("name", ["toy", "co2"])
def test_the_help_of_an_experiment_shows_its_settings(name):
    from dropbayes.experiments import co2, toy

    result = run("reproduce", name, "--help")
    settings = {"toy": toy, "co2": co2}[name].Settings()
    assert result.code == 0
    assert all(field in result.text for field in vars(settings))


def test_the_help_of_uci_shows_its_options():
    result = run("reproduce", "uci", "--help")
    assert result.code == 0
    assert "--method" in result.text
    assert "--splits" in result.text
