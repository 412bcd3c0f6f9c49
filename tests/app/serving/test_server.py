"""The process behind the port: it starts or says why not, drains, takes up new models, and sheds what is slow."""

import asyncio
import contextlib
import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

import dropbayes as db
from dropbayes.app.models.model import load
from dropbayes.app.models.storage import MODEL
from dropbayes.app.serving.served import Settings
from dropbayes.app.serving.server import _listener, serve
from tests.app.serving.live import columns_request, live_server, outputs_of
from tests.app.serving.test_application import COLUMNS, as_lists


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


SLOW_BODY = "POST /v2/models/numbers/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 16777216\r\n\r\n{"


def refit(models, folder, seed=1):
    """Puts another model into the folder, as `dropbayes fit` would."""
    model = load(models / "numbers")
    model.ensemble.seed_ += seed
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


def test_one_worker_serves_the_models_that_were_announced(models, monkeypatch):
    announced, worked = [], []
    monkeypatch.setattr("dropbayes.app.serving.server._Server", lambda config: pytest.fail("it is not to run"))
    monkeypatch.setattr(
        "dropbayes.app.serving.server.application", lambda settings, models: worked.extend(models) or sys.exit()
    )
    with pytest.raises(SystemExit):
        serve(Settings([models / "numbers"], port=0), announce=lambda url, model: announced.append(model))
    assert len(worked) == 1 and worked[0] is announced[0]


def test_sigterm_finishes_what_was_asked(models):
    many = {"size": [0.1] * 5000, "city": ["Oslo"] * 5000, "new": [True] * 5000}
    with live_server(models / "numbers") as live:
        live.infer(columns_request(COLUMNS))
        answers = []
        asking = threading.Thread(target=lambda: answers.append(live.infer(columns_request(many, n_draws=50))))
        asking.start()
        until(lambda: b'dropbayes_batch_rows_bucket{le="+Inf"} 1.0' not in live.ask("GET", "/metrics")[2])
        assert live.end() == 0
        asking.join()
    status, answer = answers[0]
    assert status == 200 and len(outputs_of(answer)["mean"]) == 5000


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


@pytest.mark.slow
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
        until(lambda: b'dropbayes_rows_total{model="numbers"} 63.0' in live.ask("GET", "/metrics")[2])
        version = expected[1]["model_version"]
        refit(models, folder)
        live.signal(signal.SIGHUP)
        until(lambda: all(live.get("/v2/models/numbers")[1]["versions"] != [version] for _ in range(10)))
        assert live.end() == 0


def test_slow_and_broken_requests_do_not_keep_others_waiting(server):
    request = json.dumps(columns_request(COLUMNS)).encode()
    head = f"POST /v2/models/numbers/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(request) + 9}\r\n\r\n".encode()
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


@pytest.mark.slow
def test_a_head_that_does_not_end_is_given_up_at_its_deadline(models):
    with live_server(
        models / "numbers", before="import dropbayes.app.serving.server as s; s._HEADER_SECONDS = 1.0"
    ) as live:
        silent, slow = (socket.create_connection((live.host, live.port)) for _ in range(2))
        slow.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        assert closed(silent, 60) and closed(slow, 60)
        assert live.get("/v2/health/live")[0] == 200


@pytest.mark.slow
def test_connections_that_are_owed_nothing_make_room_for_others(models):
    with live_server(
        models / "numbers", before="import dropbayes.app.serving.server as s; s._MAX_CONNECTIONS = 4"
    ) as live:
        for beginning in ("", "GET /v2 HTTP/1.1\r\nHost: localhost\r\n", SLOW_BODY):
            held = [socket.create_connection((live.host, live.port)) for _ in range(4)]
            for connection in held:
                connection.sendall(beginning.encode())
            for _ in range(8):
                assert live.get("/v2/health/live")[0] == live.infer(columns_request(COLUMNS))[0] == 200
            for connection in held:
                connection.close()


def test_bodies_that_were_announced_and_not_sent_lock_nobody_out(server):
    held = [socket.create_connection((server.host, server.port)) for _ in range(8)]
    for connection in held:
        connection.sendall(SLOW_BODY.encode())
    assert all(server.infer(columns_request(COLUMNS))[0] == 200 for _ in range(10))
    for connection in held:
        connection.close()


