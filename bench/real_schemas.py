"""Schemas of the kind that programs send, written for the measurement of structured output, each with its request.

Texts and lists are bounded, as an answer has to end. `SCHEMAS` is name -> (what is asked for, the schema).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def text(most: int, least: int = 0, **rest: object) -> Schema:
    """A bounded text."""
    return {"type": "string", "minLength": least, "maxLength": most, **rest}


def number(least: float, most: float, **rest: object) -> Schema:
    """A bounded number."""
    return {"type": "number", "minimum": least, "maximum": most, **rest}


def whole(least: int, most: int) -> Schema:
    """A bounded whole number."""
    return {"type": "integer", "minimum": least, "maximum": most}


def one_of(*values: object) -> Schema:
    """One of some values."""
    return {"enum": list(values)}


def many(items: Schema, most: int, least: int = 0) -> Schema:
    """A bounded list."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def record(optional: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    """An object with these keys and no others, all needed but the optional ones."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def nullable(schema: Schema) -> Schema:
    """Or null."""
    return {"anyOf": [schema, {"type": "null"}]}


DATE = {"type": "string", "format": "date"}
MOMENT = {"type": "string", "format": "date-time"}
EMAIL = {"type": "string", "pattern": r"^[a-z0-9.]{1,16}@[a-z0-9]{1,12}\.(com|org|net)$"}
CODE = {"type": "string", "pattern": "^[A-Z]{3}$"}
ADDRESS = record(
    ("unit",), street=text(40), unit=text(8), city=text(30), region=text(20),
    postalCode={"type": "string", "pattern": "^[0-9]{5}$"}, country={"type": "string", "pattern": "^[A-Z]{2}$"},
)  # fmt: skip
POSITION = {"type": "array", "prefixItems": [number(-180, 180, multipleOf=0.0001), number(-90, 90,
    multipleOf=0.0001)],
            "items": False, "minItems": 2}  # fmt: skip

