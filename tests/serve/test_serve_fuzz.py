"""Requests to the API from its own schema, a slice of ``make fuzz``, with valid and invalid values, from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from tests.serve.made_server import Server, serving
from tests.serve.many_runs import make_many_runs

ROUNDS = 40
"""Number of requests of each operation."""
ODD = [
    "", " ", "latest", "best", "0", "-1", "1", "99999999999999999999999", "1e999", "NaN", "null", "true", "[]", "{}", "..", "../../etc/passwd", "..\\..\\x", "%2e%2e%2f",
    "%252e%252e", "/", "//", "\\", ".", "run-000", "run-000@latest", "runs/run-000@100", "runs/run-000@../..", "a" * 401, "ü", "\u202e", "\x00", "\r\nset-cookie: a=b",
    "\U0001f600", "'; DROP TABLE tokens; --", "<script>alert(1)</script>", "=cmd|' /C calc'!A0", "step=100", "step=-1", "@", "@@@", "tag:", "{{7*7}}", "\ud800", "-0",
]  # fmt: skip
LEAKS = ("Traceback", 'File "/', "site-packages", "sqlite3.")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server with two runs of three checkpoints."""
    root = tmp_path_factory.mktemp("fuzz")
    with serving([make_many_runs(root / "runs", 2, 3)], root) as made:
        yield made


def operations(schema: Any) -> list[tuple[str, str, Any]]:
    """Return each operation: method, address, and the schema's description."""
    return [
        (method, path, operation) for path, methods in schema["paths"].items() for method, operation in methods.items()
    ]


def odd(rng: random.Random) -> Any:
    """Return a random JSON value."""
    kinds = [None, True, -1, 2**70, 1.5, [], {}, ["a"], {"a": {"b": []}}, rng.choice(ODD)]
    return rng.choice(kinds)


def body(rng: random.Random) -> Any:
    """Return the body of an action, nearly valid or invalid."""
    names = ["store", "run", "which", "name", "to", "stage", "keep_last", "id", "role", "__proto__", rng.choice(ODD)]
    good = {"store": "runs", "run": "run-001", "which": "latest"}
    fields = good | {name: rng.choice(ODD) for name in rng.sample(names, rng.randrange(5))}
    made: Any = {"fields": fields}
    for _ in range(rng.randrange(3)):
        spoilt = rng.randrange(5)
        if spoilt == 0:
            made["confirm"] = odd(rng)
        elif spoilt == 1:
            made[rng.choice(["role", "admin", "fields"])] = odd(rng)
        elif spoilt == 2:
            made["fields"] = {**fields, "which": odd(rng)}
        elif spoilt == 3:
            return odd(rng)
    return made


def encoded(text: str) -> str:
    """Quote a text for an address. A lone surrogate becomes invalid bytes."""
    return quote(text.encode("utf-8", "surrogatepass"), safe="")


def asked(server: Server, rng: random.Random, method: str, path: str, operation: Any) -> tuple[Any, str]:
    """Send one request. Return the answer and a description of the request."""
    address, query = path, []
    for parameter in operation.get("parameters", []):
        right = {
            "store": "runs",
            "run": "run-001",
            "which": "latest",
            "verb": rng.choice(["tag", "verify", "prune", "save"]),
        }.get(parameter["name"], "runs/run-001@latest")
        value = right if rng.random() < 0.5 else rng.choice(ODD)
        if parameter["in"] == "path":
            address = address.replace("{" + parameter["name"] + "}", encoded(value))
        elif rng.random() < 0.8:
            query.append(f"{parameter['name']}={encoded(value)}")
    address += "?" + "&".join(query) if query else ""
    role = rng.choice(["admin", "admin", "operator", "viewer", "scoped"])
    if method == "get":
        return server.get(address, role), f"GET {address}"
    data = json.dumps(body(rng)).encode() if rng.random() < 0.9 else rng.randbytes(rng.randrange(60))
    return server.post(
        address, role, content=data, headers={"content-type": "application/json"}
    ), f"POST {address} {data[:200]!r}"


def test_no_question_however_put_is_too_much(server: Server) -> None:
    """Forty requests of each operation cause no 5xx and no traceback. Each answer is JSON; an error has a text."""
    schema = server.get("/api/v1/openapi.json").json()
    rng, seen = random.Random(20_260_801), dict[int, int]()
    assert len(operations(schema)) >= 13
    for method, path, operation in operations(schema):
        for _ in range(ROUNDS):
            answer, how = asked(server, rng, method, path, operation)
            seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
            assert answer.status_code < 500, (how, answer.status_code, answer.text[:300])
            assert not any(leak in answer.text for leak in LEAKS), how
            assert "set-cookie" not in answer.headers, how
            if answer.status_code >= 400 and answer.status_code not in (404, 405):
                assert answer.json()["error"]["what"], how
            elif answer.status_code == 200:
                answer.json()
    assert min(seen.get(status, 0) for status in (200, 404, 422)) >= 20, seen


def test_what_was_asked_oddly_has_changed_nothing(server: Server) -> None:
    """No digest was guessed, so no action was executed: the runs and their tags are unchanged."""
    for name in ("run-000", "run-001"):
        answer = server.get(f"/api/v1/runs/runs/{name}", "admin").json()
        assert answer["row"]["checkpoints"] == 3 and answer["tags"] == [], name
    assert {row["run"] for row in server.get("/api/v1/runs", "admin").json()["rows"]} == {"run-000", "run-001"}


def test_the_schema_names_every_route_and_its_version(server: Server) -> None:
    """Each route of the API is in the schema, and all have the same version."""
    paths = server.get("/api/v1/openapi.json").json()["paths"]
    assert all(path.startswith("/api/v1/") for path in paths)
    assert {
        "/api/v1/runs",
        "/api/v1/runs/{store}/{run}/checkpoints",
        "/api/v1/actions/{verb}",
        "/api/v1/audit",
    } <= paths.keys()