@pytest.mark.slow
def test_long_bodies_under_way_leave_room_for_short_ones(models):
    with live_server(models / "numbers", "--max-body", 2**20) as live:
        head = SLOW_BODY.replace("16777216", str(2**20))
        held = [socket.create_connection((live.host, live.port)) for _ in range(9)]
        for connection in held:
            connection.sendall(head.encode() + b" " * (2**20 - 2))
        assert all(live.infer(columns_request(COLUMNS))[0] == 200 for _ in range(5))
        assert any(closed(connection, 5) for connection in held)  # the one too many
        for connection in held:
            connection.close()


def test_answers_are_sent_without_waiting_for_acknowledgements():
    async def run():
        connected = asyncio.get_running_loop().create_future()
        listener = _listener("127.0.0.1", 0)
        server = await asyncio.start_server(lambda _, writer: connected.set_result(writer), sock=listener)
        _, writer = await asyncio.open_connection(*listener.getsockname())
        accepted = await connected
        no_delay = accepted.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        for one in (writer, accepted, server):
            one.close()
        return no_delay

    assert asyncio.run(run())


@pytest.mark.slow
def test_of_twenty_maximal_requests_at_once_some_are_answered_and_the_rest_are_told_to_return(models):
    n_rows = 400
    slow = "from dropbayes.app.serving import batching; batching._BATCH_DRAWS = 2**12"  # the rate it expects
    columns = {"size": [0.1] * n_rows, "city": ["Oslo"] * n_rows, "new": [True] * n_rows}
    body = json.dumps(columns_request(columns, n_draws=100)).encode()
    with live_server(models / "numbers", "--max-rows", n_rows, "--max-draws", 100, before=slow) as live:
        path = f"/v2/models/{live.model}/infer"
        with ThreadPoolExecutor(20) as clients:
            answers = [clients.submit(live.ask, "POST", path, body) for _ in range(20)]
            until(lambda: live.counts["dropbayes_batch_rows_count"] > 0)
            assert live.infer(columns_request({"size": [0.1], "city": ["Oslo"], "new": [True]}))[0] == 200
            results = [answer.result() for answer in answers]
    statuses = [status for status, _, _ in results]
    assert set(statuses) <= {200, 429} and 200 in statuses
    assert all("retry-after" in headers for status, headers, _ in results if status == 429)
    assert len({outputs for status, _, outputs in results if status == 200}) == 1


@pytest.mark.slow
def test_the_prediction_of_a_client_that_left_is_given_up(models):
    many = json.dumps(
        columns_request({"size": [0.1] * 9000, "city": ["Oslo"] * 9000, "new": [True] * 9000}, n_draws=1000)
    )
    head = f"POST /v2/models/numbers/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(many)}\r\n\r\n"
    with live_server(models / "numbers") as live:
        with socket.create_connection((live.host, live.port)) as connection:
            connection.sendall((head + many).encode())
            until(lambda: live.counts["dropbayes_batch_rows_count"] > 0)
        until(lambda: live.counts.get('dropbayes_requests_total{status="499"}') == 1)
        assert live.counts["dropbayes_batch_rows_sum"] < 9000


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_no_connection_that_was_accepted_is_dropped_at_sigterm(models, workers):
    body = json.dumps(columns_request(COLUMNS))
    statuses, dropped = [], []

    def ask(live):
        while True:
            connection = http.client.HTTPConnection(live.host, live.port, timeout=60)
            try:
                connection.connect()
            except OSError:
                return
            try:
                connection.request("POST", "/v2/models/numbers/infer", body)
                statuses.append(connection.getresponse().status)
            except (OSError, http.client.HTTPException) as error:
                dropped.append(repr(error))
            finally:
                connection.close()

    for _ in range(2):
        with live_server(models / "numbers", "--workers", workers) as live:
            until(lambda live=live: live.infer(columns_request(COLUMNS))[0] == 200)
            clients = [threading.Thread(target=ask, args=(live,)) for _ in range(8)]
            for client in clients:
                client.start()
            time.sleep(1)
            assert live.end() == 0
            for client in clients:
                client.join()
    assert dropped == [] and set(statuses) == {200}


