"""`dropbayes serve` starts, or says in one line why not."""

import shutil
import socket

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

from dropbayes.app.models.storage import COLUMNS, MODEL
from tests.command_line import run


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


def test_a_port_that_is_taken_is_one_line(models):
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = run("serve", models / "numbers", "--port", other.getsockname()[1])
    assert result.code == 1 and "cannot listen on 127.0.0.1 port" in result.err and result.err.count("\n") == 1


def test_an_empty_token_is_refused(models, tmp_path):
    (tmp_path / "token").write_text("\n")
    result = run("serve", models / "numbers", "--token-file", tmp_path / "token")
    assert result.code == 1 and "must hold a token" in result.err
