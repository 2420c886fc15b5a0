"""The certificate authority of this installation, which signs for intercepted hosts.

``<ca_dir>/key`` (0700) holds its private key (0600) in the layout that mitmproxy reads. Beside it
lie, for everyone, ``ca.pem``, its certificate, and ``bundle.pem``, all certificates that an agent
should trust: programs take such a file in place of the system's.
"""

import os
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

import certifi
from mitmproxy.certs import CertStore

from deploy.errors import UserError

_BASENAME = "mitmproxy"  # Of the files that mitmproxy looks for.
_KEY_BITS = 2048


@dataclass(frozen=True)
class Authority:
    """Where the parts of a certificate authority are."""

    directory: Path

    @property
    def key_folder(self) -> Path:
        """Folder with the private key; mitmproxy's ``confdir``."""
        return self.directory / "key"

    @property
    def certificate(self) -> Path:
        """Its certificate (PEM)."""
        return self.directory / "ca.pem"

    @property
    def bundle(self) -> Path:
        """Its certificate and those of the public authorities (PEM)."""
        return self.directory / "bundle.pem"


def ensure(directory: str, trusted: str | None) -> Authority:
    """Return the authority in a folder, made if there is none, its public files brought up to date.

    ``trusted``: file with the certificates that the bundle is to hold beside our own; None: those
    of the public authorities.

    Raises:
        UserError: the folder can't be used, or others can read the key.
    """
    authority = Authority(Path(directory).expanduser().absolute())
    try:
        authority.directory.mkdir(parents=True, exist_ok=True)
        if not authority.key_folder.exists():
            _create(authority)
        key = authority.key_folder / f"{_BASENAME}-ca.pem"
        if key.stat().st_mode & 0o077:
            raise UserError(f"others can read the CA's private key: chmod 600 {key}")
        own = (authority.key_folder / f"{_BASENAME}-ca-cert.pem").read_bytes()
        _publish(authority.certificate, own)
        others = Path(trusted or certifi.where()).read_bytes()
        _publish(authority.bundle, others.rstrip() + b"\n\n# Ridealong\n" + own)
    except OSError as error:
        raise UserError(
            f"sidecar.ca_dir {directory}: {error.strerror or error}: make it writable or name "
            f"another folder ({error.filename})"
        ) from None
    return authority


def _create(authority: Authority) -> None:
    """Make a new key; of several processes that do so at once, one wins for all."""
    # A folder made by mkdtemp has mode 0700.
    folder = Path(tempfile.mkdtemp(prefix="new-", dir=authority.directory))
    try:
        host = socket.gethostname()[:40]
        CertStore.create_store(
            folder, _BASENAME, _KEY_BITS, organization="Ridealong", cn=f"Ridealong {host}"
        )
        for path in folder.iterdir():
            path.chmod(0o600)
        try:
            folder.rename(authority.key_folder)
        except OSError:
            if not authority.key_folder.exists():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(path: Path, data: bytes) -> None:
    if path.exists() and path.read_bytes() == data:
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
