"""Effects × roles × ways: what can be done to a store or a server, which role each effect takes, and every way that leads to it.

Roles belong to effects, never to addresses: two ways to one effect take one role. Tests compare these tables with the routes, actions,
commands and library calls that there are; a new way without an effect fails them. Commands and the library have no roles: who may write
the store's files may do what they do. They are listed all the same, so that an effect's ways are known, and written down (``audited``).
"""

from __future__ import annotations

from typing import NamedTuple

ROLES = ("viewer", "operator", "admin")
"""From the role that may least; each may also do what the roles before it may."""


class Effect(NamedTuple):
    """What happens. ``role``: the least role of a token that may cause it; empty if no server does that. ``changes``: it is audited."""

    role: str
    changes: bool
    what: str


EFFECTS: dict[str, Effect] = {
    "nothing": Effect("", False, "answer without showing or changing anything of a store"),
    "read": Effect("viewer", False, "show runs, checkpoints and what happened to them"),
    "end session": Effect("viewer", False, "end one's own session"),
    "read audit": Effect("operator", False, "show the audit log"),
    "read settings": Effect("admin", False, "show tokens, alerts and retention"),
    "tag": Effect("operator", True, "move or remove a tag that is no stage"),
    "note": Effect("operator", True, "write a note on a checkpoint or a run"),
    "create run": Effect("operator", True, "make a run"),
    "hold": Effect("operator", True, "hold a checkpoint, or release it"),
    "verify": Effect("operator", True, "read every byte, and record what is damaged"),
    "request save": Effect("operator", True, "have a job save"),
    "drill": Effect("operator", True, "rehearse failures on copies, or on a job"),
    "stage": Effect("admin", True, "move or empty a stage, such as production"),
    "retire": Effect("admin", True, "retire or delete checkpoints"),
    "undelete": Effect("admin", True, "bring retired checkpoints back"),
    "revoke token": Effect("admin", True, "have a token open nothing any more"),
    "make token": Effect("", True, "make a token"),
    "add checkpoints": Effect("", True, "write checkpoints into a run"),
    "repair": Effect("", True, "rewrite damaged or lost parts of a store"),
    "take out": Effect("", True, "write what a checkpoint holds to a place that is no store"),
    "change keys": Effect("", True, "change who can open an encrypted store"),
    "run job": Effect("", False, "start, stop or watch processes of this machine"),
}

ACTIONS: dict[str, tuple[str, ...]] = {
    "tag": ("tag",),
    "branch": ("create run",),
    "pin": ("hold",),
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
            "/", "/events", "/compare", "/lineage", "/storage", "/incidents", "/incidents/{store}/{run}/{which}", "/risk", "/tasks/{task}",
            "/runs/{store}/{run}", "/runs/{store}/{run}/checkpoints/{which:path}",
            *(
                f"/api/v1{path}"
                for path in (
                    "/stores", "/runs", "/runs/{store}/{run}", "/runs/{store}/{run}/checkpoints",
                    "/runs/{store}/{run}/checkpoints/{which:path}", "/runs/{store}/{run}/checkpoints/{which:path}/values", "/diff",
                    "/lineage/{store}", "/storage/{store}", "/incidents", "/incidents/{store}/{run}/{which}", "/risk", "/tasks",
                    "/tasks/{task}", "/openapi.json",
                )
            ),
        )
    },
}  # fmt: skip
"""The effect of each method and address of ``relight serve``; "by action" takes the role of the action that is named."""

COMMANDS: dict[str, tuple[str, ...]] = {
    "tag": ("tag",),
    "branch": ("create run",),
    "note": ("note",),
    "hold": ("hold",),
    "promote": ("stage",),
    "prune": ("retire",),
    "undelete": ("undelete",),
    "recover": ("repair",),
    "scrub": ("repair",),
    "cp": ("create run", "add checkpoints"),
    "push": ("create run", "add checkpoints", "tag"),
    "pull": ("create run", "add checkpoints", "tag"),
    "import": ("create run", "add checkpoints"),
    "migrate": ("create run", "add checkpoints", "retire"),
    "repack": ("add checkpoints",),
    "export": ("take out",),
    "keys": ("change keys",),
    "rekey": ("change keys",),
    "save": ("request save",),
    "verify": ("verify",),
    "drill": ("drill",),
    "token": ("make token", "revoke token"),
    "audit": ("read audit",),
    "doctor": ("repair",),
    **dict.fromkeys(("run", "drain", "serve", "prove", "bench", "demo", "simulate", "predict"), ("run job",)),
}
"""Effects of commands that do more than show something."""

SHOWING = (
    "ls", "show", "log", "diff", "describe", "incidents", "goodput", "explain", "plan", "preset", "top", "metrics", "trace", "alerts",
    "config", "ready", "completion", "version",
)  # fmt: skip
"""Commands whose effect is "read", or nothing at all."""

LIBRARY: dict[str, tuple[str, ...]] = {
    "Store.tag": ("tag",),
    "Store.branch": ("create run",),
    "Store.promote": ("stage",),
    "Store.prune": ("retire",),
    "Store.verify": ("read",),
    "Run.tag": ("tag",),
    "save": ("create run", "add checkpoints"),
    "Checkpointer.save": ("create run", "add checkpoints", "tag"),
    **dict.fromkeys(
        (
            "Store.checkpoints", "Store.latest", "Store.plan_prune", "Store.run", "Store.runs",
            "Run.history", "Run.open", "Run.require_whole_log", "Run.view", "load", "open",
        ),
        ("read",),
    ),
}  # fmt: skip
"""Effects of library calls on a store, beyond a job's own saves."""


def role_of(effect: str) -> str:
    """Return the least role that may cause an effect. An effect that no server may cause takes a role that no token has."""
    return EFFECTS[effect].role or "nobody"


def role_of_action(verb: str) -> str:
    """Return the least role that may do all that an action of the server does; ``admin`` for an action that there is not."""
    roles = [role_of(effect) for effect in ACTIONS.get(verb, ("revoke token",))]
    return max(roles, key=ROLES.index)
