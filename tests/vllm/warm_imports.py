"""What vLLM imports until it serves; the process that others are forked from imports this module."""

import os
from importlib import import_module

from tests.vllm.play import FIRST

for name, value in FIRST.items():
    os.environ.setdefault(name, value)
for name in (
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "hiradix.adapters.vllm.connector",
    "hiradix.storage.backends.file.backend",
):
    import_module(name)
