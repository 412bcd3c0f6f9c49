"""A server in a process of its own, for tests that speak to it as strangers do."""

import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import psutil

from tests.app.forks import FORKS

ROOT = pathlib.Path(__file__).parent.parent.parent.parent


@dataclass
class Live:
    process: Any  # of subprocess, or alike
    host: str
    port: int
    model: str

    def ask(self, method, path, body=None, headers=None, timeout=120):
        """The status, headers and body of one answer."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()

    def get(self, path, **headers):
        status, _, body = self.ask("GET", path, headers=headers)
        return status, json.loads(body)

    def infer(self, request, **headers):
        body = request if isinstance(request, bytes) else json.dumps(request).encode()
        status, _, answer = self.ask("POST", f"/v2/models/{self.model}/infer", body, headers)
        return status, json.loads(answer)

    @property
    def counts(self):
        """The counters of the server by name."""
        lines = self.ask("GET", "/metrics")[2].decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    @property
    def memory(self):
        """The bytes that the process and its workers hold in memory."""
        process = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])

    def signal(self, number):
        self.process.send_signal(number)

    def end(self):
        """Ends the server politely; its exit code."""
        self.signal(signal.SIGTERM)
        return self.process.wait(60)


class Forked:
    """A fork with the methods of `subprocess.Popen` that tests need; what it prints is in a file."""

    def __init__(self, arguments, before, output):
        self._process = FORKS.Process(target=_serve, args=(arguments, before, str(output)))
        self._process.start()
        self.pid, self.kill = self._process.pid, self._process.kill
        while self._process.is_alive() and not (output.exists() and output.read_text().endswith("\n")):
            time.sleep(0.02)
        self.stdout = output.open()

    def send_signal(self, number):
        os.kill(self.pid, number)

    def wait(self, seconds):
        self._process.join(seconds)
        return self._process.exitcode


def _serve(arguments, before, output):
    from dropbayes.app.cli import main

    exec(before, {})
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
    sys.argv = ["dropbayes", *arguments]
    sys.exit(main())


@contextlib.contextmanager
def live_server(*folders_and_options, before="", wrapper=(), stderr=None):
    """A server of a model folder on a free port; ended at the end of the context.

    Args:
        folders_and_options: The model folders, and options of `dropbayes serve`.
        before: Python to run in the server's process first, to set a limit that no test could wait for.
        wrapper: A command that runs the server's.
        stderr: A file for what the server says on standard error.

    With a wrapper or a file the process is that of a new interpreter.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    arguments = ["serve", *map(str, folders_and_options), "--port", "0"]
    with tempfile.TemporaryDirectory() as folder:
        if wrapper or stderr:
            command = [*wrapper, sys.executable, "-m", "dropbayes", *arguments]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environment, text=True)
        else:
            process = Forked(arguments, before, pathlib.Path(folder) / "stdout")
    try:
        line = process.stdout.readline()
        address = re.search(r"http://([\d.]+):(\d+)/v2/models/(\S+)", line)
        assert address, line
        yield Live(process, address[1], int(address[2]), address[3])
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


def columns_request(columns, **parameters):
    """A request with columns of numbers, texts or booleans."""
    kinds = {bool: "BOOL", float: "FP64", int: "INT64", str: "BYTES"}
    inputs = [
        {"name": name, "shape": [len(values)], "datatype": kinds[type(values[0])], "data": list(values)}
        for name, values in columns.items()
    ]
    return {"inputs": inputs, "parameters": parameters} if parameters else {"inputs": inputs}


def outputs_of(answer):
    """The outputs of an answer by name, as lists."""
    return {output["name"]: output["data"] for output in answer["outputs"]}
