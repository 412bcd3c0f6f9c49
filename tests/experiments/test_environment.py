"""The world as a Gymnasium environment."""

import pytest


def test_the_environment_passes_gymnasiums_checker():
    checker = pytest.importorskip("gymnasium.utils.env_checker")
    from experiments.environment import Foraging

    checker.check_env(Foraging(max_steps=50), skip_render_check=True)
    with pytest.raises(ValueError, match="action"):
        Foraging().step(9)
