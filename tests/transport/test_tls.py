"""What is wrong with certificates is said at the start, by file; and why a connection fails."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from authority import Authority, openssl

from spool.errors import ConfigError
from spool.transport.tls import PASSPHRASE, PASSPHRASE_FILE, Role, context, reason


@pytest.mark.parametrize("role", ["server", "client"])
def test_what_is_in_order_is_taken(certificates: Path, role: Role) -> None:
    made = context(certificates, role)
    assert made.verify_mode is ssl.CERT_REQUIRED
    assert made.minimum_version is ssl.TLSVersion.TLSv1_2


def remake(certificates: Path, **how: object) -> None:
    """Another client certificate by the same authority."""
    authority = Authority.__new__(Authority)
    authority.home = certificates
    config = (certificates / "ca.cnf").read_text()
    home = next(line for line in config.splitlines() if line.startswith("database"))
    before = home.split(" = ")[1].removesuffix("/index.txt")
    (certificates / "ca.cnf").write_text(config.replace(before, str(certificates)))
    authority.issue("client", **how)  # type: ignore[arg-type]


def of_another_authority(certificates: Path) -> None:
    other = Authority(certificates.parent / "other")
    other.issue("client")
    for name in ("client.crt", "client.key"):
        shutil.copy(other.home / name, certificates / name)


def signed_by_itself(certificates: Path) -> None:
    openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-subj", "/CN=me", "-keyout", "client.key", "-out", "client.crt"),
        cwd=certificates,
    )


def revoked(certificates: Path) -> None:
    remake(certificates)
    authority = Authority.__new__(Authority)
    authority.home = certificates
    authority.revoke("client")
    authority.list_revoked()


def old_list(certificates: Path) -> None:
    remake(certificates)
    authority = Authority.__new__(Authority)
    authority.home = certificates
    authority.list_revoked(
        "-crl_lastupdate", "20200101000000Z", "-crl_nextupdate", "20200201000000Z"
    )


def list_of_another(certificates: Path) -> None:
    other = Authority(certificates.parent / "other")
    other.list_revoked()
    shutil.copy(other.home / "crl.pem", certificates)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "expired": (
        lambda path: remake(path, days=(-10, -1)),
        "{tls}/client.crt: has expired: make a new one",
    ),
    "not yet valid": (
        lambda path: remake(path, days=(1, 10)),
        "{tls}/client.crt: is not valid yet: see the clock of this host, or make a new one",
    ),
    "another authority": (of_another_authority, "{tls}/client.crt: is not signed by {tls}/ca.crt"),
    "self-signed": (
        signed_by_itself,
        "{tls}/client.crt: is signed by itself, not by {tls}/ca.crt",
    ),
    "revoked": (revoked, "{tls}/client.crt: is revoked by {tls}/crl.pem"),
    "old list": (
        old_list,
        "{tls}/client.crt: cannot be checked: {tls}/crl.pem has expired; ask the CA for a new one",
    ),
    "another's list": (
        list_of_another,
        "{tls}/client.crt: cannot be checked: {tls}/crl.pem is not of {tls}/ca.crt; ask that CA",
    ),
    "for servers only": (
        lambda path: remake(path, extensions="server"),
        "{tls}/client.crt: is not made for this purpose: leave out extendedKeyUsage, or name "
        "clientAuth in it",
    ),
    "key of another": (
        lambda path: shutil.copy(path / "server.key", path / "client.key"),
        "{tls}/client.key: is not the key of {tls}/client.crt",
    ),
    "no key": (
        lambda path: (path / "client.key").unlink(),
        "{tls}/client.key: cannot be read: No such file or directory; tls_path names the "
        "directory that has it",
    ),
    "no authority": (
        lambda path: (path / "ca.crt").unlink(),
        "{tls}/ca.crt: cannot be read: No such file or directory; tls_path names the directory "
        "that has it",
    ),
    "authority is a text": (
        lambda path: (path / "ca.crt").write_text("x"),
        "{tls}/ca.crt: is no certificate in PEM form",
    ),
    "list is a text": (
        lambda path: (path / "crl.pem").write_text("x"),
        "{tls}/crl.pem: is no list of revoked certificates",
    ),
    "certificate is a text": (
        lambda path: (path / "client.crt").write_text("x"),
        "{tls}/client.crt: is not in PEM form",
    ),
    "key is a text": (
        lambda path: (path / "client.key").write_text("x"),
        "{tls}/client.key: is not in PEM form",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line_at_the_start(case: str, certificates: Path) -> None:
    damage, words = WRONG[case]
    damage(certificates)
    with pytest.raises(ConfigError) as refused:
        context(certificates, "client")
    assert str(refused.value).startswith(words.format(tls=certificates))
    assert "\n" not in str(refused.value)
    if (certificates / "ca.crt").exists() and case not in (
        *("authority is a text", "list is a text", "old list", "another's list"),
    ):
        context(certificates, "server")  # which has nothing wrong


def test_an_encrypted_key(
    certificates: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    remake(certificates, passphrase="open sesame")
    with pytest.raises(ConfigError, match=r"client\.key: is encrypted; give its passphrase in"):
        context(certificates, "client")
    monkeypatch.setenv(PASSPHRASE, "wrong")
    with pytest.raises(ConfigError, match=r"client\.key: the passphrase does not open it"):
        context(certificates, "client")
    monkeypatch.setenv(PASSPHRASE, "open sesame")
    context(certificates, "client")
    monkeypatch.delenv(PASSPHRASE)
    (tmp_path / "secret").write_text("open sesame\n")
    monkeypatch.setenv(PASSPHRASE_FILE, str(tmp_path / "secret"))
    context(certificates, "client")
    monkeypatch.setenv(PASSPHRASE_FILE, str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="absent: cannot be read"):
        context(certificates, "client")


def meet(
    server: Callable[[socket.socket], object], client: Callable[[socket.socket], object]
) -> tuple[BaseException | None, BaseException | None]:
    """Let two ends talk over a socket; what each of them raised."""
    ends = socket.socketpair()
    raised: list[BaseException | None] = [None, None]

    def run(number: int, act: Callable[[socket.socket], object]) -> None:
        ends[number].settimeout(20)
        try:
            act(ends[number])
        except (OSError, EOFError) as error:
            raised[number] = error
        finally:
            ends[number].close()

    threads = [threading.Thread(target=run, args=item) for item in ((0, server), (1, client))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised[0], raised[1]


def talk(made: ssl.SSLContext, role: Role) -> Callable[[socket.socket], object]:
    def act(end: socket.socket) -> None:
        with made.wrap_socket(end, server_side=role == "server") as wrapped:
            if role == "server":
                wrapped.sendall(b"hello")
            elif not wrapped.recv(5):  # in TLS 1.3 a client hears only now that it is refused
                raise EOFError

    return act


def loose(certificates: Path, role: Role) -> ssl.SSLContext:
    """A context for an end that did not look at its own certificate before."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if role == "server" else ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.load_verify_locations(certificates / "ca.crt")
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_cert_chain(certificates / f"{role}.crt", certificates / f"{role}.key")
    return made


