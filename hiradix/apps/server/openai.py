"""The endpoints under /v1 that OpenAI's clients call, and what hiradix adds: hints about conversations."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hiradix.apps.server.answering import Answering, AnswerJob, new_id
from hiradix.apps.server.auth import caller_of
from hiradix.apps.server.dialects.chat import ChatBody, ChatRenderer
from hiradix.apps.server.dialects.completions import CompletionBody, CompletionRenderer
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.fields import CHAT, COMPLETIONS
from hiradix.apps.server.intake import read_body
from hiradix.apps.server.render import Envelope
from hiradix.apps.server.sampling import GenerationBody
from hiradix.apps.server.schema import session_of
from hiradix.apps.server.session import SessionBody
from hiradix.errors import Misuse


class OpenAI:
    """The OpenAI endpoints over one engine."""

    def __init__(self, answering: Answering):
        self._answering = answering
        self.router = APIRouter(prefix="/v1")
        self.router.add_api_route("/completions", self.completions, methods=["POST"])
        self.router.add_api_route("/chat/completions", self.chat, methods=["POST"])
        self.router.add_api_route("/end_of_session", self.end_of_session, methods=["POST"])
        self.router.add_api_route("/keep_alive", self.keep_alive, methods=["POST"])
        self.router.add_api_route("/models", self.models, methods=["GET"])
        self.router.add_api_route("/models/{name:path}", self.model, methods=["GET"])

    async def models(self) -> dict[str, Any]:
        """GET /v1/models: the one model this server has, under each of its names."""
        return {"object": "list", "data": [self._model_card(name) for name in self._answering.names]}

    async def model(self, name: str) -> dict[str, Any]:
        """GET /v1/models/{name}."""
        return self._model_card(self._answering.check_model(name))

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answering.answer(request, await self._completion_job(request))

    async def _completion_job(self, request: Request) -> AnswerJob:
        answering = self._answering
        with answering.intake.body() as share:
            body = await read_body(request, CompletionBody, share, COMPLETIONS)
            model = answering.check_model(body.model)
            asked = body.asked(answering.owner(request), session_of(request))
            envelope = self._envelope("cmpl-", body, model, body.logprobs is not None)
            echo = body.echoed(answering.text_of)
            make = partial(CompletionRenderer, envelope, echo, body.max_tokens != 0)
            return await answering.job(asked, envelope.id, make)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answering.answer(request, await self._chat_job(request))

    async def _chat_job(self, request: Request) -> AnswerJob:
        answering = self._answering
        with answering.intake.body() as share:
            body = await read_body(request, ChatBody, share, CHAT)
            model = answering.check_model(body.model)
            asked = body.asked(answering, answering.owner(request), session_of(request))
            envelope = self._envelope("chatcmpl-", body, model, bool(body.logprobs))
            return await answering.job(asked, envelope.id, partial(ChatRenderer, envelope))

    def _envelope(self, prefix: str, body: GenerationBody, model: str, with_logprobs: bool) -> Envelope:
        answering = self._answering
        return Envelope(
            id=new_id(prefix, body.own_id),
            created=int(time.time()),
            model=model,
            token_text=answering.token_text,
            with_logprobs=with_logprobs,
            with_token_ids=bool(body.return_token_ids) or answering.service.tokenizer is None,
            with_prompt_logprobs=body.prompt_logprobs is not None,
            with_usage=body.include_usage,
            with_usage_in_each=body.usage_in_each,
        )

    async def end_of_session(self, request: Request) -> dict[str, Any]:
        """POST /v1/end_of_session: no more turns of this conversation will come."""
        return await self._hint(request, "end_of_session")

    async def keep_alive(self, request: Request) -> dict[str, Any]:
        """POST /v1/keep_alive: more turns of this conversation will come."""
        return await self._hint(request, "keep_alive")

    async def _hint(self, request: Request, hint: str) -> dict[str, Any]:
        answering = self._answering
        with answering.intake.body() as share:
            body = await read_body(request, SessionBody, share)
            answering.check_model(body.model)
            owner = answering.owner(request)
            scope = body.scope(hint, owner, session_of(request))
            if body.messages is not None:
                prompt_ids = await answering.token_ids(body.conversation(answering), "messages", None)
            else:
                if body.prompt is None:
                    raise Misuse("scope() lets one of messages and prompt through")
                prompt_ids = await answering.token_ids(body.prompt, "prompt", None)
        prompt_ids = prompt_ids[: answering.service.context_length]  # what is behind was never served
        if not all(0 <= token < 1 << 31 for token in prompt_ids):
            raise ApiError("prompt: token ids must be in [0, 2**31)", param="prompt")
        num_cached = await answering.service.hint(prompt_ids, scope)
        # Without a salt it would tell anyone what others have asked: this costs no run of the model.
        may_know = body.cache_salt or owner.tenant is not None or caller_of(request.scope).is_admin
        return {"object": hint, "cached_tokens": num_cached} if may_know else {"object": hint}

    def _model_card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._answering.started,
            "owned_by": "hiradix",
            "root": self._answering.names[-1],
            "max_model_len": self._answering.service.context_length,
        }
