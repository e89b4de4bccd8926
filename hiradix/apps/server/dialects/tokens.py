"""POST /tokenize and /detokenize, as vLLM has them: a text or a conversation as token ids, and back."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from hiradix.apps.engine.api import ChatPrompt
from hiradix.apps.server.answering import Answering
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.intake import read_body
from hiradix.apps.server.messages import Messages, RenderedBody, Tools, plain_messages
from hiradix.apps.server.schema import StrictBody

MAX_TOKEN_IDS = 1 << 20
MANY_TOKENS = 4096
"""To show more of them is work beside the event loop."""


class TokenizeBody(RenderedBody):
    """`prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None

    def asked(self, answering: Answering) -> str | ChatPrompt:
        """The text or conversation to tokenise. Raises ApiError."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError("prompt: send either prompt or messages", param="prompt")
        if self.messages is None:
            return self.prompt or ""
        tools = [tool.plain() for tool in self.tools or ()]
        return self.conversation(answering, plain_messages(self.messages), tools)


class DetokenizeBody(StrictBody):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MAX_TOKEN_IDS)]


class TokenEndpoints:
    """Both endpoints over one model's tokenizer."""

    def __init__(self, answering: Answering):
        self._answering = answering
        self.router = APIRouter()
        self.router.add_api_route("/tokenize", self.tokenize, methods=["POST"])
        self.router.add_api_route("/detokenize", self.detokenize, methods=["POST"])

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        answering = self._answering
        with answering.intake.body() as share:
            body = await read_body(request, TokenizeBody, share)
            answering.check_model(body.model)
            field = "prompt" if body.messages is None else "messages"
            special = body.add_special_tokens is not False
            ids = list(await answering.token_ids(body.asked(answering), field, None, special))
        if len(ids) > MAX_TOKEN_IDS:
            raise ApiError(f"{field}: has more than {MAX_TOKEN_IDS} tokens", param=field)

        def shown() -> Response:
            texts = [answering.token_text(token) for token in ids] if body.return_token_strs else None
            limit = answering.service.context_length
            return JSONResponse(
                {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts}
            )

        return await answering.show(shown, is_long=len(ids) > MANY_TOKENS)

    async def detokenize(self, request: Request) -> dict[str, Any]:
        """POST /detokenize."""
        answering = self._answering
        with answering.intake.body() as share:
            body = await read_body(request, DetokenizeBody, share)
            answering.check_model(body.model)
            return {"prompt": await answering.text_beside(body.tokens)}
