"""GET /openapi.json and /docs: the endpoints with their bodies, as a schema and as one page.

FastAPI's own page loads its scripts from elsewhere; this one is plain HTML and asks nobody for anything.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import HTMLResponse

from hiradix.apps.server.admin import AttachBody
from hiradix.apps.server.dialects.anthropic import CountBody, MessagesBody
from hiradix.apps.server.dialects.chat import ChatBody
from hiradix.apps.server.dialects.completions import CompletionBody
from hiradix.apps.server.dialects.responses import ResponsesBody
from hiradix.apps.server.dialects.tokens import DetokenizeBody, TokenizeBody
from hiradix.apps.server.intents import WishBody
from hiradix.apps.server.session import SessionBody
from hiradix.intents import Verb

Json = dict[str, Any]
BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/v1/end_of_session": SessionBody,
    "/v1/keep_alive": SessionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/hicache/intents": WishBody,
    "/hicache/prefix/{rest}": WishBody,
}
PUT_BODIES: Mapping[str, type[BaseModel]] = {"/hicache/storage-backend": AttachBody}
PARAMETER = re.compile(r"{(\w+)}")
PARAMETERS: Mapping[str, Json] = {
    "/hicache/prefix/{rest}": {"type": "string", "enum": [verb.value for verb in Verb]},
    "/hicache/intents/{rest}": {"type": "integer", "minimum": 0},
}
"""What a path's end is, where its handler reads it by itself."""
_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}code{background:#eee}"
    "table{border-collapse:collapse}td{border-top:1px solid #ccc;padding:.2em .8em .2em 0;vertical-align:top}"
)


def schema_of(app: FastAPI) -> Json:
    """The application's OpenAPI schema, with the bodies that its handlers read themselves."""
    schema = app.openapi()
    parts = schema.setdefault("components", {}).setdefault("schemas", {})
    bodies = [("post", *pair) for pair in BODIES.items()] + [("put", *pair) for pair in PUT_BODIES.items()]
    for method, path, body in bodies:
        own = body.model_json_schema(ref_template="#/components/schemas/{model}")
        parts.update(own.pop("$defs", {}))
        parts[body.__name__] = own
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
        schema["paths"][path][method]["requestBody"] = {"required": True, "content": content}
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            operation["operationId"] = f"{method} {path}"
            known = operation.setdefault("parameters", [])
            for name in PARAMETER.findall(path):
                if name not in [one["name"] for one in known]:
                    kind = PARAMETERS.get(path, {"type": "string"})
                    known.append({"name": name, "in": "path", "required": True, "schema": kind})
    return schema


def page_of(schema: Json) -> str:
    """The schema as a page."""
    parts = [f"<!doctype html><meta charset=utf-8><title>hiradix</title><style>{_STYLE}</style><h1>hiradix</h1>",
             '<p>The schema is <a href="openapi.json">openapi.json</a>.']  # fmt: skip
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            about = html.escape(operation.get("description", ""))
            parts.append(f"<h3><code>{method.upper()} {html.escape(path)}</code></h3><p>{about}</p>")
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
            if name in schema["components"]["schemas"]:
                parts.append(_fields(schema["components"]["schemas"][name]))
    return "\n".join(parts)


def _fields(body: Json) -> str:
    needed = body.get("required", ())
    rows = [
        f"<tr><td><code>{html.escape(name)}</code><td>{html.escape(_type(field))}"
        f"<td>{'needed' if name in needed else ''}"
        for name, field in body.get("properties", {}).items()
    ]
    return f"<table>{''.join(rows)}</table>"


def _type(field: Json) -> str:
    if "anyOf" in field:
        kinds = [_type(one) for one in field["anyOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "const" in field or "enum" in field:
        return ", ".join(map(repr, field.get("enum", [field.get("const")])))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {})) or 'values'}"
    return str(field.get("type", ""))


def add_docs(app: FastAPI) -> None:
    """Serve both. The schema is made at the first request of it."""
    made: list[Json] = []

    def schema() -> Json:
        if not made:
            made.append(schema_of(app))
        return made[0]

    async def openapi() -> Json:
        """GET /openapi.json."""
        return schema()

    async def docs() -> HTMLResponse:
        """GET /docs: this page."""
        return HTMLResponse(page_of(schema()), headers=_HEADERS)

    app.add_api_route("/openapi.json", openapi, methods=["GET"])
    app.add_api_route("/docs", docs, methods=["GET"], response_class=HTMLResponse)