SCHEMAS: Mapping[str, tuple[str, Schema]] = {
    "invoice": (
        "Write an invoice of a small bakery for a wedding cake and two trays of bread.",
        record(
            ("notes",), invoiceNumber={"type": "string", "pattern": "^INV-[0-9]{6}$"}, issued=DATE, due=DATE,
            currency=one_of("EUR", "USD", "GBP", "JPY"), seller=record(name=text(40), taxId=text(14)),
            customer=record(name=text(40), address=ADDRESS),
            lines=many(record(description=text(40), quantity=whole(1, 99), unitPrice=number(0, 9999,
                multipleOf=0.01)), 4, 1),
            total=number(0, 999999, multipleOf=0.01), paid={"type": "boolean"}, notes=text(80),
        ),
    ),
    "calendar_event": (
        "Plan a team meeting in Lisbon next spring.",
        record(
            ("recurrence",), title=text(60, 1), start=MOMENT, end=MOMENT, location=nullable(text(40)),
            attendees=many(record(email=EMAIL, status=one_of("accepted", "declined", "tentative", "none")), 4),
            recurrence=record(frequency=one_of("daily", "weekly", "monthly"), count=whole(1, 52)),
            reminders=many(whole(0, 1440), 3),
        ),
    ),
    "package_json": (
        "Describe a small npm package that formats dates.",
        {
            "$schema": DRAFT, "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-z][a-z0-9-]{0,20}$"},
                "version": {"type": "string", "pattern": "^[0-9]{1,2}\\.[0-9]{1,2}\\.[0-9]{1,2}$"},
                "description": text(80), "license": one_of("MIT", "Apache-2.0", "ISC"),
                    "private": {"type": "boolean"},
                "keywords": many(text(16), 5), "scripts": record(("lint",), build=text(40), test=text(40),
                    lint=text(40)),
                "dependencies": many(record(package=text(20, 1), range={"type": "string",
                    "pattern": "^\\^[0-9]\\.[0-9]{1,2}$"}), 4),
            },
            "required": ["name", "version", "license", "scripts"], "additionalProperties": False,
        },
    ),
    "openapi_operation": (
        "Describe one operation of a web API for a library of books.",
        record(
            ("deprecated",), operationId={"type": "string", "pattern": "^[a-z][A-Za-z]{2,20}$"},
            method=one_of("get", "post", "put", "delete"), path={"type": "string",
                "pattern": "^(/[a-z]{1,10}){1,3}$"},
            summary=text(60), deprecated={"type": "boolean"},
            parameters=many(
                {"$ref": "#/$defs/parameter"}, 3
            ),
            responses=many(record(status=one_of(200, 201, 400, 404, 500), description=text(40)), 3, 1),
        ) | {"$defs": {"parameter": {"oneOf": [
            record(**{"in": {"const": "query"}, "name": text(16, 1), "required": {"type": "boolean"}}),
            record(**{"in": {"const": "path"}, "name": text(16, 1), "required": {"const": True}}),
        ]}}},
    ),
    "geojson": (
        "Give two places in Japan as GeoJSON.",
        record(
            type={"const": "FeatureCollection"},
            features=many(record(
                type={"const": "Feature"}, properties=record(name=text(30), population=nullable(whole(0,
                    40_000_000))),
                geometry={"oneOf": [
                    record(type={"const": "Point"}, coordinates=POSITION),
                    record(type={"const": "LineString"}, coordinates=many(POSITION, 4, 2)),
                ]},
            ), 3, 1),
        ),
    ),
    "address": ("Give an address in Lyon.", ADDRESS),
    "recipe": (
        "Write a recipe for pancakes.",
        record(
            ("source",), name=text(40), servings=whole(1, 12), minutes=whole(5, 240),
            ingredients=many(record(name=text(24), amount=number(0, 5000, multipleOf=0.5), unit=one_of("g", "ml",
                "piece", "tsp", "tbsp")), 8, 2),
            steps=many(text(100), 6, 2), tags=many(one_of("vegan", "vegetarian", "quick", "dessert"), 3),
                source=text(40),
        ),
    ),
    "chat_message": (
        "Write a message of a chat between friends about a film.",
        record(
            id={"type": "string", "format": "uuid"}, author=text(20, 1), sent=MOMENT, text=text(160, 1),
            reactions=many(record(emoji=one_of("👍", "😀", "❤️", "🎉"), count=whole(1, 99)), 3),
            replyTo=nullable({"type": "string", "format": "uuid"}),
        ),
    ),
    "tool_call": (
        "What is the weather in Osaka tomorrow? Answer with a call.",
        {"oneOf": [
            record(name={"const": "get_weather"}, arguments=record(("unit",), city=text(30, 1), day=DATE,
                unit=one_of("c", "f"))),
            record(name={"const": "search_web"}, arguments=record(query=text(60, 1), results=whole(1, 10))),
            record(name={"const": "no_tool"}, arguments=record(reason=text(80))),
        ]},
    ),
    "log_event": (
        "Write a log line of a web server that ran out of memory.",
        record(
            ("stack",), timestamp=MOMENT, level=one_of("debug", "info", "warn", "error", "fatal"), service=text(20,
                1),
            message=text(120), http=nullable(record(method=one_of("GET", "POST"), path=text(40), status=whole(100,
                599), ms=number(0, 60000, multipleOf=0.1))),
            ip={"type": "string", "format": "ipv4"}, stack=many(text(60), 4),
        ),
    ),
    "product": (
        "Describe a rain jacket for a shop.",
        record(
            sku={"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"}, name=text(50, 3), price=number(0.01, 2000,
                multipleOf=0.01),
            currency=CODE, colors=many(one_of("black", "blue", "red", "green", "yellow"), 4, 1),
                sizes=many(one_of("S", "M", "L", "XL"), 4, 1),
            rating=nullable(number(0, 5, multipleOf=0.5)), dimensions=record(width=whole(1, 200), height=whole(1,
                200)), description=text(160),
        ),
    ),
    "resume": (
        "Write a short resume of a gardener.",
        record(
            ("links",), name=text(40, 1), email=EMAIL, summary=text(160), skills=many(text(24), 6, 1),
            jobs=many(record(company=text(30), title=text(30), start=DATE, end=nullable(DATE), done=many(text(60),
                3)), 3),
            links=many({"type": "string", "pattern": "^https://[a-z]{1,12}\\.(com|org)$"}, 2),
        ),
    ),
    "movie_review": (
        "Review an old film that you like.",
        record(title=text(50, 1), year=whole(1900, 2026), stars=whole(1, 5), sentiment=one_of("positive",
            "neutral", "negative"),
               pros=many(text(60), 3), cons=many(text(60), 3), spoilers={"type": "boolean"}),
    ),
    "quiz": (
        "Make a quiz of two questions about the Moon.",
        record(topic=text(30), questions=many(record(question=text(100, 5), options=many(text(40, 1), 4, 4),
            answer=whole(0, 3)), 3, 1)),
    ),
    "bank_transfer": (
        "Write an order for a bank transfer of 50 euros.",
        record(("memo",), **{"from": {"type": "string", "pattern": "^DE[0-9]{20}$"}, "to": {"type": "string",
            "pattern": "^DE[0-9]{20}$"}},
               amount=number(0.01, 100000, multipleOf=0.01), currency=one_of("EUR"), due=DATE, memo=text(60)),
    ),
    "kubernetes_deployment": (
        "Write a Kubernetes deployment of nginx.",
        record(
            apiVersion={"const": "apps/v1"}, kind={"const": "Deployment"},
            metadata=record(name={"type": "string", "pattern": "^[a-z][a-z0-9-]{0,20}$"},
                labels=record(app=text(20, 1))),
            spec=record(replicas=whole(1, 20), containers=many(record(
                ("env",), name=text(20, 1), image={"type": "string", "pattern": "^[a-z]{1,12}:[0-9]\\.[0-9]{1,2}$"},
                ports=many(record(containerPort=whole(1, 65535)), 2), env=many(record(name={"type": "string",
                    "pattern": "^[A-Z_]{1,16}$"}, value=text(30)), 3),
            ), 2, 1)),
        ),
    ),
    "comment_thread": (
        "Write a thread of comments under an article about bicycles.",
        {
            "$ref": "#/$defs/comment",
            "$defs": {"comment": record(author=text(20, 1), text=text(80), likes=whole(0, 999),
                replies=many({"$ref": "#/$defs/leaf"}, 2)),
                      "leaf": record(author=text(20, 1), text=text(60), likes=whole(0, 999))},
        },
    ),
    "expression_tree": (
        "Give the tree of 2 * (3 + 4).",
        {
            "$ref": "#/$defs/two",
            "$defs": {
                "two": {"anyOf": [record(op=one_of("+", "-", "*", "/"), left={"$ref": "#/$defs/one"},
                    right={"$ref": "#/$defs/one"}), whole(-99, 99)]},
                "one": {"anyOf": [record(op=one_of("+", "-", "*", "/"), left=whole(-99, 99), right=whole(-99, 99)),
                    whole(-99, 99)]},
            },
        },
    ),
    "medical_triage": (
        "A patient has a cough and fever. Fill in the form.",
        record(age=whole(0, 120), symptoms=many(record(name=text(30, 1), severity=whole(1, 10), days=whole(0, 60)),
            5, 1),
               temperature=nullable(number(34, 43, multipleOf=0.1)), allergies=many(text(24), 3),
                   urgency=one_of("low", "medium", "high", "emergency")),
    ),
    "flight_booking": (
        "Book a flight from Paris to Tokyo for two.",
        record(
            passengers=many(record(firstName=text(20, 1), lastName=text(20, 1), born=DATE,
                meal=nullable(one_of("vegan", "halal", "kosher"))), 3, 1),
            legs=many(record(origin=CODE, destination=CODE, departure=MOMENT, cabin=one_of("economy", "business",
                "first")), 3, 1),
            price=number(1, 20000, multipleOf=0.01), refundable={"type": "boolean"},
        ),
    ),
    "entities": (
        'Find the entities in: "Marie Curie worked in Paris and won the Nobel Prize in 1903."',
        record(entities=many(record(text=text(40, 1), type=one_of("person", "place", "organization", "date",
            "other"), start=whole(0, 200), end=whole(0, 200)), 6)),
    ),
    "sensor_reading": (
        "Give the readings of a weather station.",
        record(
            device={"type": "string", "pattern": "^[0-9a-f]{12}$"}, at=MOMENT, battery=whole(0, 100),
            readings=many({"anyOf": [
                record(kind={"const": "temperature"}, celsius=number(-60, 60, multipleOf=0.1)),
                record(kind={"const": "wind"}, speed=number(0, 90, multipleOf=0.1), direction=whole(0, 359)),
                record(kind={"const": "rain"}, millimetres=number(0, 500, multipleOf=0.1)),
            ]}, 5, 1),
        ),
    ),
    "settings_patch": (
        "Turn on dark mode and set the font to 14.",
        record(("theme", "fontSize", "language", "plugins"), theme=one_of("light", "dark", "system"),
            fontSize=whole(8, 32),
               language={"type": "string", "pattern": "^[a-z]{2}(-[A-Z]{2})?$"}, plugins=many(record(id=text(20,
                   1), enabled={"type": "boolean"}), 4)),
    ),
    "translation": (
        "Translate 'good morning' into French, German and Japanese.",
        record(source=text(40, 1), translations=many(record(language=one_of("fr", "de", "ja"), text=text(40, 1),
            confidence=number(0, 1, multipleOf=0.01)), 3, 1)),
    ),
}  # fmt: skip
