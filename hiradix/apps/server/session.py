"""The body of a call about a conversation that was sent before."""

from __future__ import annotations

from typing import Any

from hiradix.apps.engine.api import ChatPrompt, Scope
from hiradix.apps.server.answering import Answering
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.messages import Messages, Tools, plain_messages
from hiradix.apps.server.schema import NOBODYS, AddressedBody, Name, Owner


class SessionBody(AddressedBody):
    """POST /v1/end_of_session and /v1/keep_alive: the conversation as it was sent last."""

    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt: str | list[int] | None = None
    session_id: Name | None = None

    def scope(self, hint: str, owner: Owner = NOBODYS, session: str = "") -> Scope:
        """Whose conversation it is, and what is said of it."""
        if (self.messages is None) == (self.prompt is None):
            raise ApiError("messages: send either messages or prompt", param="messages")
        return Scope(*self.namespace(owner), hint=hint, session=self.session_id or session)

    def conversation(self, answering: Answering) -> ChatPrompt:
        """The conversation to make tokens of. Raises ApiError."""
        tools = [tool.plain() for tool in self.tools or ()]
        kwargs = self.chat_template_kwargs or {}
        return answering.conversation(plain_messages(self.messages or ()), tools, template_kwargs=kwargs)
