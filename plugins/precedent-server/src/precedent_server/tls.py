"""TLS: the server's certificate, which can be read again, and connections that begin with a bounded handshake."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any, cast

from precedent.errors import ConfigError

log = logging.getLogger(__name__)


class Certificate:
    """A certificate chain and its private key, both PEM files. New connections use the `context` of the last reading.

    Raises ConfigError if the files cannot be used.
    """

    def __init__(self, chain: Path, key: Path) -> None:
        self._chain, self._key = chain, key
        self.context = self._read()

    def reload(self) -> None:
        """Read the files again; if they cannot be used, the last good ones stay in force, with a warning."""
        try:
            self.context = self._read()
        except ConfigError as error:
            log.warning("%s; until then the certificate that was read before stays in force", error)

    def _read(self) -> ssl.SSLContext:
        for option, path in (("--tls-cert", self._chain), ("--tls-key", self._key)):
            try:
                path.read_bytes()
            except OSError as error:
                raise ConfigError(f"{option} {str(path)!r} cannot be read: {error.strerror or error}") from None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self._chain, self._key, password=b"")  # never ask for one on a terminal
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"--tls-cert {str(self._chain)!r} and --tls-key {str(self._key)!r} must be PEM files of a certificate "
                f"and of its key, which has no password ({error})"
            ) from None
        return context


def certificate_of(chain: Path | None, key: Path | None) -> Certificate | None:
    """The certificate in the files of two options; None without them. Raises ConfigError for one without the other."""
    if chain is None or key is None:
        if chain is not key:
            raise ConfigError("--tls-cert and --tls-key belong together: give both, or neither")
        return None
    return Certificate(chain, key)


class Handshake(asyncio.Protocol):
    """A connection until its TLS handshake has ended; then `connection` gets what came.

    It counts among the server's `open` connections: beyond `most` it is cut off. It has `seconds` to end, and
    `closing_seconds` to say goodbye.
    """

    def __init__(
        self, certificate: Certificate, connection: asyncio.Protocol, open_: set[Any],
        *, most: int, seconds: float, closing_seconds: float,
    ) -> None:  # fmt: skip
        self._certificate, self._connection, self._open = certificate, connection, open_
        self._most, self._seconds, self._closing_seconds = most, seconds, closing_seconds
        self._early, self._lost = b"", False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.pause_reading()  # the handshake reads
        if len(self._open) >= self._most:
            self._transport.abort()
            return
        self._open.add(self)
        self._shaking = asyncio.create_task(self._shake())

    async def _shake(self) -> None:
        try:
            secured = await asyncio.get_running_loop().start_tls(
                self._transport, self, self._certificate.context, server_side=True,
                ssl_handshake_timeout=self._seconds, ssl_shutdown_timeout=self._closing_seconds,
            )  # fmt: skip
        except OSError:  # no TLS, no common version, too slow, or gone
            return
        finally:
            self._open.discard(self)
        if secured is not None and not self._lost:
            secured.set_protocol(self._connection)
            self._connection.connection_made(secured)
            if self._early:
                self._connection.data_received(self._early)

    def data_received(self, data: bytes) -> None:
        """Keep what comes with the handshake's last message."""
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        """Take note that nobody is there any more."""
        self._lost = True

    def shutdown(self) -> None:
        """Give up: the server stops."""
        self._transport.abort()
