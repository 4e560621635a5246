"""Template values of the page that lists the API's addresses, from its schema. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

METHODS = ("get", "post")


def rows(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each address of an OpenAPI schema. Addresses that need no values are links."""
    listed = []
    for path, item in schema.get("paths", {}).items():
        for method in METHODS:
            if (operation := item.get(method)) is None:
                continue
            asked = [each for each in operation.get("parameters", ()) if each.get("in") == "query"]
            needs = "{" in path or any(each.get("required") for each in asked)
            listed.append(
                {
                    "method": method.upper(),
                    "path": path,
                    "href": path if method == "get" and not needs else "",
                    "what": operation.get("summary", ""),
                    "asked": [(each["name"], each.get("description", "")) for each in asked],
                }
            )
    return listed
