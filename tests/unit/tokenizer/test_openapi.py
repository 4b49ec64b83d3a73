"""/openapi.json against the code, both ways: no route, field or status that is not there, and none that is left out."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from services.model_files.generation_config import SamplingDefaults
from services.runtime.config import Settings
from services.tokenizer import openapi
from services.tokenizer.access import Audience
from services.tokenizer.openapi import description, statuses_of
from services.tokenizer.request_body import BodyForm
from services.tokenizer.request_limits import ServedModel
from services.tokenizer.routes import ROUTES, Route, find_route
from tests.unit.tokenizer.backend_peers import Server
from tests.unit.tokenizer.http_client import request
from tests.unit.tokenizer.scripts import OK

Json = dict[str, Any]
MODEL = ServedModel(
    name="m",
    created=1,
    context_tokens=64,
    num_entries=300,
    end_token_ids=frozenset({1}),
    embedding_size=3,
    fingerprint="fp_1",
    defaults=SamplingDefaults(temperature=0.7, top_k=20),
)
WITH_BODY = [route for route in ROUTES.values() if route.form is not None]


@pytest.fixture(scope="module")
def described() -> Json:
    whole: Json = json.loads(json.dumps(description(Settings(), MODEL)))
    return whole


def fields_of(described: Json, route: Route) -> Json:
    content = described["paths"][route.path][route.method.lower()]["requestBody"]["content"]
    name = content["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
    fields: Json = described["components"]["schemas"][name]["properties"]
    return fields


def known_names(form: BodyForm[Any]) -> set[str]:
    return {name for name in (*form.kind.__struct_fields__, *form.unbuilt, *form.without_effect) if "." not in name}


def test_the_paths_are_those_of_the_table(described: Json) -> None:
    found = {(path, method.upper()) for path, methods in described["paths"].items() for method in methods}
    assert found == {(route.path, route.method) for route in ROUTES.values()}


@pytest.mark.parametrize("route", WITH_BODY, ids=lambda route: route.path)
def test_the_fields_are_those_that_are_checked(described: Json, route: Route) -> None:
    assert route.form is not None
    fields = fields_of(described, route)
    assert set(fields) == known_names(route.form)
    for name, neutral in route.form.unbuilt.items():
        if "." not in name:
            assert fields[name]["enum"] == [None, *json.loads(json.dumps(neutral))]
    for name in route.form.without_effect:
        if "." not in name:
            assert fields[name] == {"description": "Without effect."}


@pytest.mark.parametrize("route", WITH_BODY, ids=lambda route: route.path)
def test_ranges_are_told(described: Json, route: Route) -> None:
    """What a struct says of a number stands in the description."""
    fields = fields_of(described, route)
    if "temperature" in fields:
        [number, null] = fields["temperature"]["anyOf"]
        assert (number["minimum"], number["maximum"], null) == (0, 10, {"type": "null"})
    assert fields.get("model", {"enum": [None, "m"]}) == {"enum": [None, "m"]}


def test_the_largest_n_is_told() -> None:
    schemas: Json = description(Settings(max_choices=3), MODEL)["components"]["schemas"]  # type: ignore[index]
    with_n = {name for name, schema in schemas.items() if "n" in schema.get("properties", {})}
    assert with_n >= {"ChatBody", "CompletionBody", "NativeSampling"}
    for name in with_n:
        assert {"type": "integer", "minimum": 1, "maximum": 3} in schemas[name]["properties"]["n"]["anyOf"]


def test_a_key_may_come_in_either_header(described: Json) -> None:
    schemes = described["components"]["securitySchemes"]
    assert schemes["key"] == {"type": "http", "scheme": "bearer"}
    assert schemes["x-api-key"] == {"type": "apiKey", "in": "header", "name": "x-api-key"}
    assert described["paths"]["/v1/models"]["get"]["security"] == [{"key": []}, {"x-api-key": []}]


def test_every_reference_leads_somewhere(described: Json) -> None:
    text = json.dumps(described)
    for part in text.split('"$ref": "')[1:]:
        name = part.split('"', 1)[0]
        assert name.startswith("#/components/schemas/")
        assert name.rsplit("/", 1)[1] in described["components"]["schemas"], name


@pytest.mark.parametrize("route", ROUTES.values(), ids=lambda route: route.path)
def test_statuses_are_told_with_the_form_of_their_bodies(described: Json, route: Route) -> None:
    operation = described["paths"][route.path][route.method.lower()]
    assert [int(status) for status in operation["responses"]] == list(statuses_of(route, Settings()))
    assert ("text/event-stream" in operation["responses"]["200"]["content"]) == route.is_streamable
    errors = {json.dumps(answer) for status, answer in operation["responses"].items() if int(status) in (400, 401)}
    assert len(errors) == 1
    assert ("MessagesErrorAnswer" in errors.pop()) == route.path.startswith("/v1/messages")
    assert ("security" in operation) == (route.audience is not Audience.ANYONE)


def test_errors_have_the_described_form() -> None:
    assert set(openapi.ErrorFacts.__struct_fields__) == {"message", "type", "param", "code"}
    strict = description(Settings(strict_fields=True), MODEL)
    assert strict["components"]["schemas"]["ScoreBody"]["additionalProperties"] is False  # type: ignore[index]


def test_every_operation_has_its_own_id(described: Json) -> None:
    ids = [operation["operationId"] for methods in described["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids))


def test_a_server_serves_its_description(server: Server) -> None:
    served = request(server.port, "GET", "/openapi.json").json()
    name = request(server.port, "GET", "/v1/models").json()["data"][0]["id"]
    own = replace(MODEL, name=name, defaults=SamplingDefaults())
    assert served == json.loads(json.dumps(description(Settings(), own)))


@pytest.mark.parametrize(
    ("kind", "pair"), [("GenerateBody", ("text", "input_ids")), ("TokenizeBody", ("prompt", "messages"))]
)
def test_one_of_two_fields_is_wanted(described: Json, kind: str, pair: tuple[str, str]) -> None:
    options = described["components"]["schemas"][kind]["oneOf"]
    assert [option["required"] for option in options] == [[name] for name in pair]


@pytest.mark.parametrize(
    ("kind", "defaults"),
    [
        ("ChatBody", {"temperature": 0.7, "top_p": 1.0, "top_k": 20, "min_p": 0.0, "max_tokens": None}),
        ("CompletionBody", {"temperature": 0.7, "max_tokens": 16}),
        ("NativeSampling", {"temperature": 0.7, "max_new_tokens": 128}),
        ("MessagesBody", {"top_k": 20, "stream": None}),
    ],
)
def test_defaults_are_those_that_a_request_gets(described: Json, kind: str, defaults: Json) -> None:
    fields = described["components"]["schemas"][kind]["properties"]
    assert {name: fields[name]["default"] for name in defaults} == defaults


@pytest.mark.parametrize("route", ROUTES.values(), ids=lambda route: route.path)
def test_every_route_of_the_table_is_answered(server: Server, route: Route) -> None:
    """Over the control socket all are there: an empty body may be refused, but by the route."""
    server.backend.script = OK
    body: Json | None = {} if route.form is not None else None
    if route.path in ("/flush_cache", "/pause", "/resume"):  # these wait for the scheduler
        body = {"zipzap": float("inf")}
    response = server.over_control(route.method, route.path.replace("{id}", "nobody"), body)
    assert response.status in (200, 400) or (response.status == 404 and route.has_id), response.body


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/v1/models", "/v1/models"),
        ("/v1/models/a", "/v1/models/{id}"),
        ("/v1/models/a/b", "/v1/models/{id}"),
        ("/v1/models/", None),
        ("/v1/models/{id}", "/v1/models/{id}"),
        ("/trace/{id}", "/trace/{id}"),
        ("/v1/chat/completions/", None),
        ("//live", None),
        ("/", None),
        ("", None),
    ],
)
def test_a_path_leads_to_its_route_or_nowhere(path: str, found: str | None) -> None:
    route = find_route(path)
    assert (route.path if route is not None else None) == found
