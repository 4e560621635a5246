"""Authorization tables: the effects on a store or a server, the role that each requires, and the routes and actions that cause it.

Roles belong to effects, never to addresses: all routes to one effect require the same role. Tests compare these tables with the
existing routes and actions, and fail for a new one without an effect. Commands declare their effects in ``relight.cli.COMMANDS``: they
require no role, only access to the store's files, and are audited (``cli.audited``).
"""

from __future__ import annotations

from typing import NamedTuple

ROLES = ("viewer", "operator", "admin")
"""From the least privileged; each role includes the permissions of the roles before it."""


class Effect(NamedTuple):
    """An effect. ``role``: the least role that may cause it; empty if no server causes it. ``changes``: whether it is audited."""

    role: str
    changes: bool
    what: str


EFFECTS: dict[str, Effect] = {
    "nothing": Effect("", False, "answer without showing or changing anything of a store"),
    "read": Effect("viewer", False, "show runs, checkpoints and what happened to them"),
    "end session": Effect("viewer", False, "end one's own session"),
    "read audit": Effect("operator", False, "show the audit log"),
    "read settings": Effect("admin", False, "show tokens, alerts and retention"),
    "tag": Effect("operator", True, "move or remove a tag that is not a stage"),
    "note": Effect("operator", True, "write a note on a checkpoint or a run"),
    "create run": Effect("operator", True, "create a run"),
    "hold": Effect("operator", True, "hold a checkpoint, or release it"),
    "verify": Effect("operator", True, "read every byte, and record what is damaged"),
    "request save": Effect("operator", True, "request a save from a job"),
    "drill": Effect("operator", True, "rehearse failures on copies, or on a job"),
    "stage": Effect("admin", True, "move or empty a stage, such as production"),
    "retire": Effect("admin", True, "retire or delete checkpoints"),
    "undelete": Effect("admin", True, "bring retired checkpoints back"),
    "revoke token": Effect("admin", True, "revoke a token"),
    "make token": Effect("", True, "create a token"),
    "add checkpoints": Effect("", True, "write checkpoints into a run"),
    "repair": Effect("", True, "rewrite damaged or lost parts of a store"),
    "take out": Effect("", True, "write the contents of a checkpoint outside any store"),
    "change keys": Effect("", True, "change who can open an encrypted store"),
    "run job": Effect("", False, "start, stop or watch processes of this machine"),
}

ACTIONS: dict[str, tuple[str, ...]] = {
    "tag": ("tag",),
    "branch": ("create run",),
    "hold": ("hold",),
    "verify": ("verify",),
    "save": ("request save",),
    "drill": ("drill",),
    "prune": ("retire",),
    "promote": ("stage",),
    "revoke": ("revoke token",),
}
"""Effects of the server's actions, by page and by API."""

ROUTES: dict[tuple[str, str], str] = {
    ("GET", "/healthz"): "nothing",
    ("GET", "/readyz"): "nothing",
    ("GET", "/login"): "nothing",
    ("POST", "/login"): "nothing",
    ("POST", "/logout"): "end session",
    ("GET", "/audit"): "read audit",
    ("GET", "/api/v1/audit"): "read audit",
    ("GET", "/settings"): "read settings",
    ("GET", "/api/v1/settings"): "read settings",
    ("POST", "/api/v1/actions/{verb}"): "by action",
    **{("POST", f"/act/{verb}"): effects[0] for verb, effects in ACTIONS.items()},
    **{
        ("GET", path): "read"
        for path in (
            "/", "/events", "/charts", "/api",
            "/compare", "/lineage", "/storage", "/incidents", "/incidents/{store}/{run}/{which}", "/risk", "/tasks/{task}",
            "/runs/{store}/{run}", "/runs/{store}/{run}/log", "/runs/{store}/{run}/checkpoints/{which:path}",
            *(
                f"/api/v1{path}"
                for path in (
                    "/stores", "/runs", "/runs/{store}/{run}", "/runs/{store}/{run}/series", "/runs/{store}/{run}/checkpoints",
                    "/runs/{store}/{run}/checkpoints/{which:path}", "/runs/{store}/{run}/checkpoints/{which:path}/values", "/diff",
                    "/lineage/{store}", "/storage/{store}", "/incidents", "/incidents/{store}/{run}/{which}", "/risk", "/alerts", "/tasks",
                    "/tasks/{task}", "/openapi.json",
                )
            ),
        )
    },
}  # fmt: skip
"""The effect of each method and address of ``relight serve``; "by action" takes the role of the action that is named."""


def role_of(effect: str) -> str:
    """Return the least role that may cause an effect. An effect that no server may cause takes a role that no token has."""
    return EFFECTS[effect].role or "nobody"


def role_of_action(verb: str) -> str:
    """Return the least role that may cause all effects of a server action; ``admin`` for an unknown action."""
    roles = [role_of(effect) for effect in ACTIONS.get(verb, ("revoke token",))]
    return max(roles, key=ROLES.index)
