"""``make fuzz``: schemathesis sends valid and invalid requests to the API, made from its schema, as each role.

The server has a real store. A status of 5xx, an answer outside the schema, or a traceback in an answer ends the run, and
the request is printed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from tests.serve.made_server import FREE, HOST
from tests.serve.many_runs import make_many_runs
from tests.serve.test_serve_fuzz import LEAKS

from relight.serve.app import ServerSettings, create_app

ROLES = ("admin", "operator", "viewer", "scoped")
NOT_ASKED = [positive_data_acceptance]
"""Names of unknown runs are well formed, but refused: no schema has the existing runs."""
SCHEMA = "/api/v1/openapi.json"


def ask(
    operation: Any, mode: GenerationMode, headers: dict[str, str], examples: int, number: int, seen: Counter[int]
) -> None:
    """Request one operation as one role. An error names the request."""

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def asked(case: Any) -> None:
        response = case.call(headers=headers)
        seen[response.status_code] += 1
        text = response.text
        assert not any(leak in text for leak in LEAKS), text[:300]
        case.validate_response(response, headers=headers, excluded_checks=NOT_ASKED)

    asked()


def main() -> int:
    """Request all operations as all roles, validly and invalidly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=100, help="questions of each operation, role and kind")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relight-fuzz-") as where:
        root = Path(where)
        app = create_app(ServerSettings([str(make_many_runs(root / "runs", 3, 5))], root / "serve.sqlite", rules=FREE))
        tokens = {role: app.state.store.new_token(role, role)[1] for role in ROLES[:3]} | {
            "scoped": app.state.store.new_token("s", "admin", "runs/run-000")[1]
        }
        for reader in app.state.readers:
            reader.poll()
        seen, begun = Counter[int](), time.monotonic()
        schema = schemathesis.openapi.from_asgi(
            SCHEMA, app, headers={"authorization": f"Bearer {tokens['admin']}", "host": HOST.partition("//")[2]}
        )
        for number, result in enumerate(schema.get_all_operations()):
            operation = result.ok()
            for role in ROLES:
                headers = {"authorization": f"Bearer {tokens[role]}", "host": HOST.partition("//")[2]}
                for mode in GenerationMode:
                    if (
                        mode is not GenerationMode.NEGATIVE
                        or operation.query
                        or operation.path_parameters
                        or operation.body
                    ):
                        ask(operation, mode, headers, options.examples, options.seed + number, seen)
            print(
                f"{operation.method.upper():5} {operation.path:45} {sum(seen.values()):>7,} asked, {time.monotonic() - begun:4.0f} s",
                flush=True,
            )
    print("answers: " + ", ".join(f"{count:,} of {status}" for status, count in sorted(seen.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
