"""What the sidecar itself answers in place of the model server: refused requests, nothing else."""

import json
from dataclasses import dataclass, field
from http import HTTPStatus


@dataclass(frozen=True)
class Refusal:
    """An HTTP reply that refuses a request. SDKs show its message as they show the servers' own."""

    status: int
    message: str
    """One sentence that says what to do."""
    kind: str = "invalid_request_error"
    """Error type, as OpenAI's and Anthropic's APIs name them."""
    fields: dict[str, str] = field(default_factory=dict)
    """Header fields beside those of the body."""

    @property
    def body(self) -> bytes:
        """JSON in a shape that is both OpenAI's and Anthropic's."""
        error = {"type": self.kind, "message": self.message, "param": None, "code": self.kind}
        return json.dumps({"type": "error", "error": error}).encode()

    @property
    def headers(self) -> dict[str, str]:
        """All header fields of the reply."""
        return self.fields | {
            "content-type": "application/json",
            "content-length": str(len(self.body)),
            "connection": "close",
        }

    def raw(self) -> bytes:
        """Return the whole reply as HTTP/1.1."""
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + self.body
