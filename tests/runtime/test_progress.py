"""What is shown of long work, and where."""

import sys
import types

import pytest

from dropbayes.runtime.progress import ProgressBar, interactive


@pytest.fixture
def minutes(monkeypatch):
    """A clock that advances by half a minute whenever it is read."""
    clock = types.SimpleNamespace(seconds=0.0)

    def monotonic():
        clock.seconds += 30.0
        return clock.seconds

    monkeypatch.setattr("time.monotonic", monotonic)
    return clock


def test_a_pipe_gets_one_line_per_minute(minutes, capsys):
    with ProgressBar("search", 8, unit="networks") as bar:
        for _ in range(8):
            bar.advance()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "search: 2/8 networks [01:30<04:30]"
    assert 2 <= len(lines) < 8


def test_nothing_is_printed_within_the_first_minute_or_when_switched_off(minutes, capsys):
    for _ in ProgressBar("fit", 1, unit="epochs").follow([0]):
        pass
    with ProgressBar("fit", 50, unit="epochs", show=False) as bar:
        for _ in range(50):
            bar.advance()
    assert capsys.readouterr().err == ""


def test_a_bar_is_shown_on_request_and_counts_what_was_followed(capsys):
    with ProgressBar("predict", 3, unit="batches", show=True) as bar:
        assert list(bar.follow("abc")) == ["a", "b", "c"]
    assert bar.done == 3
    assert "predict" in capsys.readouterr().err


def test_the_time_left_counts_only_what_this_run_has_done():
    bar = ProgressBar("fit", 100, unit="epochs", initial=50, show=False)
    bar.advance(10)
    assert bar.line(600) == "fit: 60/100 epochs [10:00<40:00]"


def test_bytes_are_shown_as_megabytes_and_an_unknown_total_has_no_end():
    bar = ProgressBar("read", None, unit="bytes", show=False)
    bar.advance(2_500_000)
    assert bar.line(0) == "read: 2.50M/?B [00:00<?]"


def test_a_closed_standard_error_does_not_stop_the_work(minutes, monkeypatch, tmp_path):
    closed = (tmp_path / "stderr").open("w")
    bar = ProgressBar("fit", 9, unit="epochs")
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    for _ in range(9):
        bar.advance()
    assert bar.done == 9


def test_a_notebook_is_interactive_though_it_is_no_terminal(monkeypatch):
    assert not interactive()
    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert interactive()


def test_a_bar_with_a_delay_appears_only_when_work_takes_longer(minutes, monkeypatch, capsys):
    for total, delay, shown in ((4, 45.0, True), (1, 45.0, False), (4, 1e6, False)):
        with ProgressBar("predict", total, unit="rows", show=True, delay=delay) as bar:
            for _ in range(total):
                bar.advance()
        assert ("predict" in capsys.readouterr().err) == shown and bar.done == total