@pytest.mark.slow
def test_kept_connections_are_answered_during_the_drain_and_told_to_close(models):
    with live_server(models / "numbers") as live:
        connection = http.client.HTTPConnection(live.host, live.port, timeout=60)
        connection.request("GET", "/v2")
        connection.getresponse().read()
        live.signal(signal.SIGTERM)
        until(lambda: refuses(live))
        connection.request("POST", "/v2/models/numbers/infer", json.dumps(columns_request(COLUMNS)))
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("Connection")) == (200, "close")
        connection.close()
        assert live.process.wait(60) == 0


def refuses(live):
    try:
        socket.create_connection((live.host, live.port)).close()
    except ConnectionRefusedError:
        return True
    return False


SLOW_FIRST_RELOAD = """
import time
from dropbayes.app.serving.application import ServedModel
read, reads = ServedModel.load.__func__, []
def load(cls, path):
    model = read(cls, path)
    reads.append(model)
    time.sleep(2.0 if len(reads) == 3 else 0.0)  # after those of the start
    return model
ServedModel.load = classmethod(load)
"""


@pytest.mark.slow
def test_of_two_quick_reloads_the_later_one_stays(models, tmp_path):
    folder = tmp_path / "numbers"
    shutil.copytree(models / "numbers", folder)
    with live_server(folder, before=SLOW_FIRST_RELOAD) as live:
        assert live.infer(columns_request(COLUMNS))[0] == 200
        refit(models, folder)
        live.signal(signal.SIGHUP)
        time.sleep(1.0)
        refit(models, folder, seed=2)
        live.signal(signal.SIGHUP)
        new = as_lists(db.Predictor.load(folder)(COLUMNS))
        time.sleep(4.0)
        assert outputs_of(live.infer(columns_request(COLUMNS))[1]) == new


@pytest.mark.slow
def test_the_server_starts_where_there_is_no_sighup(models):
    with live_server(models / "numbers", before="import signal; del signal.SIGHUP") as live:
        assert live.infer(columns_request(COLUMNS))[0] == 200


@pytest.mark.slow
def test_requests_and_refusals_are_logged_where_the_level_says_so(models, tmp_path):
    for level, logged in (("info", True), ("warning", False)):
        with (tmp_path / level).open("w") as file, live_server(models / "numbers", "--log-level", level, stderr=file) as live:  # fmt: skip
            live.infer(columns_request(COLUMNS, n_draws=0))
        text = (tmp_path / level).read_text()
        assert ('"POST /v2/models/numbers/infer HTTP/1.1" 400' in text) == logged == ("`n_draws` must" in text)


def test_two_folders_of_one_name_are_refused(models, tmp_path):
    shutil.copytree(models / "classes", tmp_path / "numbers")
    with pytest.raises(ValueError, match="different names"):
        serve(Settings([models / "numbers", tmp_path / "numbers"], port=0))


@pytest.mark.slow
def test_workers_end_with_a_parent_that_was_killed(models):
    with live_server(models / "numbers", "--workers", 2) as live:
        assert live.infer(columns_request(COLUMNS))[0] == 200
        live.process.kill()
        until(lambda: refuses(live))


@pytest.mark.slow
def test_a_model_in_a_mounted_parent_folder_can_be_replaced(models, tmp_path):
    unshare = ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("mounts need user namespaces")
    shutil.copytree(models / "numbers", tmp_path / "host" / "numbers")
    (tmp_path / "models").mkdir()
    mount = [
        *unshare,
        "sh",
        "-c",
        'mount --bind "$0" "$1" && shift && exec "$@"',
        tmp_path / "host",
        tmp_path / "models",
    ]
    with live_server(tmp_path / "models" / "numbers", wrapper=mount) as live:
        version = live.get("/v2/models/numbers")[1]["versions"][0]
        refit(models, tmp_path / "host" / "numbers")
        live.signal(signal.SIGHUP)
        until(lambda: live.get("/v2/models/numbers")[1]["versions"][0] != version)


EARLY_RELOAD = """
import os, signal
from dropbayes.app.serving import server
work = server._work
def wait_and_work(*arguments):
    os.kill(os.getpid(), signal.SIGHUP)
    work(*arguments)
server._work = wait_and_work
"""


@pytest.mark.slow
def test_a_reload_that_is_asked_for_before_the_server_can_do_it_waits(models):
    with live_server(models / "numbers", before=EARLY_RELOAD) as live:
        assert live.infer(columns_request(COLUMNS))[0] == 200
        assert live.end() == 0
