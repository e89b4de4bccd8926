"""What vLLM imports until it serves; the process that others are forked from imports this module."""

import os

from tests.vllm.play import FIRST

for _name, _value in FIRST.items():
    os.environ.setdefault(_name, _value)

import vllm  # noqa: E402, F401
import vllm.entrypoints.openai.api_server  # noqa: E402, F401
import vllm.model_executor.models.llama  # noqa: E402, F401
import vllm.v1.engine.core  # noqa: E402, F401
import vllm.v1.executor.uniproc_executor  # noqa: E402, F401
import vllm.v1.worker.cpu_worker  # noqa: E402, F401

import hiradix.adapters.vllm.connector  # noqa: E402, F401
import hiradix.storage.backends.file.backend  # noqa: E402, F401
