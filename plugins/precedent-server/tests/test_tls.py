"""TLS: certificates that are read again, and the bounds on connections, which hold before and after a handshake."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import precedent

from precedent.errors import ConfigError
from precedent_server.tls import Certificate

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
PATIENCE = 60


def made(folder: Path, name: str, *more: str) -> tuple[Path, Path]:
    """A self-signed certificate for this machine whose subject has a name, and its key."""
    chain, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        *(more or ["-nodes"]),
    ]
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *subject, "-keyout", key, "-out", chain], check=True, capture_output=True)
    return chain, key


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("certificates")
    return {"first": made(folder, "first"), "second": made(folder, "second")}


def test_files_that_are_wrong_are_refused_by_what_is_wrong(files: Any, tmp_path: Path) -> None:
    (chain, key), (_, other) = files["first"], files["second"]
    _, secret = made(tmp_path, "secret", "-passout", "pass:word")
    (tmp_path / "text").write_text("no certificate")
    for pair, says in (
        ((tmp_path / "none", key), "--tls-cert .*none' cannot be read: No such file"),
        ((chain, tmp_path), "--tls-key .* cannot be read: Is a directory"),
        ((chain, other), "of a certificate and of its key"),
        ((tmp_path / "text", key), "must be PEM files"),
        ((tmp_path / "secret.pem", secret), "which has no password"),
    ):
        with pytest.raises(ConfigError, match=says):
            Certificate(*pair)


def test_the_command_refuses_them_before_a_model_is_looked_for(files: Any, capsys: pytest.CaptureFixture[str]) -> None:
    chain, key = files["first"]
    for given, says in ((["--tls-cert", chain], "give both"), (["--tls-key", key], "give both"),
                        (["--tls-cert", key, "--tls-key", key], "must be PEM files")):  # fmt: skip
        assert precedent("serve", "--target", "no/such/model", *given) == 2
        assert says in capsys.readouterr().err


@pytest.fixture
def secured(start_process: Any, tmp_path: Path, files: Any) -> Any:
    """Starts a server with the first certificate; its files, what connects to it, and its process."""

    @contextmanager
    def started(**limits: float) -> Iterator[tuple[tuple[Path, Path], Callable[..., socket.socket], Any]]:
        places = tmp_path / "chain.pem", tmp_path / "key.pem"
        put(files["first"], places)
        with start_process(limits=limits, tls=[*places]) as (process, port), ExitStack() as held:

            def connect(*, plain: bool = False) -> socket.socket:
                opened = held.enter_context(closing(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)))
                return (
                    opened
                    if plain
                    else held.enter_context(closing(trusting(*files).wrap_socket(opened, server_hostname="localhost")))
                )

            def trusting(*names: str) -> ssl.SSLContext:
                context = ssl.create_default_context()
                for name in names:
                    context.load_verify_locations(files[name][0])
                return context

            yield places, connect, process

    return started


def put(pair: tuple[Path, Path], places: tuple[Path, Path]) -> None:
    for source, place in zip(pair, places, strict=True):
        place.write_bytes(source.read_bytes())


def name_of(connection: Any) -> str:
    return str(dict(part[0] for part in connection.getpeercert()["subject"])["commonName"])


def all_of(connection: socket.socket, sent: bytes = b"") -> bytes:
    """Everything that the server sends until it closes the connection."""
    parts = list[bytes]()
    try:
        connection.sendall(sent)
        while part := connection.recv(65536):
            parts.append(part)
    except (ConnectionError, ssl.SSLError):  # not TimeoutError: it is still open
        pass
    return b"".join(parts)


def test_a_hangup_changes_the_certificate_of_new_connections(secured: Any, files: Any, capfd: Any) -> None:
    with secured() as (places, connect, process):
        open_before = connect()
        assert name_of(open_before) == "first"
        put(files["second"], places)
        assert name_of(connect()) == "first"
        process.send_signal(signal.SIGHUP)
        until(lambda: name_of(connect()) == "second")
        places[0].write_bytes(b"damaged")
        process.send_signal(signal.SIGHUP)
        until(lambda: "must be PEM files" in capfd.readouterr().err)
        assert name_of(connect()) == "second"
        assert b"200 OK" in all_of(open_before, HEALTH), "a connection outlives its certificate"


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


CUT_HELLO = bytes.fromhex("16030101f4") + b"\x01\x00\x01\xf0\x03\x03" + bytes(100)
"""The beginning of a handshake of 500 bytes."""


def test_a_handshake_has_a_time_and_so_have_the_headers_after_it(secured: Any) -> None:
    with secured(header_seconds=0.5) as (_, connect, _):
        for sent in (b"", CUT_HELLO, b"GET /health HTTP/1.1\r\n\r\n"):
            assert b"200" not in all_of(connect(plain=True), sent)
        assert all_of(connect()).startswith(b"HTTP/1.1 408 ")
        assert all_of(connect(), b"GET /health HTTP/1.1\r\n").startswith(b"HTTP/1.1 408 ")
        assert b" 200 OK" in all_of(connect(), HEALTH)


def test_unfinished_handshakes_count_as_connections(secured: Any) -> None:
    with secured(max_connections=2) as (_, connect, process):
        stuck = [connect(plain=True) for _ in range(2)]
        stuck[0].sendall(CUT_HELLO)
        assert all_of(connect(plain=True)) == b""
        stuck[1].close()
        until(lambda: answered(connect))
        process.send_signal(signal.SIGTERM)
        assert all_of(stuck[0]) == b"", "a server that stops waits for no handshake"
        assert process.wait() == 0


def answered(connect: Callable[..., socket.socket]) -> bool:
    try:
        return b" 200 OK" in all_of(connect(), HEALTH)
    except OSError:
        return False


def test_a_client_that_never_reads_is_cut_off(secured: Any) -> None:
    asked = HEALTH.replace(b"/health", b"/openapi.json").replace(b"Connection: close\r\n", b"")
    with secured(request_seconds=1.0, max_connections=1) as (_, connect, _):
        slow = connect()
        slow.sendall(asked * 100)
        assert slow.recv(12) == b"HTTP/1.1 200"
        until(lambda: answered(connect))


def test_a_request_in_the_handshakes_last_flight_is_answered(secured: Any) -> None:
    """Its bytes come before the handshake's end is known."""
    with secured() as (_, connect, _):
        raw = connect(plain=True)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        read, written = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = context.wrap_bio(read, written, server_hostname="localhost")
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                raw.sendall(written.read())
                read.write(raw.recv(65536))
        client.write(HEALTH)
        raw.sendall(written.read())  # the client's Finished and the request
        read.write(all_of(raw))
        assert client.read(65536).startswith(b"HTTP/1.1 200 OK")
