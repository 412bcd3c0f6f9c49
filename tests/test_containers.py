"""The container image and the KServe example: no builder is needed to see that they fit the project and each other."""

import json
import pathlib
import re
import tomllib

import pytest
import yaml

from tests.command_line import run

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def instructions():
    """The instructions of the Dockerfile, with continued lines joined."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    return [tuple(line.split(None, 1)) for line in lines]


@pytest.fixture(scope="module")
def service():
    return yaml.safe_load((ROOT / "examples" / "kserve.yaml").read_text())


def values(instructions, name):
    return [value for key, value in instructions if key == name]


def test_every_instruction_is_one_of_docker(instructions):
    known = {
        "FROM",
        "ARG",
        "WORKDIR",
        "COPY",
        "RUN",
        "USER",
        "ENV",
        "EXPOSE",
        "HEALTHCHECK",
        "STOPSIGNAL",
        "ENTRYPOINT",
    }
    assert {name for name, _ in instructions} <= known and instructions[0][0] == "FROM"


def test_what_is_copied_is_there_and_is_all_that_the_package_is_built_from(instructions):
    sources = [part for value in values(instructions, "COPY") if "--from" not in value for part in value.split()[:-1]]
    assert all((ROOT / source).exists() for source in sources)
    assert {"pyproject.toml", "README.md", "LICENSE", "src", "constraints.txt"} <= set(sources)


def test_the_image_is_pinned_small_and_runs_as_an_ordinary_user(instructions):
    images = values(instructions, "FROM")
    assert all(re.match(r"python:3\.\d+-slim@sha256:[0-9a-f]{64}( AS \w+)?$", image) for image in images)
    assert len({image.split()[0] for image in images}) == 1
    last_stage = instructions[max(i for i, (name, _) in enumerate(instructions) if name == "FROM") :]
    assert int(values(last_stage, "USER")[0]) >= 1000
    installed = " ".join(values(instructions, "RUN"))
    assert values(instructions, "ARG") == ['PIP_OPTIONS=""'] and "$PIP_OPTIONS" in installed
    assert values(instructions, "ENV")[0].endswith("PIP_NO_CACHE_DIR=1")
    for requirement in re.findall(r"pip install ([^;&]*)", installed):
        assert "--require-hashes" in requirement or requirement.split()[-1] in ("torch", ".")


def test_what_the_image_installs_has_hashes_and_the_versions_of_the_tests():
    tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = ["hatchling", *project["dependencies"], *project["optional-dependencies"]["serve"]]
    pinned = {}
    for file in ("requirements-image.txt", "requirements-torch.txt"):
        lines = (ROOT / file).read_text().replace("\\\n", " ").splitlines()
        pattern = r"([\w-]+)==(\S+) .*--hash=sha256:[0-9a-f]{64}"
        pinned |= dict(re.match(pattern, line).groups() for line in lines if not line.startswith("#"))
    assert {re.match(r"[\w-]+", requirement)[0] for requirement in wanted} <= set(pinned)
    assert {name: tested.get(name, version) for name, version in pinned.items()} == pinned


def test_the_image_starts_a_server_that_its_health_check_asks(instructions):
    command = json.loads(values(instructions, "ENTRYPOINT")[0])
    assert command[:2] == ["dropbayes", "serve"]
    port = values(instructions, "EXPOSE")[0]
    assert command[command.index("--port") + 1] == port
    check = values(instructions, "HEALTHCHECK")[0]
    assert f"127.0.0.1:{port}/v2/health/ready" in check
    assert json.loads(check[check.index("[") :])[0] == "python"


# What the definition of InferenceService v1beta1 says of the fields that a predictor with a container of its own uses:
# names, types and what is required, as in config/crd/full/serving.kserve.io_inferenceservices.yaml of github.com/kserve/kserve
# at commit 047112c8. Fields of other kinds of predictors and volumes are left out, and unknown fields refused: a cluster
# would drop them without a word.
STRING, INTEGER, BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
PORT = {"anyOf": [INTEGER, STRING]}
QUANTITY = {
    "anyOf": [INTEGER, STRING],
    "pattern": r"^[+-]?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?(\d+(\.\d*)?|\.\d+))?$",
}


def record(required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def several(item):
    return {"type": "array", "items": item}


TEXTS = several(STRING)
HEADER = record(["name", "value"], name=STRING, value=STRING)
PROBE = record(
    [], failureThreshold=INTEGER, initialDelaySeconds=INTEGER, periodSeconds=INTEGER, successThreshold=INTEGER,
    terminationGracePeriodSeconds=INTEGER, timeoutSeconds=INTEGER, exec=record([], command=TEXTS),
    grpc=record(["port"], port=INTEGER, service=STRING), tcpSocket=record(["port"], host=STRING, port=PORT),
    httpGet=record([], host=STRING, httpHeaders=several(HEADER), path=STRING, port=PORT, scheme=STRING),
)  # fmt: skip
QUANTITIES = {"type": "object", "additionalProperties": QUANTITY}
CONTAINER = record(
    ["name"], name=STRING, image=STRING, imagePullPolicy=STRING, args=TEXTS, command=TEXTS, workingDir=STRING,
    livenessProbe=PROBE, readinessProbe=PROBE, startupProbe=PROBE, env=several(record(["name"], name=STRING, value=STRING)),
    ports=several(record(["containerPort"], containerPort=INTEGER, hostIP=STRING, hostPort=INTEGER, name=STRING, protocol=STRING)),
    resources=record([], requests=QUANTITIES, limits=QUANTITIES),
    lifecycle=record([], preStop=record([], exec=record([], command=TEXTS))),
    securityContext=record(
        [], allowPrivilegeEscalation=BOOLEAN, capabilities=record([], add=TEXTS, drop=TEXTS), privileged=BOOLEAN,
        procMount=STRING, readOnlyRootFilesystem=BOOLEAN, runAsGroup=INTEGER, runAsNonRoot=BOOLEAN, runAsUser=INTEGER,
    ),
    volumeMounts=several(record(
        ["mountPath", "name"], mountPath=STRING, mountPropagation=STRING, name=STRING, readOnly=BOOLEAN,
        recursiveReadOnly=STRING, subPath=STRING, subPathExpr=STRING,
    )),
)  # fmt: skip
VOLUME = record(
    ["name"], name=STRING, persistentVolumeClaim=record(["claimName"], claimName=STRING, readOnly=BOOLEAN),
    emptyDir=record([], medium=STRING, sizeLimit=QUANTITY),
)  # fmt: skip
PREDICTOR = record([], minReplicas=INTEGER, maxReplicas=INTEGER, containers=several(CONTAINER), volumes=several(VOLUME))
SERVICE = record(
    [], apiVersion={"const": "serving.kserve.io/v1beta1"}, kind={"const": "InferenceService"},
    metadata=record(["name"], name={"type": "string", "pattern": "^[a-z]([a-z0-9-]*[a-z0-9])?$"}),
    spec=record(["predictor"], predictor=PREDICTOR),
)  # fmt: skip


WRONG = {
    "an unknown field": lambda container: container.update(port=1),
    "a number as an argument": lambda container: container["args"].append(2),
    "no quantity": lambda container: container["resources"]["limits"].update(memory="2 gigabytes"),
    "a probe of nothing": lambda container: container["readinessProbe"]["httpGet"].update(port=None),
    "a mount without a path": lambda container: container["volumeMounts"][0].pop("mountPath"),
}


def test_the_kserve_example_fits_the_definition_of_the_resource(service):
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    definition = jsonschema.Draft202012Validator(SERVICE)
    definition.validate(service)
    for change in WRONG.values():
        wrong = json.loads(json.dumps(service))
        change(wrong["spec"]["predictor"]["containers"][0])
        assert not definition.is_valid(wrong)


def test_the_kserve_example_probes_and_mounts_what_the_image_serves(service, instructions):
    (container,) = service["spec"]["predictor"]["containers"]
    assert [str(port["containerPort"]) for port in container["ports"]] == values(instructions, "EXPOSE")
    assert container["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"
    entry = json.loads(values(instructions, "ENTRYPOINT")[0])
    mounted = pathlib.PurePosixPath(container["volumeMounts"][0]["mountPath"])
    assert mounted == pathlib.PurePosixPath(entry[2]).parent  # a fit replaces the folder; its parent stays
    options = run("serve", "--help").text
    assert all(argument in options for argument in [*entry[3:], *container["args"]] if argument.startswith("--"))
    assert str(container["securityContext"]["runAsUser"]) == values(instructions, "USER")[0]


@pytest.mark.parametrize("file", ["Dockerfile", "docs/production.md"])
def test_the_parent_of_the_model_folder_is_mounted(file, instructions):
    entry = json.loads(values(instructions, "ENTRYPOINT")[0])
    mounts = re.findall(r"-v \S+?:(/[^:\s]+):ro", (ROOT / file).read_text())
    assert mounts == [str(pathlib.PurePosixPath(entry[2]).parent)]
