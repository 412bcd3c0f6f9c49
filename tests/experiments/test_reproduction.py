"""Running an experiment by name."""

import pathlib

import pytest

from dropbayes import experiments
from dropbayes.experiments import adversarial, co2, convolution, recurrent, reinforcement, rotation, solar, toy
from dropbayes.experiments.__main__ import main
from dropbayes.experiments.reproduction import experiment_module, reproduce, settings_of
from dropbayes.experiments.uci import run as uci


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


@pytest.mark.parametrize("module", [co2, solar, rotation, reinforcement, adversarial, recurrent, convolution, toy, uci])
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
