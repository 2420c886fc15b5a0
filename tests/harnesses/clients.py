"""How each harness is pointed at the sidecar: the command lines and files a user would write.

Nothing of a harness is changed; what can be switched off of telemetry and update checks is, as the
tests run without the internet.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.harnesses import install
from tests.harnesses.model_server import (
    CLOSING,
    COMMAND,
    Ask,
    Protocol,
    Say,
    Script,
    tool_round_trip,
)

AGENTS = Path(__file__).parent / "agents"
KEY = "key-of-the-harness"


@dataclass(frozen=True)
class Place:
    """Where a run happens. ``root`` is the sidecar's URL with the run's prefix."""

    root: str
    home: Path
    prompt: str

    @property
    def v1(self) -> str:
        return f"{self.root}/v1"

    def write(self, path: str, text: str) -> Path:
        """Write a file of the harness's configuration into its home."""
        target = self.home / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return target


@dataclass(frozen=True)
class Client:
    """A harness speaking one protocol. ``argv`` also writes the files that the harness reads.

    ``sends`` says which ids of its own it sends: a session id, an agent id, one for subagents alone
    (subagent). ``package`` is the one whose version counts. ``gives_up`` names the faults after
    which it does not try again. ``continues``: after a stream that broke it asks for the rest
    instead of the whole.
    """

    name: str
    program: str
    protocol: Protocol
    streams: bool
    argv: Callable[[Place], list[str]]
    environment: Callable[[Place], dict[str, str]] = lambda place: {}
    sends: tuple[str, ...] = ()
    script: Script = field(default=tool_round_trip)
    package: str | None = None
    gives_up: frozenset[str] = frozenset()
    continues: bool = False

    @property
    def modules(self) -> Path:
        return install.folder(self.program) / "node_modules"

    def env(self, place: Place) -> dict[str, str]:
        """The whole environment of the process: nothing of the tests' own comes in."""
        path = os.environ["PATH"]
        if install.PROGRAMS[self.program].source == "npm":
            path = f"{self.modules / '.bin'}:{path}"
        return {
            "PATH": path,
            "HOME": str(place.home),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "NO_COLOR": "1",
            "HARNESS_MODULES": str(self.modules),
            **self.environment(place),
        }


def _pi(api: str, root_of: Callable[[Place], str]) -> Callable[[Place], list[str]]:
    def argv(place: Place) -> list[str]:
        model = {
            "id": "test-model",
            "name": "test-model",
            "reasoning": False,
            "input": ["text"],
            "contextWindow": 128000,
            "maxTokens": 4096,
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
            "compat": {"sendSessionAffinityHeaders": True},
        }
        provider = {"baseUrl": root_of(place), "api": api, "apiKey": KEY, "models": [model]}
        place.write(".pi/agent/models.json", json.dumps({"providers": {"stub": provider}}))
        command = str(install.executable("pi", "pi"))
        return [command, "-p", "--provider", "stub", "--model", "test-model", place.prompt]

    return argv


def _claude(place: Place) -> list[str]:
    command = str(install.executable("claude-code", "claude"))
    return [command, "-p", place.prompt, "--allowedTools", "Bash"]


def _claude_environment(place: Place) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": place.root,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": "test-model",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


def claude_at_a_terminal(place: Place) -> tuple[list[str], dict[str, str]]:
    """Claude Code as a person starts it, past its first questions, and what it needs besides the
    environment of the others."""
    project = {"hasTrustDialogAccepted": True, "hasCompletedProjectOnboarding": True}
    settings = {
        "hasCompletedOnboarding": True,
        "theme": "dark",
        "projects": {str(place.home / "work"): project},
    }
    place.write(".claude.json", json.dumps(settings))
    # What counts as nonessential includes the titles.
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": ""}
    return [str(install.executable("claude-code", "claude")), "--allowedTools", "Bash"], quiet


def _codex(place: Place) -> list[str]:
    place.write(
        ".codex/config.toml",
        f"""model = "test-model"
model_provider = "stub"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.stub]
name = "stub"
base_url = "{place.v1}"
wire_api = "responses"
env_key = "STUB_KEY"
""",
    )
    command = str(install.executable("codex", "codex"))
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [command, "exec", *flags, place.prompt]


def _qwen(place: Place) -> list[str]:
    command = str(install.executable("qwen-code", "qwen"))
    return [command, "--auth-type", "openai", "-y", "-p", place.prompt]


def _mini(place: Place) -> list[str]:
    command = str(install.executable("mini-swe-agent", "mini"))
    return [command, "-m", "openai/test-model", "-t", place.prompt, "-y", "--exit-immediately"]


