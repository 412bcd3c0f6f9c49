"""The page is served on this machine alone, and nothing else is."""

import http.client
import signal
import subprocess
import sys
import threading
import urllib.request

import pytest

from dropbayes.app.page import PageServer, page_html
from tests.command_line import run


@pytest.fixture(scope="module")
def server():
    with PageServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def ask(server, method, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer, answer.read()


def test_the_page_comes_whole_with_careful_headers(server):
    answer, body = ask(server, "GET", "/?anything")
    assert (answer.status, body.decode()) == (200, page_html())
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert ask(server, "HEAD", "/")[1] == b""


@pytest.mark.parametrize("path", ["/etc/passwd", "/../", "/lenet.safetensors", "/%2e%2e"])
def test_nothing_else_is_served(server, path):
    assert ask(server, "GET", path)[0].status == 404


def test_a_name_of_another_site_is_refused(server):
    assert ask(server, "GET", "/", Host="attacker.example")[0].status == 421
    assert ask(server, "GET", "/", Host=f"localhost:{server.server_port}")[0].status == 200


def test_nothing_can_be_sent(server):
    assert ask(server, "POST", "/")[0].status == 501


def test_the_server_listens_on_the_loopback_address_alone(server):
    assert server.server_address[0] == "127.0.0.1" and server.url == f"http://127.0.0.1:{server.server_port}/"


def test_the_command_writes_the_file(tmp_path):
    result = run("page", "--out", tmp_path / "page.html")
    assert result.code == 0 and result.text.strip() == str(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == page_html()


def test_the_command_names_a_folder_that_is_missing(tmp_path):
    result = run("page", "--out", tmp_path / "nowhere" / "page.html")
    assert result.code == 1 and "nowhere" in result.err


def test_the_command_serves_until_it_is_interrupted():
    command = [sys.executable, "-m", "dropbayes", "page", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().strip()
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert answer.read().decode() == page_html()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert "Ctrl+C" in process.stderr.read()
