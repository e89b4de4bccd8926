"""What a server imports until it serves; the process that others are forked from imports this module."""

import fastapi  # noqa: F401
import torch.distributed  # noqa: F401
import transformers.models.auto.tokenization_auto
import transformers.models.gemma3.modeling_gemma3
import transformers.models.llama.modeling_llama  # noqa: F401
import uvicorn  # noqa: F401

import hiradix.cli
import hiradix.engine.async_engine
import hiradix.engine.ranks
import hiradix.server.app
import hiradix.server.engine_service
import hiradix.server.ranked_service
import hiradix.server.recorder
import hiradix.server.serve
import hiradix.storage.disk
import hiradix.storage.file  # noqa: F401
