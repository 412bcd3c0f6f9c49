"""How long requests wait: 32 clients against the server, and the same predictions called directly under the same load.

    python -m benchmarks.serving [seconds]

Both are measured in one run on one machine: first 32 threads that call the predictor one row at a time, then 32 threads
that send one row at a time to `dropbayes serve`. Only the ratio means anything. Then a client pours a body of 100 MB into
the server: how long until it is refused, and how much memory that took.
"""

import http.client
import json
import pathlib
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import psutil

import dropbayes as db
from benchmarks import history
from dropbayes.app.models.model import Model

CLIENTS, BODY = 32, 100 * 2**20


def fitted_folder(folder: pathlib.Path) -> pathlib.Path:
    """A model of the default size: four networks of 50-50 units, 50 draws each."""
    generator = np.random.default_rng(0)
    frame = {name: generator.normal(size=300).tolist() for name in ("a", "b", "c", "d")}
    frame["y"] = [a + np.sin(b) for a, b in zip(frame["a"], frame["b"], strict=True)]
    model = Model.fit(frame, target="y", n_steps=200, drop_prob=0.1, weight_decay=1e-4, random_state=0)
    model.save(folder)
    return folder


def latencies(call, seconds):
    """The time of each call of as many clients as there are, asking one after the other for some seconds."""
    times: list[list[float]] = [[] for _ in range(CLIENTS)]
    end = time.perf_counter() + seconds

    def client(number):
        ask = call(number)
        while time.perf_counter() < end:
            begun = time.perf_counter()
            ask()
            times[number].append(time.perf_counter() - begun)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return np.concatenate([np.array(one) for one in times])


def summary(times, seconds):
    p50, p99 = np.percentile(times, [50, 99])
    return {"requests": len(times), "per_second": len(times) / seconds, "p50_ms": 1e3 * p50, "p99_ms": 1e3 * p99}


def refusal(address, process):
    """The seconds until a body of 100 MB is refused, and the bytes by which the server grew."""
    host, port = address.rsplit(":", 1)
    memory = psutil.Process(process.pid).memory_info
    before, peak, chunk = memory().rss, 0, b" " * 2**16
    begun = time.perf_counter()
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(
            f"POST /v2/models/model/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {BODY}\r\n\r\n".encode()
        )
        connection.setblocking(False)
        sent, answer = 0, b""
        while b"\r\n" not in answer:
            readable, writable, _ = select.select([connection], [connection] if sent < BODY else [], [], 60)
            if readable:
                answer += connection.recv(4096)
            elif writable:
                sent += connection.send(chunk)
            peak = max(peak, memory().rss)
    assert b" 413 " in answer, answer
    return {"refused_s": time.perf_counter() - begun, "sent_bytes": sent, "grown_bytes": max(0, peak - before)}


def measure(seconds: float = 60.0) -> dict:
    with tempfile.TemporaryDirectory() as place:
        folder = fitted_folder(pathlib.Path(place) / "model")
        predictor = db.Predictor.load(folder)

        def directly(number):
            columns = {name: [0.1 * number] for name in ("a", "b", "c", "d")}
            return lambda: predictor(columns)

        bare = summary(latencies(directly, seconds), seconds)
        command = [sys.executable, "-m", "dropbayes", "serve", str(folder), "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            address = server.stdout.readline().split("http://")[1].split("/")[0]

            def over_http(number):
                connection = http.client.HTTPConnection(address, timeout=120)
                data = {"name": "x", "shape": [1, 4], "datatype": "FP64", "data": [0.1 * number] * 4}
                body = json.dumps({"inputs": [data]})

                def ask():
                    connection.request("POST", "/v2/models/model/infer", body)
                    response = connection.getresponse()
                    assert response.status == 200, response.read()
                    response.read()

                return ask

            over_http(0)()  # the first request waits for the model
            served = summary(latencies(over_http, seconds), seconds)
            refused = refusal(address, server)
        finally:
            server.terminate()
            server.wait()
    ratios = {f"{name}_ratio": served[f"{name}_ms"] / bare[f"{name}_ms"] for name in ("p50", "p99")}
    return {
        "clients": CLIENTS,
        "seconds": seconds,
        "direct": bare,
        "served": served,
        **ratios,
        "body_of_100_mb": refused,
    }


if __name__ == "__main__":
    found = measure(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
    print(json.dumps(found, indent=1))
    goals = [
        history.Goal("p99 of served over direct", found["p99_ratio"], at_most=2.0),
        history.Goal("seconds until 100 MB are refused", found["body_of_100_mb"]["refused_s"], at_most=1.0),
        history.Goal("MB taken by it", found["body_of_100_mb"]["grown_bytes"] / 2**20, at_most=50.0),
    ]
    history.write("serving", found, goals)
