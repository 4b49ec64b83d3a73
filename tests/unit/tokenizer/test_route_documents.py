"""docs/api.md has every field of the routes beside chat and completions, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.tokenizer.native_schema import DEFAULT_NEW_TOKENS, NativeSampling
from services.tokenizer.routes import ROUTES

DOCUMENT = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
SECTIONS = {
    "Responses: POST /v1/responses": ("/v1/responses",),
    "Messages: POST /v1/messages": ("/v1/messages", "/v1/messages/count_tokens"),
    "Native: POST /generate": ("/generate",),
    "What the model would see: POST /tokenize, /detokenize, /v1/chat/completions/render": ("/tokenize", "/detokenize"),
    "Embeddings and scores: POST /v1/embeddings, /v1/score": ("/v1/embeddings", "/v1/score"),
    "Control": ("/flush_cache", "/abort_request", "/pause", "/resume"),
}
OF_CHAT_AND_COMPLETIONS = {"/v1/chat/completions", "/v1/completions", "/v1/chat/completions/render"}


def section_of(title: str) -> str:
    return re.split(r"\n## ", DOCUMENT.split(f"\n## {title}\n", 1)[1])[0]


@pytest.mark.parametrize("title", SECTIONS)
def test_the_fields_of_a_section_are_those_of_its_routes(title: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w[\w ]*) \|", section_of(title), re.MULTILINE)
    forms = [form for path in SECTIONS[title] if (form := ROUTES[path].form) is not None]
    unbuilt = {name for form in forms for name in form.unbuilt}
    without_effect = {name for form in forms for name in form.without_effect}
    fields = {name for form in forms for name in form.kind.__struct_fields__}
    documented = dict(rows)
    assert len(documented) == len(rows)
    assert set(documented) == fields | unbuilt | without_effect
    assert {name for name, kind in documented.items() if kind == "not built"} == unbuilt - fields
    assert without_effect <= {name for name, kind in documented.items() if kind == "without effect"}


def test_every_route_with_a_body_has_its_section() -> None:
    with_body = {path for path, route in ROUTES.items() if route.form is not None}
    assert with_body == OF_CHAT_AND_COMPLETIONS.union(*SECTIONS.values())


def test_the_sampling_params_are_those_of_the_struct() -> None:
    paragraph = section_of("Native: POST /generate").split("`sampling_params`:")[1].split("A list of prompts")[0]
    assert set(re.findall(r"`(\w+)`", paragraph)) == set(NativeSampling.__struct_fields__)
    assert f"`max_new_tokens` ({DEFAULT_NEW_TOKENS};" in paragraph
