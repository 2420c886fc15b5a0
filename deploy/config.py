"""One TOML file configures every program; each package owns its section.

A section is a ``msgspec.Struct`` whose keys all have a default, a type and a description
(``describe``). Unknown keys and wrong types are errors that name the key.
"""

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
            f"configuration ({where}): {error}; see docs/configuration.md for all keys"
        ) from None


def describe() -> list[tuple[str, str, Any, str]]:
    """Return (key, type, default, description) of every key, in file order."""
    rows = []
    for section in msgspec.structs.fields(Config):
        for item in msgspec.structs.fields(section.type):
            info = msgspec.inspect.type_info(item.type)
            description = ""
            if isinstance(info, msgspec.inspect.Metadata):
                description = (info.extra_json_schema or {}).get("description", "")
                info = info.type
            rows.append(
                (
                    f"{section.name}.{item.encode_name}",
                    type(info).__name__.removesuffix("Type").lower(),
                    item.default,
                    description,
                )
            )
    return rows
