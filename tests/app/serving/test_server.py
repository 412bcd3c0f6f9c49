"""The process behind the port: it starts or says why not, drains, takes up new models, and sheds what is slow."""

import contextlib
import json
import shutil
import signal
import socket
import threading
import time

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

import dropbayes as db
from dropbayes.app.models.model import load
from dropbayes.app.models.storage import MODEL
from tests.app.serving.live import columns_request, live_server, outputs_of
from tests.app.serving.test_application import COLUMNS, as_lists


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def refit(models, folder):
    """Puts another model into the folder, as `dropbayes fit` would."""
    model = load(models / "numbers")
    model.estimator.seed_ += 1
    model.save(folder)


class Clients(threading.Thread):
    """A client that asks until it is told to stop, and keeps every answer."""

    def __init__(self, live):
        super().__init__()
        self.live, self.answers, self.stopped = live, [], threading.Event()
        self.start()

    def run(self):
        while not self.stopped.is_set():
            self.answers.append(self.live.infer(columns_request(COLUMNS)))

    def stop(self):
        self.stopped.set()
        self.join()
        return self.answers


def test_sigterm_finishes_what_was_asked(models):
    many = {"size": [0.1] * 9000, "city": ["Oslo"] * 9000, "new": [True] * 9000}
    with live_server(models / "numbers") as live:
        live.infer(columns_request(COLUMNS))
        answers = []
        asking = threading.Thread(target=lambda: answers.append(live.infer(columns_request(many, n_draws=50))))
        asking.start()
        until(lambda: b'dropbayes_batch_rows_bucket{le="+Inf"} 1.0' not in live.ask("GET", "/metrics")[2])
        assert live.end() == 0
        asking.join()
    status, answer = answers[0]
    assert status == 200 and len(outputs_of(answer)["mean"]) == 9000


def test_sighup_takes_up_a_new_model_without_losing_a_request(models, tmp_path):
    folder = tmp_path / "numbers"
    shutil.copytree(models / "numbers", folder)
    old = as_lists(db.Predictor.load(folder)(COLUMNS))
    with live_server(folder) as live:
        version = live.get("/v2/models/numbers")[1]["versions"][0]
        client = Clients(live)
        refit(models, folder)
        new = as_lists(db.Predictor.load(folder)(COLUMNS))
        live.signal(signal.SIGHUP)
        until(lambda: live.get("/v2/models/numbers")[1]["versions"][0] != version)
        answers = client.stop()
        last = live.infer(columns_request(COLUMNS))
    assert {status for status, _ in answers} == {200}
    assert all(outputs_of(answer) == (old if answer["model_version"] == version else new) for _, answer in answers)
    assert outputs_of(last[1]) == new != old


def test_a_broken_new_model_leaves_the_old_one_in_place(models, tmp_path):
    folder = tmp_path / "numbers"
    shutil.copytree(models / "numbers", folder)
    with live_server(folder) as live:
        before = live.infer(columns_request(COLUMNS))
        (folder / MODEL).write_bytes(b"broken")
        live.signal(signal.SIGHUP)
        time.sleep(3)
        assert live.infer(columns_request(COLUMNS)) == before and before[0] == 200


@pytest.mark.slow
def test_two_workers_answer_the_same_and_add_up_their_counts(models, tmp_path):
    folder = tmp_path / "numbers"
    shutil.copytree(models / "numbers", folder)
    with live_server(folder, "--workers", 2) as live:
        expected = live.infer(columns_request(COLUMNS))
        assert all(live.infer(columns_request(COLUMNS)) == expected for _ in range(20))
        until(lambda: b"dropbayes_rows_total 63.0" in live.ask("GET", "/metrics")[2])
        version = expected[1]["model_version"]
        refit(models, folder)
        live.signal(signal.SIGHUP)
        until(lambda: all(live.get("/v2/models/numbers")[1]["versions"] != [version] for _ in range(10)))
        assert live.end() == 0


def test_slow_and_broken_requests_do_not_keep_others_waiting(server):
    request = json.dumps(columns_request(COLUMNS)).encode()
    head = f"POST /v2/models/numbers/infer HTTP/1.1\r\nHost: a\r\nContent-Length: {len(request) + 9}\r\n\r\n".encode()
    slow = [socket.create_connection((server.host, server.port)) for _ in range(50)]
    for number, connection in enumerate(slow):
        connection.sendall((head + request)[: (number * 7) % (len(head) + len(request))])
    assert all(server.infer(columns_request(COLUMNS))[0] == 200 for _ in range(5))
    for connection in slow:
        connection.close()
    assert server.infer(columns_request(COLUMNS))[0] == 200


def test_the_server_listens_on_this_machine_alone(server):
    assert server.host == "127.0.0.1"
    others = [entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    for address in {other for other in others if not other.startswith("127.")}:
        with pytest.raises(OSError):
            socket.create_connection((address, server.port), timeout=2)


def closed(connection, seconds):
    """Whether the other side ends the connection within some seconds, after whatever it says."""
    connection.settimeout(seconds)
    try:
        with connection, contextlib.suppress(ConnectionResetError):
            while connection.recv(65536):
                pass
    except TimeoutError:
        return False
    return True


def test_a_head_that_does_not_end_is_given_up_at_its_deadline(models):
    with live_server(
        models / "numbers", before="import dropbayes.app.serving.server as s; s._HEADER_SECONDS = 1.0"
    ) as live:
        silent, slow = (socket.create_connection((live.host, live.port)) for _ in range(2))
        slow.sendall(b"GET /v2 HTTP/1.1\r\nHost: a\r\nX-Slow: ")
        assert closed(silent, 60) and closed(slow, 60)
        assert live.get("/v2/health/live")[0] == 200


def test_connections_beyond_the_limit_are_turned_away_and_the_others_served(models):
    with live_server(
        models / "numbers", before="import dropbayes.app.serving.server as s; s._MOST_CONNECTIONS = 4"
    ) as live:
        held = [socket.create_connection((live.host, live.port)) for _ in range(4)]
        for connection in held:
            connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: a\r\n")  # a head without an end
        until(lambda: live.ask("GET", "/v2/health/live")[0] == 503)
        for connection in held:
            connection.close()
        until(lambda: live.get("/v2/health/live")[0] == 200)
        assert live.infer(columns_request(COLUMNS))[0] == 200
