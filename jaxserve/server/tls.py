"""TLS for the server's socket."""

from __future__ import annotations

import ssl
from pathlib import Path

from jaxserve.errors import ConfigError


def tls_context(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """TLS 1.2 or later with this certificate.

    Args:
      certificate: PEM, with the chain behind it; with the private key as well where `key` is None.
      key: PEM, not encrypted.

    Raises:
      ConfigError: a file can't be read, or they don't belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # A password would be asked for on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except OSError as error:  # an ssl.SSLError is one
        files = f"{certificate}" if key is None else f"{certificate} and {key}"
        raise ConfigError(
            f"can't use the certificate and key in {files}: {error.strerror or error}"
        ) from None
    return context
