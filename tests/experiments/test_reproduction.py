"""Running an experiment by name."""

import json
import pathlib

import pytest

import experiments
from experiments import adversarial, co2, convolution, posteriors, recurrent, reinforcement, rotation, solar, toy
from experiments.__main__ import main
from experiments.record import Findings
from experiments.reproduction import experiment_module, reproduce, settings_of
from experiments.uci import run as uci


@pytest.mark.slow
def test_the_command_line_sets_settings_and_draws_again_from_saved_stages(tmp_path, capsys):
    options = ["--set", "width=8", "--set", "n_steps=20", "--set", "n_draws=5", "--set", 'networks=["relu-5"]']
    assert main(["co2", "--quick", "--out", str(tmp_path), "--device", "cpu", *options]) == 0
    (tmp_path / "co2" / "co2.png").unlink()
    assert main(["co2", "--quick", "--out", str(tmp_path), "--device", "cpu", "--figures-only", *options]) == 0
    assert (tmp_path / "co2" / "co2.png").exists()
    assert "Extrapolation" in capsys.readouterr().out
    with pytest.raises(ValueError, match="n_steps"):
        settings_of("co2", changes=["steps=1"])
    with pytest.raises(ValueError, match="co2"):
        reproduce("sunshine")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["co2", "solar"])
def test_the_kept_arrays_of_a_full_run_are_drawn_without_a_run(name, data_folder, tmp_path):
    reproduce(name, out=tmp_path, device="cpu", figures_only=True)
    kept = json.loads((pathlib.Path(experiments.__file__).parent / "results" / f"{name}.json").read_text())
    report = json.loads((tmp_path / name / "results.json").read_text())
    assert report["metrics"] == kept["metrics"] and report["about"] == kept["about"]
    assert (tmp_path / name / f"{name}.png").exists()
    assert not list((tmp_path / name).glob("*.npz"))


@pytest.mark.parametrize(
    "module", [co2, solar, rotation, reinforcement, adversarial, recurrent, convolution, posteriors, toy, uci]
)
def test_settings_are_frozen_and_come_in_three_sizes(module):
    full, quick, small = module.Settings(), module.Settings.quick(), module.Settings.tiny()
    assert full != quick != small
    with pytest.raises(AttributeError):
        full.seed = 1


def test_the_names_are_the_modules_that_can_be_run():
    folder = pathlib.Path(experiments.__file__).parent
    runnable = {path.stem for path in folder.glob("*.py") if "\nclass Settings" in path.read_text()}
    assert runnable | {"uci"} == set(experiments.NAMES)
    assert all(callable(experiment_module(name).run) for name in experiments.NAMES)


def test_the_metrics_are_printed_as_json_alone(tmp_path, capsys, monkeypatch):
    def stand_in(name, **rest):
        print("a line of the experiment")
        return Findings("A title", ["It came out."], {"rmse": rest["settings"].seed})

    monkeypatch.setattr("experiments.__main__.reproduce", stand_in)
    assert main(["toy", "--quick", "--out", str(tmp_path), "--set", "seed=7", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["metrics"] == {"rmse": 7} and "a line of the experiment" in said.err
    assert main(["toy", "--quick", "--out", str(tmp_path)]) == 0
    assert "It came out." in capsys.readouterr().out


def test_uci_takes_its_own_options(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(uci, "main", lambda options: seen.append(options) or Findings("UCI", [], {"yacht": 1}))
    options = ["--csv", "my.csv", "--target", "y", "--method", "best", "--quick", "--out", "o"]
    assert main(["uci", *options, "--json"]) == 0 and seen == [options]
    assert json.loads(capsys.readouterr().out)["metrics"] == {"yacht": 1}


def test_the_help_of_an_experiment_shows_its_settings(capsys):
    with pytest.raises(SystemExit):
        main(["toy", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in vars(toy.Settings()))
