"""These tests run in verl's environment: `make verl-test`, or pytest there on this folder."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

# Read by verl when it is first imported.
os.environ.setdefault("VERL_PLATFORM", "cpu")
os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "moopd.trainers.verl_plugin.register")
os.environ.setdefault("VERL_USE_EXTERNAL_PLUGINS", "none")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("verl") is not None:
        return
    here = Path(__file__).parent
    skip = pytest.mark.skip(reason="verl is not installed here: make verl-env, make verl-test")
    for item in items:
        if here in item.path.parents:
            item.add_marker(skip)
