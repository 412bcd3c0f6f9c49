"""The protocol as strangers speak it: what is asked is answered with the predictor's bits, the rest is refused."""

import json
import time

import numpy as np
import pyarrow.csv
import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

import dropbayes as db
from dropbayes.app.models.model import load
from tests.app.serving.live import columns_request, live_server, outputs_of

COLUMNS = {"size": [0.5, -1.0, 2.0], "city": ["Oslo", "Rome", "Rome"], "new": [True, False, True]}


@pytest.fixture(scope="module")
def predictor(models):
    return db.Predictor.load(models / "numbers")


@pytest.fixture(scope="module")
def classes(models):
    with live_server(models / "classes") as live:
        yield live


def as_lists(prediction, outside=("", "", "size")):
    return {name: values.ravel().tolist() for name, values in prediction.items()} | {"outside": list(outside)}


# --- health and metadata -------------------------------------------------------------------------------------------


def test_the_server_says_what_it_is_and_that_it_lives(server):
    assert server.get("/v2") == (
        200,
        {"name": "dropbayes", "version": db.__version__, "extensions": ["binary_tensor_data"]},
    )
    assert server.get("/v2/health/live") == (200, {"live": True})
    assert server.get("/v2/health/ready") == (200, {"ready": True})
    assert server.get("/v2/models/numbers/ready") == (200, {"name": "numbers", "ready": True})


def test_a_model_is_named_after_its_folder_and_lists_its_columns(server):
    status, metadata = server.get("/v2/models/numbers")
    inputs = {entry["name"]: (entry["datatype"], entry["shape"]) for entry in metadata["inputs"]}
    assert status == 200 and metadata["name"] == "numbers"
    assert inputs == {"size": ("FP64", [-1]), "city": ("BYTES", [-1]), "new": ("BOOL", [-1]), "x": ("BYTES", [-1, 3])}
    assert server.get(f"/v2/models/numbers/versions/{metadata['versions'][0]}") == (200, metadata)


def test_classes_are_in_the_metadata_in_the_order_of_the_probabilities(classes):
    metadata = classes.get("/v2/models/classes")[1]
    assert metadata["parameters"] == {"classes": ["high", "low", "middle"]}
    assert {"name": "probabilities", "datatype": "FP64", "shape": [-1, 3]} in metadata["outputs"]


# --- predictions ---------------------------------------------------------------------------------------------------


def test_an_answer_has_the_bits_of_the_predictor(server, predictor):
    status, answer = server.infer({**columns_request(COLUMNS), "id": "abc"})
    assert (status, answer["id"], answer["model_name"]) == (200, "abc", "numbers")
    assert outputs_of(answer) == as_lists(predictor(COLUMNS))


def test_classes_are_answered_with_labels_and_probabilities(classes, models):
    answer = classes.infer(columns_request(COLUMNS))[1]
    assert outputs_of(answer) == as_lists(db.Predictor.load(models / "classes")(COLUMNS))
    assert next(o for o in answer["outputs"] if o["name"] == "probabilities")["shape"] == [3, 3]


def test_a_request_sets_draws_seed_and_coverage(server, predictor):
    settings = {"n_draws": 7, "seed": 5, "coverage": 0.5}
    status, answer = server.infer(columns_request(COLUMNS, **settings))
    assert status == 200 and answer["parameters"] == {"method": "sampling", **settings}
    assert outputs_of(answer) == as_lists(predictor.with_settings(n_draws=7, seed=5, coverage=0.5)(COLUMNS))


def test_a_request_is_answered_in_one_pass(server, predictor):
    status, answer = server.infer(columns_request(COLUMNS, method="linear"))
    assert status == 200 and answer["parameters"] == {"method": "linear", "coverage": 0.95}
    assert outputs_of(answer) == as_lists(predictor.with_settings(method="linear")(COLUMNS))
    assert server.infer(columns_request(COLUMNS, method="magic"))[0] == 400


def test_rows_over_the_threshold_are_marked(server, predictor):
    std = predictor(COLUMNS)["std"]
    threshold = float(np.median(std))
    answer = server.infer(columns_request(COLUMNS, defer_above=threshold))[1]
    assert outputs_of(answer)["deferred"] == (std > threshold).tolist()


def test_columns_may_be_of_any_numeric_type_and_a_column_shaped_one_wide(server):
    plain = server.infer(columns_request({**COLUMNS, "size": [1.0, 2.0, 3.0]}))
    inputs = columns_request(COLUMNS)["inputs"]
    inputs[0] = {"name": "size", "shape": [3, 1], "datatype": "INT8", "data": [[1], [2], [3]]}
    assert server.infer({"inputs": inputs}) == plain


