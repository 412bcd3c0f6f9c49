"""`dropbayes serve` starts, or says in one line why not; `dropbayes page` writes its page."""

import importlib.util
import json
import shutil
import socket

import pytest

from dropbayes.app.models.storage import COLUMNS, MODEL
from dropbayes.app.page import page_html
from tests.command_line import check, run

needs_starlette = pytest.mark.skipif(
    importlib.util.find_spec("starlette") is None, reason="the extra `serve` is not installed"
)


@needs_starlette
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / MODEL).write_bytes(b"x"), "is not the file that columns.json belongs to"),
        (lambda folder: (folder / COLUMNS).write_text("{}"), "is damaged"),
        (shutil.rmtree, "there is no model folder"),
    ],
)
def test_a_broken_model_folder_is_refused_with_one_line(models, tmp_path, damage, message):
    shutil.copytree(models / "numbers", tmp_path / "broken")
    damage(tmp_path / "broken")
    result = run("serve", tmp_path / "broken", "--port", "0")
    assert result.code == 1 and message in result.err and result.err.count("\n") == 1


@needs_starlette
def test_a_port_that_is_taken_is_one_line(models):
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = run("serve", models / "numbers", "--port", other.getsockname()[1])
    assert result.code == 1 and "cannot listen on 127.0.0.1 port" in result.err and result.err.count("\n") == 1


@needs_starlette
def test_an_empty_token_is_refused(models, tmp_path):
    (tmp_path / "token").write_text("\n")
    result = run("serve", models / "numbers", "--token-file", tmp_path / "token")
    assert result.code == 1 and "must hold a token" in result.err


def test_the_page_is_written_as_one_file(tmp_path):
    result = run("page", "--out", tmp_path / "page.html")
    assert (result.code, result.text.strip()) == (0, str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page_html()


def test_the_page_is_told_as_json(tmp_path):
    result = run("page", "--out", tmp_path / "page.html", "--json")
    assert json.loads(result.text) == {"page": str(tmp_path / "page.html")}


def test_a_folder_that_is_not_there_is_one_line(tmp_path):
    check(run("page", "--out", tmp_path / "none" / "page.html"), 1, "the folder '.*none' does not exist")


def test_the_page_goes_to_standard_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("page", "--out", "-").text.startswith("<!doctype html>")
    assert not list(tmp_path.iterdir())
    check(run("page", "--out", "-", "--json"), 2, "together with --json")
