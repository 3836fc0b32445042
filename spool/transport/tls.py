"""TLS on both ends: contexts, what is checked before the first connection, and why one fails.

Certificates and keys lie in one directory, under the names that msprobe gave them::

    server.crt server.key    of the receiver
    client.crt client.key    of the training hosts
    ca.crt                   who signed both
    crl.pem                  what it has revoked; optional

Both ends show a certificate and check the other's. Names of hosts are not checked unless
one is asked for: these certificates seldom carry addresses.
"""

from __future__ import annotations

import getpass
import os
import ssl
import sys
from pathlib import Path
from typing import Literal

from spool.errors import ConfigError

Role = Literal["server", "client"]

PASSPHRASE = "SPOOL_TLS_PASSPHRASE"
PASSPHRASE_FILE = "SPOOL_TLS_PASSPHRASE_FILE"

# X509_V_ERR_* of OpenSSL.
_WHY = {
    3: "cannot be checked: {crl} is not of {ca}; ask that CA for its list, or remove the file",
    8: "cannot be checked: {crl} is not of {ca}; ask that CA for its list, or remove the file",
    9: "is not valid yet: see the clock of this host, or make a new one",
    10: "has expired: make a new one",
    12: "cannot be checked: {crl} has expired; ask the CA for a new one, or remove the file",
    18: "is signed by itself, not by {ca}",
    19: "is signed by another CA than {ca}",
    20: "is not signed by {ca}",
    21: "is not signed by {ca}",
    23: "is revoked by {crl}",
    26: "is not made for this purpose: leave out extendedKeyUsage, or name {purpose} in it",
}


def context(directory: Path, role: Role, server_name: str = "") -> ssl.SSLContext:
    """A context for one end, after everything that can be checked alone is checked.

    Parameters
    ----------
    directory : Path
        Where certificates and keys are.
    role : str
        ``server`` or ``client``.
    server_name : str
        Of a client: the name that the server's certificate must carry; "" for any.

    Raises
    ------
    ConfigError
        In one line: which file, and why.
    """
    kind = ssl.PROTOCOL_TLS_SERVER if role == "server" else ssl.PROTOCOL_TLS_CLIENT
    made = ssl.SSLContext(kind)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    if role == "client":
        made.check_hostname = bool(server_name)
    made.verify_mode = ssl.CERT_REQUIRED
    keys = _Keys(directory)
    _trust(made, directory)
    keys.show(made, role)
    _check_own(keys, directory, role)
    return made


def reason(error: BaseException, directory: Path, peer: Role) -> str:
    """Why a connection was not made, in words.

    Parameters
    ----------
    error : Exception
    directory : Path
        This end's.
    peer : str
        What the other end is.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the {peer}'s certificate {_because(error, directory, peer)}"
    if isinstance(error, ssl.SSLError):
        for words, text in _ALERTS.items():
            if words in (error.reason or ""):
                return text.format(peer=peer)
        return f"TLS with the {peer} fails: {error.reason or error}"
    if isinstance(error, (ConnectionResetError, BrokenPipeError, EOFError)):
        return (
            f"the {peer} hangs up: its own log says why; perhaps it refuses this end's certificate"
        )
    if isinstance(error, TimeoutError):
        return f"the {peer} does not answer"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


_ALERTS = {
    "WRONG_VERSION_NUMBER": "the {peer} speaks no TLS: give both ends tls_path, or none of them",
    "HTTP_REQUEST": "the {peer} speaks no TLS but HTTP: it is no end of Spool",
    "ALERT_UNKNOWN_CA": "the {peer} does not know who signed this end's certificate",
    "CERTIFICATE_REVOKED": "the {peer} says that this end's certificate is revoked",
    "CERTIFICATE_EXPIRED": "the {peer} says that this end's certificate, or its list of revoked "
    "ones, has expired",
    "CERTIFICATE_REQUIRED": "the {peer} wants a certificate, and this end shows none",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the {peer} shows no certificate: it is no end of Spool",
    "UNSUPPORTED_CERTIFICATE": "the {peer} says that this end's certificate is not made for this "
    "purpose (extendedKeyUsage)",
    "ALERT_BAD_CERTIFICATE": "the {peer} does not take this end's certificate: its log says why",
    "PROTOCOL_VERSION": "the {peer} has no TLS 1.2 or later",
    "UNSUPPORTED_PROTOCOL": "the {peer} has no TLS 1.2 or later",
}


def _trust(made: ssl.SSLContext, directory: Path) -> None:
    ca, crl = directory / "ca.crt", directory / "crl.pem"
    _readable(ca)
    try:
        made.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise ConfigError(f"{ca}: is no certificate in PEM form: {error.reason}") from None
    if not os.path.lexists(crl):
        return
    _readable(crl)
    try:
        made.load_verify_locations(crl)
    except ssl.SSLError as error:
        raise ConfigError(f"{crl}: is no list of revoked certificates: {error.reason}") from None
    made.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF


class _Keys:
    """Certificates and keys of a directory; a passphrase is asked for once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[Path, str] = {}

    def show(self, made: ssl.SSLContext, role: Role) -> None:
        """Let a context show the certificate of a role."""
        certificate = self._directory / f"{role}.crt"
        key = self._directory / f"{role}.key"
        _readable(certificate)
        _readable(key)

        def passphrase() -> str:
            if key not in self._known:
                self._known[key] = _passphrase(key)
            return self._known[key]

        try:
            made.load_cert_chain(certificate, key, passphrase)
        except ssl.SSLError as error:
            if "KEY_VALUES_MISMATCH" in (error.reason or ""):
                raise ConfigError(f"{key}: is not the key of {certificate}") from None
            if key in self._known:
                raise ConfigError(f"{key}: the passphrase does not open it") from None
            is_whole = b"-----BEGIN CERT" in certificate.read_bytes()
            which = key if is_whole else certificate
            raise ConfigError(f"{which}: is not in PEM form: {error.reason or error}") from None


