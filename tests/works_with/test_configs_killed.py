"""A job with a configuration of Hydra, argparse or pydantic is killed twice: each loss as without a kill, and the configuration is in each checkpoint."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.plugins.killing import killed_and_resumed

import relight

pytestmark = pytest.mark.slow
STORED: dict[str, dict[str, Any]] = {
    "argparse": {"rate": 1e-3, "width": 24},
    "pydantic": {"rate": 1e-3, "width": 24},
    "hydra": {"rate": 1e-3, "width": 24, "half": "12"},
}
TOOLS = {
    "argparse": ("argparse", "", "the `Namespace` is a component: it comes back as a `Namespace`"),
    "pydantic": ("pydantic", "pydantic", "the model is a component: `relight.load` returns its fields as a dict"),
    "hydra": ("Hydra", "hydra-core", "the `DictConfig` is a component: `relight.load` returns a dict, interpolations resolved"),
}  # fmt: skip


@pytest.mark.parametrize(
    "tool",
    [
        pytest.param(
            tool,
            marks=[
                pytest.mark.shows(tool=name, package=package, feature="killed and resumed", outcome="exact", why=what),
                pytest.mark.skipif(not find_spec(tool), reason=f"{tool} is not installed: make trackers"),
            ],
        )
        for tool, (name, package, what) in TOOLS.items()
    ],
)
def test_a_job_with_a_configuration_resumes_to_the_bit(tool: str, tmp_path: Path) -> None:
    """The newest checkpoint has the values with which the job ran."""
    killed_and_resumed(["-m", "tests.works_with.config_job", tool], [17, 43], tmp_path)
    config = relight.load(tmp_path / "killed" / "run")["config"]
    assert {name: config[name] for name in STORED[tool]} == STORED[tool]
