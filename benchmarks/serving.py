"""How long requests wait: 32 clients against the server, and the same predictions called directly under the same load.

    python -m benchmarks.serving [seconds]

Both are measured in one run on one machine: first 32 threads that call the predictor one row at a time, then 32 threads
that send one row at a time to `dropbayes serve`. Only the ratio means anything.
"""

import http.client
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

import dropbayes as db
from benchmarks import history
from dropbayes.models.model import Model

CLIENTS = 32


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
    }


if __name__ == "__main__":
    found = measure(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
    print(json.dumps(found, indent=1))
    history.write("serving", found, [history.Goal("p99 of served over direct", found["p99_ratio"], at_most=2.0)])
