"""Tests on CUDA: saves run in the agent, and cuBLAS gives equal results in equal runs."""

from tests.device.conftest import background

__all__ = ["background"]
