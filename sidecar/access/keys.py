"""Run keys: what a program shows to post the calls of one run, in place of an API key.

A key is ``ridealong-<run>-<mac>``. The MAC is HMAC-SHA256 (RFC 2104) of the run id under a secret
of this installation, cut to 128 bits: nothing about issued keys has to be stored, and a new secret
ends all of them. Its letters pass as a Bearer token, as a header value and as a Basic password.
"""

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path

from deploy.errors import UserError

_PREFIX = "ridealong-"
_PURPOSE = b"ridealong run key 1\0"
_MAC_BYTES = 16
_SECRET_BYTES = 32
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def is_run(text: str) -> bool:
    """Say whether a text is a run id (see ``sidecar.routing.routes.split_run``)."""
    return _RUN.fullmatch(text) is not None


def not_a_run(text: str) -> str:
    """Return the sentence that says why a text is no run id."""
    return (
        f"{text!r} is not a run id: use up to 128 letters, digits, dots, hyphens and underscores, "
        "and begin with a letter or digit"
    )


class BadKey(ValueError):
    """A text that claims to be a run key and is none of this installation's."""


class RunKeys:
    """Issues and verifies the keys of one secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def issue(self, run: str) -> str:
        """Return the key of a run.

        Raises:
            ValueError: ``run`` is not a run id (see ``sidecar.routing.routes.split_run``).
        """
        if not is_run(run):
            raise ValueError(not_a_run(run))
        return f"{_PREFIX}{run}-{self._mac(run)}"

    def verify(self, text: str) -> str | None:
        """Return the run that a key is for; None for a text that does not claim to be a run key.

        Raises:
            BadKey: it claims to be one, and is malformed or made without this secret.
        """
        if not text.startswith(_PREFIX):
            return None
        run, hyphen, mac = text.removeprefix(_PREFIX).rpartition("-")
        if not hyphen or not is_run(run):
            raise BadKey("malformed run key")
        # As bytes: compare_digest refuses text that is not ASCII.
        if not hmac.compare_digest(mac.encode(), self._mac(run).encode()):
            raise BadKey("this run key was not issued here")
        return run

    def _mac(self, run: str) -> str:
        digest = hmac.digest(self._secret, _PURPOSE + run.encode("ascii"), hashlib.sha256)
        return digest[:_MAC_BYTES].hex()


def load_secret(path: Path) -> bytes:
    """Return the secret in a file; one that does not exist is created with a new secret, mode 0600.

    Two processes that create it at once get the same secret.

    Raises:
        UserError: others can read the file, it holds no secret, or it can't be read or created.
    """
    try:
        if not path.exists():
            _create(path)
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(4 * _SECRET_BYTES)
    except OSError as error:
        raise UserError(
            f"sidecar.key_file {path}: {os.strerror(error.errno or 0)}; name a file in a folder "
            "that this user can write"
        ) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(
            f"sidecar.key_file {path} can be read by others: `chmod 600` it, or delete it so that "
            "a new secret is made (keys issued so far end with it)"
        )
    try:
        secret = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        secret = b""
    if len(secret) != _SECRET_BYTES:
        raise UserError(
            f"sidecar.key_file {path} holds no secret: delete it so that a new one is made (keys "
            "issued so far end with it)"
        )
    return secret


def _create(path: Path) -> None:
    """Create the file whole or not at all: linked into place once its content is on the disk."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(_SECRET_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # Another was faster; its secret counts.
            os.link(draft, path)
    finally:
        draft.unlink()
