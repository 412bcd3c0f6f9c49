"""The version is the one of the installed distribution."""

import importlib.metadata

from dropbayes.runtime.version import __version__


def test_the_version_is_that_of_the_distribution():
    assert importlib.metadata.version("dropbayes") == __version__