def _mini_script(ask: Ask) -> Say:
    """This harness ends when a command prints its word, not when the model stops calling."""
    said = tool_round_trip(ask)
    if ask.results and not said.tools:
        command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        return Say(said.text, [("bash", {"command": command})])
    return said


def _smol_script(ask: Ask) -> Say:
    """This harness tells tool calls and results as prose, and ends with a tool of its own."""
    if any(message["role"] == "assistant" for message in ask.history):
        return Say("", [("final_answer", {"answer": CLOSING})])
    return Say("", [("bash", {"command": COMMAND})])


def _python(program: str, script: str, *arguments: str) -> Callable[[Place], list[str]]:
    def argv(place: Place) -> list[str]:
        interpreter = str(install.executable(program, "python"))
        root = place.root if script.startswith("anthropic") else place.v1
        return [interpreter, str(AGENTS / script), root, *arguments, place.prompt]

    return argv


def _node(script: str) -> Callable[[Place], list[str]]:
    def argv(place: Place) -> list[str]:
        root = place.root if script.startswith("anthropic") else place.v1
        return ["node", str(AGENTS / script), root, place.prompt]

    return argv


CLIENTS = [
    Client(
        "pi, chat",
        "pi",
        "chat",
        True,
        _pi("openai-completions", lambda place: place.v1),
        lambda place: {"PI_OFFLINE": "1"},
        sends=("session",),
    ),
    Client(
        "pi, Responses",
        "pi",
        "responses",
        True,
        _pi("openai-responses", lambda place: place.v1),
        lambda place: {"PI_OFFLINE": "1"},
        sends=("session",),
    ),
    Client(
        "pi, Messages",
        "pi",
        "messages",
        True,
        _pi("anthropic-messages", lambda place: place.root),
        lambda place: {"PI_OFFLINE": "1"},
    ),
    Client(
        "Claude Code",
        "claude-code",
        "messages",
        True,
        _claude,
        _claude_environment,
        sends=("session", "subagent"),
    ),
    Client(
        "Codex",
        "codex",
        "responses",
        True,
        _codex,
        lambda place: {"STUB_KEY": KEY},
        sends=("session", "agent"),
        gives_up=frozenset({"429"}),
    ),
    Client(
        "qwen-code",
        "qwen-code",
        "chat",
        True,
        _qwen,
        lambda place: {
            "OPENAI_API_KEY": KEY,
            "OPENAI_BASE_URL": place.v1,
            "OPENAI_MODEL": "test-model",
        },
        continues=True,
    ),
    Client(
        "mini-swe-agent",
        "mini-swe-agent",
        "chat",
        False,
        _mini,
        lambda place: {
            "OPENAI_API_KEY": KEY,
            "OPENAI_API_BASE": place.v1,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        script=_mini_script,
    ),
    Client(
        "openai-agents",
        "openai-agents",
        "responses",
        True,
        _python("openai-agents", "openai_agents.py"),
        gives_up=frozenset({"break"}),
    ),
    Client(
        "LangGraph",
        "langgraph",
        "chat",
        True,
        _python("langgraph", "langgraph_agent.py"),
        gives_up=frozenset({"break"}),
    ),
    Client(
        "smolagents",
        "smolagents",
        "chat",
        False,
        _python("smolagents", "smol_agent.py"),
        script=_smol_script,
    ),
    Client(
        "OpenAI SDK, Python, chat",
        "python-sdks",
        "chat",
        False,
        _python("python-sdks", "openai_sdk.py", "chat"),
    ),
    Client(
        "OpenAI SDK, Python, Responses",
        "python-sdks",
        "responses",
        True,
        _python("python-sdks", "openai_sdk.py", "responses"),
        gives_up=frozenset({"break"}),
    ),
    Client(
        "Anthropic SDK, Python",
        "python-sdks",
        "messages",
        True,
        _python("python-sdks", "anthropic_sdk.py"),
        package="anthropic",
        gives_up=frozenset({"break"}),
    ),
    Client(
        "OpenAI SDK, Node",
        "node-sdks",
        "chat",
        True,
        _node("openai_sdk.mjs"),
        gives_up=frozenset({"break"}),
    ),
    Client(
        "Anthropic SDK, Node",
        "node-sdks",
        "messages",
        True,
        _node("anthropic_sdk.mjs"),
        package="@anthropic-ai/sdk",
        gives_up=frozenset({"break"}),
    ),
]
BY_NAME = {client.name: client for client in CLIENTS}
