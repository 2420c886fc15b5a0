"""One TOML file configures every program; each package owns its section.

A section is a ``msgspec.Struct`` whose keys all have a default, a type and a description. Unknown
keys and wrong types are errors that name the key. ``python -m deploy.config`` prints the reference.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from daemon.config import DaemonConfig
from deploy.errors import UserError
from deploy.serve_config import ServeConfig
from sidecar.config import SidecarConfig
from trainer.config import TrainerConfig
from trainer.swap.config import SwapConfig

# Where an error lies, as msgspec writes it: `$.sidecar.upstreams[0].credentials`.
_PATH = re.compile(r"at `\$(\S*)`$")
_STEP = re.compile(r"\.([^.\[]+)|(\[[^\]]*\])")


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole configuration; a section that the file leaves out has its defaults."""

    sidecar: SidecarConfig = SidecarConfig()
    serve: ServeConfig = ServeConfig()
    daemon: DaemonConfig = DaemonConfig()
    trainer: TrainerConfig = TrainerConfig()
    swap: SwapConfig = SwapConfig()


def load(path: Path | None, overrides: dict[str, Any] | None = None) -> Config:
    """Read ``path`` (None: defaults) and lay ``overrides`` (``"section.key"`` → value) over it.

    Raises:
        UserError: the file is missing or not TOML, a key is unknown, a value has the wrong type.
    """
    data: dict[str, Any] = {}
    where = "command line"
    if path is not None:
        where = str(path)
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"configuration file {path} does not exist") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise UserError(f"configuration file {path} can't be read: {error}") from None
    for dotted, value in (overrides or {}).items():
        section, _, key = dotted.partition(".")
        data.setdefault(section, {})[key] = value
    try:
        return msgspec.convert(data, Config)
    except msgspec.ValidationError as error:
        raise UserError(
            f"configuration ({where}): {error}{_allowed(str(error))}; see docs/configuration.md "
            "for all keys"
        ) from None


def _allowed(error: str) -> str:
    """Return the values that the key named in an error may have, where they are enumerated."""
    path = _PATH.search(error)
    info = msgspec.inspect.type_info(Config)
    for name, _ in _STEP.findall(path[1] if path else ""):
        info = _below(info, name)
    info = _plain(info)
    if not isinstance(info, msgspec.inspect.LiteralType):
        return ""
    return f"; allowed: {', '.join(str(value) for value in info.values)}"


def _below(info: msgspec.inspect.Type, name: str) -> msgspec.inspect.Type:
    """Return the type of a struct's key ``name``, or of a list's items."""
    info = _plain(info)
    if isinstance(info, msgspec.inspect.StructType):
        return next(field.type for field in info.fields if field.encode_name == name)
    return info.item_type if isinstance(info, msgspec.inspect.ListType) else info


def _plain(info: msgspec.inspect.Type) -> msgspec.inspect.Type:
    """Return a type without its descriptions."""
    while isinstance(info, msgspec.inspect.Metadata):
        info = info.type
    return info


def reference() -> str:
    """Return docs/configuration.md: every key with its type, default and description."""
    lines = [
        "# Configuration",
        "",
        "One TOML file for all programs: `--config FILE`; `--set section.key=value` overrides one",
        "key. Every key has the default shown here; an unknown key is an error.",
        "`deploy/ridealong.example.toml` is a starting point.",
    ]
    for section in msgspec.structs.fields(Config):
        lines += _table(f"[{section.name}]", section.type)
        for item in msgspec.structs.fields(section.type):
            entry = _entry(item.type)
            if entry is not None:
                lines += _table(f"[[{section.name}.{item.encode_name}]]", entry)
    return "\n".join(lines) + "\n"


def _table(title: str, struct: type[msgspec.Struct]) -> list[str]:
    """Return the lines about the keys of one section."""
    lines = ["", f"## {title}", "", "| key | type | default | |", "|---|---|---|---|"]
    for item in msgspec.structs.fields(struct):
        kind, description = _kind(item.type)
        if item.required:
            default = "required"
        else:
            value = (
                item.default
                if item.default_factory is msgspec.NODEFAULT
                else item.default_factory()
            )
            default = f"`{msgspec.json.encode(value).decode()}`"
        lines.append(f"| `{item.encode_name}` | {kind} | {default} | {description} |")
    return lines


def _entry(annotation: Any) -> type[msgspec.Struct] | None:
    """Return the struct that a key is a list of, None if it is something else."""
    info = _plain(msgspec.inspect.type_info(annotation))
    if not isinstance(info, msgspec.inspect.ListType):
        return None
    item = info.item_type
    return item.cls if isinstance(item, msgspec.inspect.StructType) else None


def _kind(annotation: Any) -> tuple[str, str]:
    """Return a key's type in words and its description."""
    info, description = msgspec.inspect.type_info(annotation), ""
    while isinstance(info, msgspec.inspect.Metadata):
        description = (info.extra_json_schema or {}).get("description", description)
        info = info.type
    if isinstance(info, msgspec.inspect.LiteralType):
        return " or ".join(f"`{value}`" for value in info.values), description
    return type(info).__name__.removesuffix("Type").lower(), description


if __name__ == "__main__":
    print(reference(), end="")
