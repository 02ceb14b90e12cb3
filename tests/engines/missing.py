"""A plugin of pytest in the processes of engines: what these import, and nothing here uses, without installing it."""

import sys
from unittest.mock import MagicMock

for name in ("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies", "ray.actor"):
    sys.modules[name] = MagicMock(name=name)  # 240 MB; nothing here starts a process with it
for name in ("renderers", "vllm", "monarch", "monarch.actor"):
    sys.modules[name] = MagicMock(name=name)