def test_one_matrix_holds_all_columns_in_order(server):
    rows = [["0.5", "Oslo", "true"], ["", "Rome", "false"]]
    matrix = {"inputs": [{"name": "x", "shape": [2, 3], "datatype": "BYTES", "data": rows}]}
    columns = columns_request({"size": ["0.5", ""], "city": ["Oslo", "Rome"], "new": [True, False]})
    assert server.infer(matrix) == server.infer(columns)
    matrix["inputs"][0]["name"] = "input-1"  # the name that MLServer's codec of arrays gives
    assert server.infer(matrix) == server.infer(columns)


def test_only_the_outputs_asked_for_are_sent(server):
    request = {**columns_request(COLUMNS), "outputs": [{"name": "upper"}, {"name": "mean"}]}
    assert list(outputs_of(server.infer(request)[1])) == ["upper", "mean"]


def test_no_rows_are_answered_with_none(server):
    inputs = [{"name": n, "shape": [0], "datatype": "BYTES", "data": []} for n in ("size", "city", "new")]
    status, answer = server.infer({"inputs": inputs})
    assert status == 200 and outputs_of(answer) == {name: [] for name in outputs_of(answer)}


def test_the_same_seed_gives_the_same_bytes(server):
    body = json.dumps(columns_request(COLUMNS, seed=3)).encode()
    answers = {server.ask("POST", "/v2/models/numbers/infer", body)[2] for _ in range(5)}
    assert len(answers) == 1


def test_tritons_client_gets_the_bits_of_the_predictor(server, predictor):
    triton = pytest.importorskip("tritonclient.http")
    client = triton.InferenceServerClient(f"{server.host}:{server.port}")
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("numbers")
    assert client.get_model_metadata("numbers")["platform"] == "dropbayes"
    for binary in (True, False):
        inputs = []
        for name, datatype, values in (
            ("size", "FP64", np.array(COLUMNS["size"])),
            ("city", "BYTES", np.array(COLUMNS["city"], dtype=object)),
            ("new", "BOOL", np.array(COLUMNS["new"])),
        ):
            inputs.append(triton.InferInput(name, [3], datatype))
            inputs[-1].set_data_from_numpy(values, binary_data=binary)
        outputs = [triton.InferRequestedOutput("mean", binary_data=binary), triton.InferRequestedOutput("std")]
        for wanted in (outputs, None):
            found = client.infer("numbers", inputs, outputs=wanted, request_id="1", parameters={"seed": 3})
            expected = predictor.with_settings(seed=3)(COLUMNS)
            assert all(np.array_equal(found.as_numpy(name), expected[name]) for name in ("mean", "std"))
    client.close()


def test_a_category_new_to_the_model_is_served_where_the_request_or_the_server_allows_it(server, models):
    strange = columns_request({**COLUMNS, "city": ["Oslo", "Paris", "Rome"]})
    allowed = server.infer({**strange, "parameters": {"allow_new": True}})
    assert allowed[0] == 200 and outputs_of(allowed[1])["outside"] == ["", "city", "size"]
    expected = db.Predictor.load(models / "numbers", allow_new=True)({**COLUMNS, "city": ["Oslo", "Paris", "Rome"]})
    assert outputs_of(allowed[1])["mean"] == expected["mean"].tolist()
    with live_server(models / "numbers", "--allow-new") as live:
        assert live.infer(strange) == allowed
        assert live.infer({**strange, "parameters": {"allow_new": False}})[0] == 400


@pytest.mark.slow
def test_conformal_label_sets_are_those_of_the_model(models, tmp_path):
    frame = pyarrow.csv.read_csv(models / "train.csv")
    load(models / "classes").calibrate(frame, method="conformal").save(tmp_path / "sets")
    expected = load(tmp_path / "sets").predict(COLUMNS, coverage=0.5)
    with live_server(tmp_path / "sets") as live:
        answer = live.infer(columns_request(COLUMNS, coverage=0.5))[1]
        assert outputs_of(answer)["labels"] == list(expected["labels"])
        assert outputs_of(answer)["outside"] == list(expected["outside"])
        assert {"name": "labels", "datatype": "BYTES", "shape": [-1]} in live.get("/v2/models/sets")[1]["outputs"]


