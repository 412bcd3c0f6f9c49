"""Who may ask: the names of this machine alone, where nothing else keeps other sites out."""

import pytest

from dropbayes.app.serving.settings import Settings


@pytest.mark.parametrize(
    ("settings", "answered"),
    [
        ({}, False),
        ({"host": "::1"}, False),
        ({"host": "localhost"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"token": "secret"}, True),
        ({"further_hosts": ["example.org"]}, True),
        ({"token": "secret", "further_hosts": ["other.org"]}, False),
    ],
)
def test_a_name_of_another_site_is_answered_only_where_that_is_safe_or_wanted(settings, answered):
    hosts = Settings([], **settings).hosts
    assert ("*" in hosts or "example.org" in hosts) == answered
    assert "*" in hosts or "localhost" in hosts
