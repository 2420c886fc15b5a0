"""Reading the configuration again while the sidecar runs, on SIGHUP.

Some keys take effect at once: those of ``LIVE``. The others shape sockets, threads and connections;
they wait for a restart, and the log says so. A configuration that can't be read or used changes
nothing.
"""

import logging
from collections.abc import Callable

from msgspec.structs import fields, replace

from deploy.errors import UserError
from sidecar.config import SidecarConfig

_log = logging.getLogger(__name__)

LIVE = frozenset(
    {
        "require_key",
        "key_file",
        "tls_certificate",
        "tls_key",
        "max_header_kib",
        "max_header_fields",
        "max_body_mib",
        "log_format",
        "drain_seconds",
    }
)


def changed(old: SidecarConfig, new: SidecarConfig) -> list[str]:
    """Return the names of the keys in which two configurations differ."""
    names = [field.name for field in fields(SidecarConfig)]
    return [name for name in names if getattr(old, name) != getattr(new, name)]


class Reloader:
    """Holds the configuration in force."""

    def __init__(
        self,
        config: SidecarConfig,
        read: Callable[[], SidecarConfig],
        apply: Callable[[SidecarConfig], None],
    ) -> None:
        """``apply`` puts a configuration in force that differs in ``LIVE`` keys only; the files
        that keys name may have changed too. It raises ``UserError`` and changes nothing if it
        can't.
        """
        self.config = config
        self._read = read
        self._apply = apply

    def reload(self) -> None:
        """Read the configuration and put it in force, as far as that goes; log what came of it."""
        try:
            new = self._read()
            different = changed(self.config, new)
            live = {name: getattr(new, name) for name in different if name in LIVE}
            config = replace(self.config, **live)
            self._apply(config)
        except UserError as error:
            _log.error("the configuration stays as it was: %s", error)
            return
        except Exception:  # The sidecar goes on, and can be asked again.
            _log.exception("the configuration stays as it was")
            return
        self.config = config
        _log.info("configuration read again; changed: %s", ", ".join(live) or "nothing")
        waiting = [name for name in different if name not in LIVE]
        if waiting:
            _log.warning("these keys take effect after a restart: %s", ", ".join(waiting))