def test_null_is_a_missing_value(server):
    nulls, texts = columns_request(COLUMNS), columns_request({**COLUMNS, "size": ["0.5", "", "2.0"]})
    nulls["inputs"][0]["data"] = [0.5, None, 2.0]
    nulls["inputs"][2]["data"] = texts["inputs"][2]["data"] = [True, None, True]
    assert server.infer(nulls) == server.infer(texts)
    assert server.infer(nulls)[0] == 200


def test_the_fields_of_kserves_and_mlservers_clients_are_taken(server):
    plain = server.infer(columns_request(COLUMNS))
    request = columns_request(COLUMNS, content_type="pd", headers={"a": "b"})
    for entry in request["inputs"]:
        entry["parameters"] = {"content_type": "np"}
    named = {"model_name": "numbers", "model_version": plain[1]["model_version"]}
    assert server.infer({**request, **named}) == plain
    assert server.infer({**request, "model_name": "other"})[0] == 400


def test_kserves_client_gets_an_answer(server, predictor):
    kserve = pytest.importorskip("kserve")
    import asyncio

    request = kserve.InferRequest("numbers", [kserve.InferInput(e["name"], e["shape"], e["datatype"], e["data"]) for e in columns_request(COLUMNS)["inputs"]])  # fmt: skip
    client = kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2"))
    answer = asyncio.run(client.infer(f"http://{server.host}:{server.port}", request, model_name="numbers"))
    assert answer.outputs[0].data == predictor(COLUMNS)["mean"].tolist()


def test_mlservers_codecs_are_understood(server, predictor):
    codecs = pytest.importorskip("mlserver.codecs")
    import pandas

    frame = pandas.DataFrame(COLUMNS).astype({"city": object})  # its codec knows no strings of pandas 3
    request = codecs.PandasCodec.encode_request(frame).model_dump_json()
    answer = server.infer(request.encode())[1]
    assert outputs_of(answer)["mean"] == predictor(COLUMNS)["mean"].tolist()
    rows = np.array([["0.5", "Oslo", "true"], ["-1", "Rome", "false"], ["2", "Rome", "true"]])
    request = codecs.NumpyRequestCodec.encode_request(rows).model_dump_json()
    assert outputs_of(server.infer(request.encode())[1])["mean"] == predictor(COLUMNS)["mean"].tolist()


def test_plain_records_are_answered_with_the_columns_of_the_command_line(server, models):
    records = [dict(zip(COLUMNS, values, strict=True)) for values in zip(*COLUMNS.values(), strict=True)]
    body = json.dumps({"records": records, "parameters": {"coverage": 0.5}})
    status, _, answer = server.ask("POST", "/v2/models/numbers/records", body)
    expected = load(models / "numbers").predict(COLUMNS, coverage=0.5)
    assert status == 200
    assert {name: [record[name] for record in json.loads(answer)["records"]] for name in expected} == expected
    for wrong in ({"records": [{**records[0], "sise": 1}]}, {"records": [{"size": 1}]}, {"records": []}, records):
        assert server.ask("POST", "/v2/models/numbers/records", json.dumps(wrong))[0] == 400


@pytest.mark.slow
def test_several_models_share_a_server(server, classes, models):
    with live_server(models / "numbers", models / "classes") as both:
        for one in (server, classes):
            path = f"/v2/models/{one.model}/infer"
            body = json.dumps(columns_request(COLUMNS))
            assert both.ask("POST", path, body)[2] == one.ask("POST", path, body)[2]


# --- refusals ------------------------------------------------------------------------------------------------------

