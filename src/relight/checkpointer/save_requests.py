"""Build what a save is requested with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relight.capture import Captured, class_paths
from relight.commit import SaveInfo, SaveRequest
from relight.commit.pack_writer import WriteLimits
from relight.format import encode_tree
from relight.format.class_names import CLASSES
from relight.save_reason import SaveReason


def user_of(
    metadata: Mapping[str, Any], words: Mapping[str, Any], components: Mapping[str, object], micro_step: int | None
) -> dict[str, Any]:
    """Return a checkpoint's metadata: the caller's, the results of comparing ranks, and what a restore needs to
    know."""
    micro = {} if micro_step is None else {"relight.micro_step": micro_step}
    return {**metadata, **words, **micro, CLASSES: class_paths(components)}


def info_of(
    state: Captured,
    step: int,
    reason: SaveReason,
    metrics: Mapping[str, float],
    user: dict[str, Any],
    environment: dict[str, Any],
    parent: str | None,
    tag: str | None = None,
) -> SaveInfo:
    """Return what the checkpoint of a captured state records, as a child of the checkpoint ``parent``."""
    return SaveInfo(step, reason, metrics, user, environment, state.kinds, state.notes, [parent] if parent else [], tag)


def request_of(state: Captured, info: SaveInfo, pace: WriteLimits | None = None) -> SaveRequest:
    """Return the request for a save that this process makes itself."""
    return SaveRequest(info, tree=encode_tree(state.tree), items=state.items, urgent=info.reason.is_urgent, pace=pace)
