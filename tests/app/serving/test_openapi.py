"""The description of the server is of paths that it has and of requests that it takes."""

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")


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
