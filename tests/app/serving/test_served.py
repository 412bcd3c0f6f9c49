"""A model as it is served: the columns it knows, the version of its folder, and the outputs of the command line."""

import asyncio
import dataclasses
import pathlib

import numpy as np
import pytest

pytest.importorskip("msgspec", reason="the extra `serve` is not installed")

import msgspec

from dropbayes.app.models.model import Model, load
from dropbayes.app.serving.application import Service
from dropbayes.app.serving.served import ServedModel, Settings, all_outputs
from tests.app.serving.live import columns_request, live_server, outputs_of
from tests.app.serving.test_application import COLUMNS


@pytest.fixture(scope="module")
def served(models):
    return ServedModel.load(models / "numbers")


def test_the_outputs_of_some_rows_are_those_of_the_model(served, models):
    rows = served.encode(COLUMNS, allow_new=False)
    found = all_outputs(served.predictor.predict_inputs(rows.x), rows, served.predictor, defer_above=0.0)
    expected = load(models / "numbers").predict(COLUMNS)
    assert found["mean"].tolist() == expected["mean"] and found["outside"].tolist() == expected["outside"]
    assert found["deferred"].all() and set(found) == set(served.outputs)


def test_a_model_whose_columns_are_far_from_zero_is_served(tmp_path):
    days = np.datetime64("2020-01-01") + np.arange(60)
    frame = {"day": [day.replace("-", "") for day in days.astype(str)], "price": np.exp(np.arange(60) / 20).tolist()}
    settings = {"n_steps": 20, "n_networks": 1, "drop_prob": 0.05, "weight_decay": 1e-4, "random_state": 0}
    model = Model.fit(frame, target="price", target_transform="log", **settings).save(tmp_path / "prices")
    served = ServedModel.load(model.path)
    assert set(served.outputs) > {"mean", "std"}
    columns = [
        served.records(f'{{"records": [{{"day": {day}}}]}}'.encode(), max_rows=1)[1] for day in (20200105, '"20200105"')
    ]
    assert np.array_equal(*(served.encode(some, allow_new=False).x for some in columns))


def test_records_are_the_columns_of_the_schema(served):
    text = b'{"records": [{"size": null, "new": true, "city": "Oslo"}, {"size": 1, "city": "Rome", "new": false}]}'
    columns = {"size": [None, 1.0], "city": ["Oslo", "Rome"], "new": [True, False]}
    assert served.records(text, max_rows=2)[1] == columns


def test_a_matrix_beside_a_column_is_refused(served):
    with pytest.raises(ValueError, match="send it alone"):
        served.encode({"x": np.zeros((1, 3)), "size": [1.0]}, allow_new=False)


NETWORK = """
import torch
import dropbayes as db

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
predictor = db.Predictor(net, likelihood=db.Gaussian(precision=4.0), columns=("height", "weight"))
unnamed = db.Predictor(net, likelihood=db.Gaussian(precision=4.0))
linear = predictor.with_settings(method="linear")
many = predictor.with_settings(n_draws=1001)
"""


def test_a_network_is_served_by_the_name_of_its_predictor(tmp_path, monkeypatch):
    (tmp_path / "my_network.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(tmp_path)
    columns = {"height": [1.7, 1.8], "weight": [70.0, 80.0]}
    served = ServedModel.load(pathlib.Path("my_network:predictor"))
    expected = served.predictor(columns)
    names = [f"my_network:{name}" for name in ("predictor", "linear", "many")]
    with live_server(*names, before=f"import sys; sys.path.insert(0, {str(tmp_path)!r})") as live:
        status, answer = live.infer(columns_request(columns))
        assert status == 200 and (answer["model_name"], answer["model_version"]) == ("predictor", served.version)
        assert outputs_of(answer)["std"] == expected["std"].ravel().tolist()
        assert {"name": "std", "datatype": "FP64", "shape": [-1, 1]} in live.get("/v2/models/predictor")[1]["outputs"]
        records = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        found = live.ask("POST", "/v2/models/predictor/records", msgspec.json.encode({"records": records}))
        assert [record["mean_0"] for record in msgspec.json.decode(found[2])["records"]] == expected["mean"][
            :, 0
        ].tolist()
        for name in ("linear", "many"):  # settings of its own are kept, whatever a request may ask for
            expected = ServedModel.load(pathlib.Path(f"my_network:{name}")).predictor(columns)
            found = dataclasses.replace(live, model=name).infer(columns_request(columns))[1]
            assert outputs_of(found)["std"] == expected["std"].ravel().tolist()
    for wrong in ("my_network:net", "my_network:unnamed", "my_network:nothing", "no_such_module:x"):
        with pytest.raises(ValueError, match=wrong):
            ServedModel.load(pathlib.Path(wrong))


def test_a_reload_runs_a_changed_module_again_and_a_broken_one_changes_nothing(tmp_path, monkeypatch, capsys):
    module, paths = tmp_path / "changing_network.py", [pathlib.Path("changing_network:predictor")]
    monkeypatch.syspath_prepend(tmp_path)
    module.write_text(NETWORK)
    service = Service(Settings(paths), map(ServedModel.load, paths))
    first = service.models["predictor"].version
    module.write_text(NETWORK.replace("seed(0)", "seed(100)"))
    asyncio.run(service.reload())
    second = service.models["predictor"].version
    assert first != second and f"now serving predictor, version {second}" in capsys.readouterr().err
    for broken in ("raise RuntimeError('no weights')", "predictor = (", NETWORK.replace("Linear(2,", "Linear(30,")):
        module.write_text(broken)
        asyncio.run(service.reload())
        assert "the model was not replaced" in capsys.readouterr().err
        assert service.models["predictor"].version == second


@pytest.mark.parametrize(
    ("settings", "answered"),
    [
        ({}, False),
        ({"host": "::1"}, False),
        ({"host": "localhost"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"token": "secret"}, True),
        ({"further_hosts": ["example.org"]}, True),
        ({"token": "secret", "further_hosts": ["other.org"]}, False),
    ],
)
def test_a_name_of_another_site_is_answered_only_where_that_is_safe_or_wanted(settings, answered):
    hosts = Settings([], **settings).hosts
    assert ("*" in hosts or "example.org" in hosts) == answered
    assert "*" in hosts or "localhost" in hosts
