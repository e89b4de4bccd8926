"""The errors that a client is told of, and their bodies."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A refusal in the OpenAI form; `param` names the field at fault."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict[str, Any]:
        """The JSON body clients of the OpenAI API expect."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
