"""POST /tokenize and /detokenize, as vLLM has them: a text or a conversation as token ids, and back."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from hiradix.apps.engine.api import ChatPrompt, RequestError
from hiradix.apps.server.answering import Answering
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.generation import api_error
from hiradix.apps.server.intake import read_body
from hiradix.apps.server.messages import Messages, Tools, plain_messages
from hiradix.apps.server.schema import StrictBody

MAX_TOKEN_IDS = 1 << 20


class TokenizeBody(StrictBody):
    """`prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def asked(self, answering: Answering) -> str | ChatPrompt:
        """The text or conversation to tokenise. Raises ApiError."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError("prompt: send either prompt or messages", param="prompt")
        if self.messages is None:
            return self.prompt or ""
        continues = bool(self.continue_final_message)
        opens = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        try:
            return answering.conversation(
                plain_messages(self.messages), [tool.plain() for tool in self.tools or ()],
                template_kwargs=self.chat_template_kwargs or {}, opens_answer=opens, continues_last=continues,
                add_special_tokens=bool(self.add_special_tokens),
            )  # fmt: skip
        except RequestError as error:
            raise api_error(error, "messages") from error


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

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """POST /tokenize."""
        answering = self._answering
        with answering.intake.body() as share:
            body = await read_body(request, TokenizeBody, share)
            answering.check_model(body.model)
            field = "prompt" if body.messages is None else "messages"
            special = body.add_special_tokens is not False
            ids = list(await answering.token_ids(body.asked(answering), field, None, special))
        texts = [answering.token_text(token) for token in ids] if body.return_token_strs else None
        limit = answering.service.context_length
        return {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts}

    async def detokenize(self, request: Request) -> dict[str, Any]:
        """POST /detokenize."""
        answering = self._answering
        with answering.intake.body() as share:
            body = await read_body(request, DetokenizeBody, share)
            answering.check_model(body.model)
            return {"prompt": await answering.text_beside(body.tokens)}
