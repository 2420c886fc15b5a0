"""Content and errors that several protocols write the same way."""

import base64
import binascii
from hashlib import sha256
from typing import Any

from daemon.protocols import shape
from daemon.protocols.conversation import (
    Content,
    Image,
    Message,
    Other,
    ServerError,
    Text,
    ToolResult,
)

LONGEST_ERROR = 500


def image_at(url: str) -> Image:
    """Return the image that an ``http(s)`` or ``data`` URL stands for."""
    if not url.startswith("data:"):
        return Image("url", ref=url)
    head, _, payload = url.removeprefix("data:").partition(",")
    media_type, *options = head.split(";")
    if "base64" in options:
        return image_data(media_type or None, payload)
    return Image("data", media_type or None, sha256(payload.encode()).hexdigest())


def image_data(media_type: str | None, payload: str) -> Image:
    """Return the image that base64 text holds; text that is no base64 stands for itself."""
    try:
        raw = base64.b64decode(payload)
    except (binascii.Error, ValueError):
        raw = payload.encode()
    return Image("data", media_type, sha256(raw).hexdigest())


def openai_content(value: Any) -> tuple[Content, ...]:
    """Read the content of an OpenAI message, chat or Responses: text, or a list of parts."""
    if isinstance(value, str):
        return (Text(value),) if value else ()
    if isinstance(value, dict):
        return (openai_part(value),)
    return tuple(openai_part(part) for part in shape.elements(value, "content"))


def openai_part(value: Any) -> Content:
    if isinstance(value, str):
        return Text(value)
    part = shape.fields(value, "content part")
    kind = shape.string(part.get("type"))
    if "text" in part:
        return Text(shape.string(part["text"]))
    if kind == "refusal":
        return Text(shape.string(part.get("refusal")))
    if kind in ("image_url", "input_image"):
        url = part.get("image_url")
        if isinstance(url, dict):
            url = url.get("url")
        if isinstance(url, str):
            return image_at(url)
        if file := shape.optional(part.get("file_id")):
            return Image("file", ref=file)
    return Other(kind or "unknown", part)


def server_error(payload: Any) -> ServerError | None:
    """Return the error that a document reports, None for a document that reports none.

    Shapes: ``{"error": {"message", "type", "code"}}`` (OpenAI, Anthropic, vLLM since 0.9),
    ``{"error": "…"}``, ``{"object": "error", "message", "type"}`` (older vLLM), ``{"type":
    "error", "message", "code"}`` (Responses streams), ``{"detail": …}`` (FastAPI).
    """
    if not isinstance(payload, dict):
        return None
    error = payload.get("error")
    if error is None and "error" in (payload.get("object"), payload.get("type")):
        error = payload
    if error is None and set(payload) == {"detail"}:
        error = payload["detail"]
    if not error:
        return None
    if not isinstance(error, dict):
        return ServerError(shape.string(error)[:LONGEST_ERROR])
    kinds = (error.get("type"), error.get("code"))
    kind = next((shape.string(k) for k in kinds if k and k != "error"), None)
    message = error.get("message")
    return ServerError(shape.string(error if message is None else message)[:LONGEST_ERROR], kind)


def tool_message(call_id: Any, content: Any) -> Message:
    """Return the message that carries one tool's result."""
    return Message("tool", (ToolResult(shape.string(call_id), openai_content(content)),))