def _passphrase(key: Path) -> str:
    """The passphrase of an encrypted key: from the environment, a file, or a terminal."""
    if PASSPHRASE in os.environ:
        return os.environ[PASSPHRASE]
    if file := os.environ.get(PASSPHRASE_FILE):
        try:
            return Path(file).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{PASSPHRASE_FILE}={file}: cannot be read: {error}") from None
    # A training host sends from a process without a terminal.
    if key.name == "server.key" and sys.stdin is not None and sys.stdin.isatty():
        return getpass.getpass(f"passphrase of {key}: ")
    raise ConfigError(
        f"{key}: is encrypted; give its passphrase in {PASSPHRASE}, or in a file that "
        f"{PASSPHRASE_FILE} names"
    )


def _readable(path: Path) -> None:
    try:
        with open(path, "rb"):
            return
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; tls_path names the directory that has it"
        ) from None


def _check_own(keys: _Keys, directory: Path, role: Role) -> None:
    """Check this end's certificate as the other end will: by a handshake in memory.

    Raises
    ------
    ConfigError
        If it would be refused.
    """
    other = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if role == "server" else ssl.PROTOCOL_TLS_SERVER)
    other.check_hostname = False
    other.verify_mode = ssl.CERT_REQUIRED
    _trust(other, directory)
    same = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if role == "server" else ssl.PROTOCOL_TLS_CLIENT)
    if role == "client":
        same.check_hostname = False
    same.verify_mode = ssl.CERT_NONE
    keys.show(same, role)
    if role == "client":  # a server must show some certificate, which nobody looks at here
        keys.show(other, role)
    try:
        _handshake(same, other, role)
    except ssl.SSLCertVerificationError as error:
        certificate = directory / f"{role}.crt"
        raise ConfigError(f"{certificate}: {_because(error, directory, role)}") from None
    except ssl.SSLError as error:
        raise ConfigError(
            f"{directory}: TLS cannot be set up with these files: {error.reason or error}"
        ) from None


def _handshake(mine: ssl.SSLContext, other: ssl.SSLContext, role: Role) -> None:
    """Let two contexts shake hands, as far as it takes for `other` to judge `mine`."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        mine.wrap_bio(there, back, server_side=role == "server"),
        other.wrap_bio(back, there, server_side=role == "client"),
    ]
    waiting = set(ends)
    for _ in range(10):
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.discard(end)
            except ssl.SSLWantReadError:
                continue
        if not waiting:
            return
    raise ssl.SSLError("the handshake does not end")


def _because(error: ssl.SSLCertVerificationError, directory: Path, role: Role) -> str:
    text = _WHY.get(error.verify_code)
    if text is None:
        return f"is refused: {error.verify_message}"
    return text.format(ca=directory / "ca.crt", crl=directory / "crl.pem", purpose=f"{role}Auth")
