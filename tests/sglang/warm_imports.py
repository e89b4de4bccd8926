"""What SGLang imports until it serves; the process that others are forked from imports this module."""

import os
from importlib import import_module

from tests.sglang.server import CHECKS, ON_CPU

os.environ.update(ON_CPU | CHECKS)
for name in (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.llama",
    "hiradix.adapters.sglang.cache",
    "hiradix.storage.backends.file.backend",
):
    import_module(name)