REFUSED = {
    "a column is missing": ({"inputs": columns_request(COLUMNS)["inputs"][1:]}, 400, "lacks 'size'"),
    "a new category": (columns_request({**COLUMNS, "city": ["Oslo", "Paris", "Rome"]}), 400, "row 1, column 'city'"),
    "an unknown input": (columns_request({**COLUMNS, "sise": [1.0]}), 400, "no input 'sise'"),
    "unequal lengths": (columns_request({**COLUMNS, "size": [1.0]}), 400, "equally long"),
    "an unknown parameter": (columns_request(COLUMNS, n_draw=3), 400, "n_draw"),
    "no draws": (columns_request(COLUMNS, n_draws=0), 400, "`n_draws` must"),
    "draws of a method without any": (columns_request(COLUMNS, method="linear", n_draws=9), 400, "makes no draws"),
    "a method without a name": (columns_request(COLUMNS, method=""), 400, "Invalid enum value ''"),
    "too many draws": (columns_request(COLUMNS, n_draws=10**6), 400, "at most 1000"),
    "an impossible coverage": (columns_request(COLUMNS, coverage=1), 400, "`coverage` must"),
    "a coverage that rounds to 1": (columns_request(COLUMNS, coverage=0.9999999999999999), 400, ""),
    "a negative seed": (columns_request(COLUMNS, seed=-1), 400, "`seed` must"),
    "a huge seed": (columns_request(COLUMNS, seed=2**70), 400, "`seed` must"),
    "an unknown output": ({**columns_request(COLUMNS), "outputs": [{"name": "mode"}]}, 400, "no output 'mode'"),
    "deferred without a threshold": ({**columns_request(COLUMNS), "outputs": [{"name": "deferred"}]}, 400, "defer_above"),
    "a number out of all proportion": (columns_request({**COLUMNS, "size": [1e300, 0.0, 0.0]}), 400, "column 'size'"),
    "a row that overflows": (columns_request({**COLUMNS, "size": [1e60, 0.0, 0.0]}), 400, "not finite"),
    "a matrix and a column": ({"inputs": [{"name": "x", "shape": [1, 3], "datatype": "BYTES", "data": ["1", "Oslo", "true"]}, *columns_request({"size": [1.0]})["inputs"]]}, 400, "send it alone"),
    "an unknown parameter of an output": ({**columns_request(COLUMNS), "outputs": [{"name": "mean", "parameters": {"classification": 2}}]}, 400, "classification"),
    "half a character": (columns_request({**COLUMNS, "city": ["\ud800", "Oslo", "Rome"]}), 400, ""),
    "half a character as an id": ({**columns_request(COLUMNS), "id": "\ud800"}, 400, ""),
    "too many rows": ({"inputs": [{"name": "size", "shape": [10**9], "datatype": "FP64", "data": []}]}, 413, "at most 10000"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_answered_is_refused_with_its_reason(server, case):
    request, expected, message = REFUSED[case]
    status, answer = server.infer(request)
    assert status == expected and message in answer["error"]


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/v2/models/other", 404), ("GET", "/v2/models/numbers/versions/1", 404), ("GET", "/", 404),
        ("POST", "/v2/models/other/infer", 404), ("GET", "/v2/models/numbers/infer", 405), ("DELETE", "/v2", 405),
        ("GET", "/v2/", 404), ("GET", "/v2/models/..%2f..%2fetc", 404), ("POST", "/v2/repository/models/a/load", 404),
    ],
)  # fmt: skip
def test_other_paths_and_methods_are_refused(server, method, path, expected):
    status, _, body = server.ask(method, path)
    assert status == expected and json.loads(body)["error"]


def test_a_class_of_a_row_that_overflows_is_refused(classes):
    assert classes.infer(columns_request({**COLUMNS, "size": [1e99, 0.0, 0.0]}))[0] == 400


@pytest.mark.parametrize("length", ["9" * 5000, "x"])
def test_a_length_of_the_json_that_is_none_is_refused(server, length):
    assert server.infer(columns_request(COLUMNS), **{"Inference-Header-Content-Length": length})[0] == 400


def test_names_of_other_sites_and_forms_are_refused(server):
    assert server.infer(columns_request(COLUMNS), Host="localhost")[0] == 200
    assert server.ask("GET", "/v2", headers={"Host": "attacker.example"})[0] == 400
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert server.infer(columns_request(COLUMNS), **{"Content-Type": kind})[0] == 415


def test_requests_of_every_status_are_counted(server):
    before = server.counts
    server.ask("GET", "/nowhere")
    server.ask("DELETE", "/v2")
    server.ask("POST", "/v2/models/numbers/infer", b"x", {"Content-Type": "text/plain"})
    after = server.counts
    for status in (404, 405, 415):
        name = f'dropbayes_requests_total{{status="{status}"}}'
        assert after[name] == before.get(name, 0) + 1


def test_metrics_count_requests_rows_and_rows_unlike_training(server):
    before = server.counts
    server.infer(columns_request({**COLUMNS, "size": [1e4, 1e4, 1e4]}, defer_above=0.0))
    after = server.counts
    change = {name: after[name] - before.get(name, 0) for name in after}
    assert change['dropbayes_requests_total{status="200"}'] == 2  # the one before asked for metrics
    assert (
        change['dropbayes_rows_total{model="numbers"}'] == change['dropbayes_deferred_rows_total{model="numbers"}'] == 3
    )
    assert change['dropbayes_rows_above_training_percentile_total{model="numbers",percentile="99"}'] == 3
    assert change["dropbayes_batch_rows_count"] == 1 and change['dropbayes_uncertainty_total{model="numbers"}'] > 0
    assert after['dropbayes_training_uncertainty{model="numbers",percentile="50"}'] > 0


