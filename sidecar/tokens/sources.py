"""Where a call's exact tokens are to come from. Pure."""

import re
from collections.abc import Mapping
from typing import Literal

from sidecar.config import TokenSource
from sidecar.traces.record import Route

Source = Literal["tap", "api", "none"]

# The first releases with ``return_token_ids`` are 0.10.2 and 0.11.
_FIRST_VERSION = (0, 11)
_version = re.compile(r"(\d{1,6})\.(\d{1,6})")


class Sources:
    """Chooses by the configuration and by what is known of a call's model server."""

    def __init__(self, configured: TokenSource, known: Mapping[str, Source]) -> None:
        """``known``: what each model server was found to have, by URL; may grow and change."""
        self._configured = configured
        self._known = known

    def of(self, upstream: str, route: Route) -> Source:
        """Return the source for a call that goes to a model server.

        A server that is not known, or has neither, is asked for the tap: it may have it by now, and
        a header harms nobody.
        """
        if route == "other" or self._configured == "none":
            return "none"
        api = route in ("chat", "completions")
        if self._configured == "api":
            return "api" if api else "none"
        if self._configured == "auto" and api and self._known.get(upstream) == "api":
            return "api"
        return "tap"


def vllm_has_token_ids(answer: object) -> bool:
    """Say whether the answer to ``GET /version`` is that of a vLLM that can return token ids."""
    version = answer.get("version") if isinstance(answer, dict) else None
    found = _version.match(version) if isinstance(version, str) else None
    return found is not None and (int(found[1]), int(found[2])) >= _FIRST_VERSION
