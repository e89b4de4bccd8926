"""Bodies of requests: strict types, what is unknown or unsupported refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.fields import drop_unsupported
from hiradix.apps.server.json_text import parse
from hiradix.tree.key import ADAPTER

MAX_ERRORS = 1000
MAX_NAME_CHARS = 64  # what is shown of a field or a model that nobody knows
MAX_STOP_CHARS = 4096  # what is kept of a request to its end is short but for its tokens
DEFAULT_COMPLETION_TOKENS = 16


class StrictBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


def _whole_characters(text: str) -> str:
    """`text`, unless it has half a surrogate pair, which JSON can carry and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a character at {error.start} of the text") from error
    return text


MAX_SESSION_CHARS = 256
Name = Annotated[str, Field(max_length=MAX_SESSION_CHARS), AfterValidator(_whole_characters)]
TENANT_SALT = "tenant:"
"""How the salts of tenants begin, who are known by their keys: no client may name one."""


@dataclass(frozen=True)
class Owner:
    """Whose a request is. tenant: as its key says. needs_salt: one that says nothing of it is refused."""

    tenant: str | None = None
    needs_salt: bool = False


NOBODYS = Owner()


class AddressedBody(StrictBody):
    """The part of a body that names the model, and whose cache is used."""

    model: str | None = None
    cache_salt: Name | None = None
    extra_key: Name | None = None

    def namespace(self, owner: Owner) -> tuple[str | None, str | None]:
        """extra_key and cache_salt for the engine. ApiError."""
        return namespace_of(owner, self.extra_key, self.cache_salt)


def namespace_of(owner: Owner, extra_key: str | None, salt: str | None) -> tuple[str | None, str | None]:
    """extra_key and cache_salt for the engine, of what a client says. A tenant's requests have his salt, and a
    salt of their own is a part of extra_key then: quotas are by tenant. Raises ApiError."""
    if extra_key is not None and extra_key.startswith(ADAPTER):
        raise ApiError("extra_key: must not name an adapter's pages", param="extra_key")
    if salt is not None and salt.startswith(TENANT_SALT):
        raise ApiError(f"cache_salt: must not begin with {TENANT_SALT!r}", param="cache_salt")
    if owner.tenant is None:
        if owner.needs_salt and not salt:
            raise ApiError("cache_salt: this server asks for one of each request", param="cache_salt")
        return extra_key, salt
    return json.dumps([extra_key, salt]) if salt else extra_key, TENANT_SALT + owner.tenant


SESSION_HEADER = "x-session-id"


def session_of(request: Request) -> str:
    """The session that a request's header names, "" where it has none. ApiError where it is too long."""
    name = request.headers.get(SESSION_HEADER, "")
    if len(name) > MAX_SESSION_CHARS:
        raise ApiError(f"{SESSION_HEADER}: longer than {MAX_SESSION_CHARS} characters", param=SESSION_HEADER)
    return name


_Body = TypeVar("_Body", bound=BaseModel)


def parse_json(data: bytes) -> Any:
    """A JSON body's value; ApiError if it is none."""
    try:
        return parse(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {error}") from error


def first_error(error: ValidationError) -> tuple[str, str]:
    """The field at fault and the sentence about it, of the error nearest to what the caller wrote."""
    entries = error.errors(include_url=False, include_context=False, include_input=False)
    entry = max(entries, key=lambda item: (_RANK.get(item["type"], 0), len(item["loc"])))
    field = _field(entry)
    if entry["type"] == "extra_forbidden":
        return field, f"{field}: unknown field"
    what: str = entry["msg"]
    if entry["type"] in _KINDS:  # none of the kinds that it may be
        kinds = [item["msg"] for item in entries if item["type"] in _KINDS and _field(item) == field]
        what = ", or ".join([kinds[0], *(kind.removeprefix("Input should be ") for kind in kinds[1:])])
    return field, f"{field}: {what}"


_KINDS = ("string_type", "list_type")
# What of a value is wrong says more than that it might have been of another kind.
_RANK = {"value_error": 3, "literal_error": 2, "extra_forbidden": 1, **dict.fromkeys(_KINDS, -1)}


def _field(entry: Any) -> str:
    """The field at fault, without the names of the kinds that a value may be; an unknown name as it was sent."""
    is_new = entry["type"] == "extra_forbidden"
    known, new = (entry["loc"][:-1], entry["loc"][-1:]) if is_new else (entry["loc"], ())
    names = [str(part) for part in known if isinstance(part, int) or part.isidentifier() and part != "str"]
    names += [part.encode("ascii", "backslashreplace").decode()[:MAX_NAME_CHARS] for part in new]
    return ".".join(names) if names else "body"


def parse_body(data: bytes, model: type[_Body], dialect: str = "") -> _Body:
    """A request's body as a checked record; ApiError naming the first field at fault.

    dialect: whose table of unsupported fields counts.
    """
    values = parse_json(data)
    if not isinstance(values, dict):
        raise ApiError("the body must be a JSON object")
    if len(values) > MAX_ERRORS:  # an error each, over half a second for half a million
        raise ApiError(f"the body has {len(values)} fields")
    drop_unsupported(values, dialect)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        if (num_errors := error.error_count()) > MAX_ERRORS:  # to list them would take seconds
            raise ApiError(f"the body has {num_errors} values that are wrong") from error
        field, message = first_error(error)
        raise ApiError(message, param=field) from error