# --- limits --------------------------------------------------------------------------------------------------------


def test_a_body_over_the_limit_is_refused_before_it_is_sent(server):
    started = time.monotonic()
    memory = server.memory
    head = {"Content-Length": str(100 * 2**20), "Expect": "100-continue"}
    status, _, body = server.ask("POST", "/v2/models/numbers/infer", b"", head)
    assert status == 413 and "longer than 16777216 bytes" in json.loads(body)["error"]
    assert server.memory - memory < 50 * 2**20
    assert time.monotonic() - started < 30  # a guard against hanging, not a measurement


def test_a_body_in_chunks_is_cut_at_the_limit(server):
    memory = server.memory
    chunks = (b"[" * 2**20 for _ in range(100))
    try:
        status, _, _ = server.ask("POST", "/v2/models/numbers/infer", chunks, {"Transfer-Encoding": "chunked"})
        assert status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass  # the answer was sent while the body was still coming
    assert server.memory - memory < 50 * 2**20
    assert server.infer(columns_request(COLUMNS))[0] == 200


def test_a_compressed_body_is_refused(server):
    status, _, _ = server.ask("POST", "/v2/models/numbers/infer", b"x", {"Content-Encoding": "gzip"})
    assert status == 415


def test_a_token_is_asked_for_where_one_is_set(models, tmp_path):
    (tmp_path / "token").write_text("s3cret-token\n")
    with live_server(models / "numbers", "--token-file", tmp_path / "token") as live:
        assert live.get("/v2/health/live")[0] == live.get("/v2/health/ready")[0] == 200
        for header in ({}, {"Authorization": "Bearer s3cret"}, {"Authorization": "s3cret-token"}):
            assert live.get("/v2", **header)[0] == live.infer(columns_request(COLUMNS), **header)[0] == 401
        assert live.ask("GET", "/metrics")[0] == 401
        for scheme in ("Bearer", "bearer"):
            assert live.infer(columns_request(COLUMNS), Authorization=f"{scheme} s3cret-token")[0] == 200


# --- the description of the server -----------------------------------------------------------------------------------


def test_every_path_that_is_described_is_answered(server):
    status, description = server.get("/openapi.json")
    version = server.get("/v2/models/numbers")[1]["versions"][0]
    assert status == 200 and "/v2/models/{model}/versions/{version}/infer" in description["paths"]
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            names = {name["name"] for name in operation["parameters"]}
            assert names == {name for name in ("model", "version") if f"{{{name}}}" in path}
            asked = path.format(model="numbers", version=version)
            assert server.ask(method.upper(), asked)[0] == {"get": 200, "post": 400}[method]


def test_the_columns_of_a_model_are_those_of_its_records(server):
    schemas = server.get("/openapi.json")[1]["components"]["schemas"]
    assert list(schemas["numbers_record"]["properties"]) == ["size", "city", "new"]
    assert schemas["numbers_records"]["properties"]["parameters"]["$ref"].endswith("/Parameters")


@pytest.mark.parametrize(("column", "value"), [("size", True), ("size", [1]), ("new", 1.5), ("city", {"a": 1})])
def test_a_record_with_a_value_of_another_kind_is_refused(server, column, value):
    record = {name: values[0] for name, values in COLUMNS.items()} | {column: value}
    status, _, answer = server.ask("POST", "/v2/models/numbers/records", json.dumps({"records": [record]}))
    assert status == 400 and f"$.records[0].{column}" in answer.decode()


def test_records_in_raw_bytes_are_refused(server):
    asked = {"records": [{name: values[0] for name, values in COLUMNS.items()}]}
    body = json.dumps({**asked, "parameters": {"binary_data_output": True}})
    status, _, answer = server.ask("POST", "/v2/models/numbers/records", body)
    assert status == 400 and b"records are answered as JSON" in answer


@pytest.mark.slow
def test_probabilities_without_sets_are_answered_without_a_coverage(models):
    with live_server(models / "classes") as live:
        used = live.infer(columns_request(COLUMNS, coverage=0.5))[1]["parameters"]
    assert used.keys() == {"method", "n_draws", "seed"}
