"""What the demo does and how it trains, as one value; the configuration of its programs."""

import json
from pathlib import Path
from typing import Any

import msgspec

SERVED_MODEL_NAME = "smollm2-135m"
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


class Settings(msgspec.Struct, frozen=True):
    """``spare_groups`` are run beyond those the next step needs, while the trainer works: their
    streams meet the swap, and they are at most one version old when they are trained."""

    seed: int
    steps: int
    groups_per_step: int = 4
    group_size: int = 8
    spare_groups: int = 1
    learning_rate: float = 1e-5
    max_model_len: int = 512


class Addresses(msgspec.Struct, frozen=True):
    """Ports of 127.0.0.1."""

    engine: int
    sidecar: int
    sidecar_admin: int
    daemon: int

    @property
    def daemon_url(self) -> str:
        return f"http://127.0.0.1:{self.daemon}"

    def agent_base_url(self, run: str) -> str:
        """Return what the agent of one run takes for its model server."""
        return f"http://127.0.0.1:{self.sidecar}/r/{run}/v1"


def configuration(
    settings: Settings, addresses: Addresses, model: Path, directory: Path
) -> dict[str, dict[str, Any]]:
    """Return sections and keys of the programs' configuration file."""
    engine = f"http://127.0.0.1:{addresses.engine}"
    traces = str(directory / "traces")
    return {
        "serve": {
            "model": str(model),
            "port": addresses.engine,
            "served_model_name": SERVED_MODEL_NAME,
            "chat_template": str(CHAT_TEMPLATE),
            "tool_call_parser": "pythonic",
            "max_model_len": settings.max_model_len,
            "extra_args": ["--seed", str(settings.seed)],
        },
        "sidecar": {
            "upstream": engine,
            "listen": f"127.0.0.1:{addresses.sidecar}",
            "admin": f"127.0.0.1:{addresses.sidecar_admin}",
            "traces": traces,
        },
        "daemon": {
            "traces": traces,
            "directory": str(directory / "state"),
            "listen": f"127.0.0.1:{addresses.daemon}",
            "engine": engine,
            "model": str(model),
            "groups_per_step": settings.groups_per_step,
            "max_staleness": 1,
            # Groups that are all right (or all wrong) stay in: rewards by version are of all.
            "skip_zero_variance": False,
            "poll_seconds": 0.5,
            "settle_seconds": 0.5,
        },
        "trainer": {
            "learning_rate": settings.learning_rate,
            "seed": settings.seed,
            # Of ~150-token samples; more would only cost memory, for a vocabulary's logits each.
            "max_tokens_per_micro_batch": 1024,
            "keep_versions": 2,
            "keep_checkpoints": 1,
        },
    }


def to_toml(sections: dict[str, dict[str, Any]]) -> str:
    """Write sections of scalars and lists of scalars as TOML, whose literals JSON's are."""
    lines = []
    for section, keys in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
        lines.append("")
    return "\n".join(lines)