def test_ends_that_fit_shake_hands(certificates: Path) -> None:
    server, client = context(certificates, "server"), context(certificates, "client")
    assert meet(talk(server, "server"), talk(client, "client")) == (None, None)


@pytest.mark.parametrize(
    ("case", "here", "there"),
    [
        ("expired", "the client's certificate has expired", "says that this end's certificate, or"),
        ("revoked", "the client's certificate is revoked by", "certificate is revoked"),
        ("another authority", "the client's certificate is not signed by", "does not know who"),
        ("self-signed", "the client's certificate is signed by itself", "does not know who"),
        ("for servers only", "certificate is not made for this purpose", "(extendedKeyUsage)"),
    ],
)
def test_both_ends_say_why_they_do_not_fit(
    certificates: Path, tmp_path: Path, case: str, here: str, there: str
) -> None:
    theirs = tmp_path / "theirs"
    shutil.copytree(certificates, theirs)
    WRONG[case][0](theirs)
    if (theirs / "crl.pem").exists():
        shutil.copy(theirs / "crl.pem", certificates)
    server = context(certificates, "server")
    at_server, at_client = meet(talk(server, "server"), talk(loose(theirs, "client"), "client"))
    assert at_server is not None
    assert at_client is not None
    assert here in reason(at_server, certificates, "client")
    assert there in reason(at_client, theirs, "server")


def test_an_end_without_tls_is_told_on_both_sides(certificates: Path) -> None:
    def plain(end: socket.socket) -> None:
        end.sendall(b"GIBBERISH" * 4)
        if not end.recv(1):
            raise EOFError

    server = context(certificates, "server")
    at_server, _ = meet(talk(server, "server"), plain)
    assert at_server is not None
    assert "speaks no TLS: give both ends tls_path, or none" in reason(
        at_server, certificates, "client"
    )
    client = context(certificates, "client")
    _, at_client = meet(plain, talk(client, "client"))
    assert at_client is not None
    assert "the server speaks no TLS" in reason(at_client, certificates, "server")


def test_the_name_of_the_server_is_checked_where_one_is_asked_for(certificates: Path) -> None:
    server = context(certificates, "server")
    client = context(certificates, "client", "elsewhere")

    def act(end: socket.socket) -> None:
        client.wrap_socket(end, server_hostname="elsewhere").close()

    _, at_client = meet(talk(server, "server"), act)
    assert at_client is not None
    assert "Hostname mismatch" in reason(at_client, certificates, "server")
