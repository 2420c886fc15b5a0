"""Request bodies, as far as the hot path has to look into them: the model they ask for. Pure."""

import json
from dataclasses import dataclass

from sidecar.bodies import jsontext
from sidecar.bodies.coding import decode


@dataclass(frozen=True)
class Read:
    """A body that could be read."""

    text: bytes
    """Its JSON text, decoded."""
    model: str | None


def read(content: bytes, encoding: str) -> Read | None:
    """Read a body with a ``Content-Encoding``; None if it is no JSON object or can't be decoded."""
    try:
        text = decode(content, encoding)
        span = jsontext.value_span(text, "model")
        model = json.loads(text[slice(*span)]) if span else None
    except ValueError:
        return None
    return Read(text, model if isinstance(model, str) else None)


def with_model(body: Read, model: str) -> bytes:
    """Return the body's text with another model's name, every other byte as it was."""
    return jsontext.replace_value(body.text, "model", json.dumps(model).encode())
