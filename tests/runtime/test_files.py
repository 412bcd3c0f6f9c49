"""Tests of whole files: concurrent writers, failures, kills, links and leftovers."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import stat
import threading
import time

import numpy as np
import pytest

from dropbayes.runtime import files


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_text_and_bytes_are_written(tmp_path):
    files.write_text(tmp_path / "a", "β")
    files.write_bytes(tmp_path / "a", b"b")
    assert (tmp_path / "a").read_bytes() == b"b" and names(tmp_path) == ["a"]


def test_a_folder_that_refuses_a_file_is_told_with_the_name_that_was_given(tmp_path, monkeypatch):
    def refuse(name, *_):
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(PermissionError, match=r"Permission denied: '.*/a\.csv'"):
        files.write_text(tmp_path / "a.csv", "x")


def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path):
    files.write_text(tmp_path / "a", "old")
    with pytest.raises(RuntimeError), files.replacement(tmp_path / "a") as file:
        file.write(b"half")
        raise RuntimeError
    assert (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failing_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call):
    files.write_text(tmp_path / "a", "old")
    monkeypatch.setattr(os, call, lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(OSError, match="disk full") as caught:
        files.write_text(tmp_path / "a", "new")
    assert caught.value.filename == str(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]


def test_a_folder_and_a_missing_folder_are_refused_by_name(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder"):
        files.write_text(tmp_path, "text")
    with pytest.raises(FileNotFoundError, match=r"'.*missing' does not exist"):
        files.write_text(tmp_path / "missing" / "a", "text")
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path.resolve())
    with pytest.raises(PermissionError, match=f"{tmp_path.name}' cannot be written to"):
        files.check_output(tmp_path / "report.html")
    os.mkfifo(tmp_path / "pipe")
    files.check_output(tmp_path / "pipe")


def test_permissions_are_kept_and_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    files.write_text(tmp_path / "link", "new")
    assert (tmp_path / "real").read_text() == "new" and (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o640


def test_a_pipe_is_written_directly(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    text: list[str] = []
    reader = threading.Thread(target=lambda: text.append((tmp_path / "pipe").read_text()))
    reader.start()
    files.write_text(tmp_path / "pipe", "through")
    reader.join(timeout=10)
    assert text == ["through"] and names(tmp_path) == ["pipe"]


def save_many(path, mark):
    """Fifty files of one repeated letter, from two threads."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: files.write_text(path, mark * 100_000), range(50)))


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # the children only write files
def test_two_hundred_saves_from_four_processes_and_their_threads_are_all_whole(tmp_path):
    path = tmp_path / "a"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=save_many, args=(path, mark)) for mark in "abcd"]
    for writer in writers:
        writer.start()
    n_reads = 0
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            text = path.read_text()
            assert len(text) == 100_000 and len(set(text)) == 1
            n_reads += 1
    assert [writer.exitcode for writer in writers] == [0, 0, 0, 0]
    assert n_reads and names(tmp_path) == ["a"]


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path):
    old, fresh = tmp_path / f".a.{'0' * 16}.part", tmp_path / f".a.{'1' * 16}.part"
    for leftover in (old, fresh, tmp_path / ".a.mine.part"):
        leftover.touch()
    os.utime(old, (time.time() - 90_000,) * 2)
    os.utime(tmp_path / ".a.mine.part", (0, 0))
    files.write_text(tmp_path / "a", "text")
    assert names(tmp_path) == [fresh.name, ".a.mine.part", "a"]


def test_a_private_file_is_private_while_it_is_replaced(tmp_path):
    (tmp_path / "a").write_text("secret")
    (tmp_path / "a").chmod(0o600)
    with files.replacement(tmp_path / "a") as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
        file.write(b"new")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


def folder(path, text):
    with files.folder_replacement(path) as new:
        (new / "a").write_text(text)


