"""TLS between the agent and the sidecar, where they are not on the same machine."""

import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from deploy.errors import UserError

HANDSHAKE_SECONDS = 10.0
SHUTDOWN_SECONDS = 2.0

Handler = Callable[[Any, Any], Awaitable[None]]


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    """Return a context for a server: TLS 1.2 or newer, HTTP/1.1 only.

    ``certificate``: PEM file with the chain, the server's own first; ``key``: PEM file with its
    private key, not encrypted.

    Raises:
        UserError: a file is missing, is not PEM, or the two don't belong together.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load(context, certificate, key)
    return context


def load(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Give a context its certificate, or a newer one for the connections to come.

    Raises:
        UserError: as ``server_context``; the context keeps what it had.
    """
    for option, path in (("sidecar.tls_certificate", certificate), ("sidecar.tls_key", key)):
        if not path:
            raise UserError(f"{option} is missing: TLS takes a certificate and its key (PEM files)")
        try:
            text = Path(path).expanduser().read_text(encoding="ascii")
        except OSError as error:
            raise UserError(f"{option} {path} can't be read: {error.strerror}") from None
        except UnicodeDecodeError:
            text = ""
        if "-----BEGIN " not in text:
            raise UserError(f"{option} {path} is not a PEM file")
    files = Path(certificate).expanduser(), Path(key).expanduser()
    trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for target in (trial, context):  # A context whose files don't match is left half changed.
        try:
            target.load_cert_chain(*files, password=_no_password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                reason = "the key is not the certificate's"
            else:
                reason = f"not a certificate with its unencrypted key ({error.reason or error})"
            raise UserError(
                f"sidecar.tls_certificate {certificate}, sidecar.tls_key {key}: {reason}"
            ) from None
        except ValueError:
            raise UserError(
                f"sidecar.tls_key {key} is encrypted: give one that is not, mode 0600"
            ) from None


def without_half_close(handle: Handler) -> Handler:
    """Wrap a stream handler that closes one direction of a connection, which TLS can't.

    mitmproxy does so at the end of some exchanges, and takes the refusal for a bug of its own.
    """

    async def handle_stream(reader: Any, writer: Any) -> None:
        writer.write_eof = lambda: None
        await handle(reader, writer)

    return handle_stream


def _no_password() -> str:
    raise ValueError
