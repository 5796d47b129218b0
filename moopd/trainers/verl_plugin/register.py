"""Named in VERL_USE_EXTERNAL_MODULES: verl imports this in every one of its processes."""

from __future__ import annotations

import os
from importlib import import_module

from moopd.trainers.verl_plugin import spec

_ON_CPU = os.environ.get("VERL_PLATFORM") == "cpu"

if _ON_CPU:
    import_module(f"{spec.__package__}.cpu_platform")  # before anything looks at the device
import_module(f"{spec.__package__}.agent_loop")
import_module(f"{spec.__package__}.trainer")
if _ON_CPU:
    import_module(f"{spec.__package__}.cpu")