def test_a_folder_is_replaced_whole_and_nothing_else_stays(tmp_path):
    folder(tmp_path / "m", "old")
    (tmp_path / "m" / "b").touch()
    folder(tmp_path / "m", "new")
    assert names(tmp_path) == ["m"] and names(tmp_path / "m") == ["a"]
    with pytest.raises(RuntimeError), files.folder_replacement(tmp_path / "m") as new:
        (new / "a").write_text("half")
        raise RuntimeError
    assert (tmp_path / "m" / "a").read_text() == "new" and names(tmp_path) == ["m"]


def test_a_replaced_folder_keeps_its_permissions_and_a_link_to_it_stays_a_link(tmp_path):
    folder(tmp_path / "v1", "old")
    (tmp_path / "v1").chmod(0o700)
    (tmp_path / "v1" / "a").chmod(0o600)
    (tmp_path / "current").symlink_to("v1")
    folder(tmp_path / "current", "new")
    assert (tmp_path / "current").is_symlink() and (tmp_path / "v1" / "a").read_text() == "new"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "v1", tmp_path / "v1" / "a")] == [0o700, 0o600]


@pytest.mark.parametrize("exchangeable", [True, False])
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_an_interruption_after_any_step_of_the_exchange_leaves_a_whole_folder(
    tmp_path, monkeypatch, exchangeable, failing
):
    folder(tmp_path / "m", "old")
    rename, n_calls = os.rename, 0

    def interrupted(*paths):
        nonlocal n_calls
        rename(*paths)
        n_calls += 1
        if n_calls == failing:
            raise KeyboardInterrupt

    if not exchangeable:
        monkeypatch.setattr(files.ctypes, "CDLL", lambda *_, **__: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            folder(tmp_path / "m", "new")
    assert (n_calls == 0) == exchangeable
    assert (tmp_path / "m" / "a").read_text() in ("old", "new") and names(tmp_path) == ["m"]


def replace_for_ever(path):
    while True:
        folder(path, "x" * 1000)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_killed_process_leaves_a_whole_folder(tmp_path):
    folder(tmp_path / "m", "x" * 1000)
    for seconds in np.linspace(0.01, 0.04, 10):
        writer = multiprocessing.get_context("fork").Process(target=replace_for_ever, args=(tmp_path / "m",))
        writer.start()
        time.sleep(seconds)
        writer.kill()
        writer.join()
        assert (tmp_path / "m" / "a").read_text() == "x" * 1000


def test_a_folder_that_a_killed_process_left_is_removed_after_a_day(tmp_path):
    left = tmp_path / f".m.{'0' * 16}.part"
    left.mkdir()
    (left / "a").touch()
    os.utime(left, (0, 0))
    folder(tmp_path / "m", "first")
    assert names(tmp_path) == [left.name, "m"]  # it might have been the only one
    folder(tmp_path / "m", "second")
    assert names(tmp_path) == ["m"]


@pytest.mark.parametrize("name", [255 * "x", 127 * "ü"])
def test_a_name_may_be_as_long_as_the_system_allows(tmp_path, name):
    for _ in range(2):
        files.write_text(tmp_path / name, "a")
    (tmp_path / name).unlink()
    for _ in range(2):
        with files.folder_replacement(tmp_path / name) as folder:
            (folder / "a").write_text("a")
    assert names(tmp_path) == [name]


def test_a_read_only_folder_that_is_replaced_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "a").write_text("old")
    (tmp_path / "m").chmod(0o555)
    emptied = []
    monkeypatch.setattr(files.shutil, "rmtree", lambda path, **_: emptied.append(stat.S_IMODE(path.stat().st_mode)))
    with files.folder_replacement(tmp_path / "m") as folder:
        (folder / "a").write_text("new")
    assert emptied == [0o700], "only its owner's right to write lets a folder be emptied"
    assert stat.S_IMODE((tmp_path / "m").stat().st_mode) == 0o555 and (tmp_path / "m" / "a").read_text() == "new"
