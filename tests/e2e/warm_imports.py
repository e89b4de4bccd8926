"""What a server imports until it serves; the process that others are forked from imports this module."""

import fastapi  # noqa: F401
import torch.distributed  # noqa: F401
import transformers.models.auto.tokenization_auto
import transformers.models.gemma3.modeling_gemma3
import transformers.models.llama.modeling_llama  # noqa: F401
import uvicorn  # noqa: F401

import hiradix.apps.engine.async_engine
import hiradix.apps.engine.ranks
import hiradix.apps.server.app
import hiradix.apps.server.engine_service
import hiradix.apps.server.ranked_service
import hiradix.apps.server.recorder
import hiradix.apps.server.serve
import hiradix.cli
import hiradix.storage.backends.disk
import hiradix.storage.backends.file.backend  # noqa: F401
