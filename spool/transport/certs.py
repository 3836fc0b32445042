"""`spool certs`: an authority, and certificates for both ends, to try the socket out."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

from spool.errors import ConfigError
from spool.files import atomic_write, make_dirs

_DAYS = 365


def make(directory: Path) -> list[Path]:
    """Make ``ca``, ``server`` and ``client``, each with its key; return their paths.

    Parameters
    ----------
    directory : Path
        Made if it is not there.

    Raises
    ------
    ConfigError
        If there are certificates already, or the package cryptography is missing.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError:
        raise ConfigError(
            "spool certs needs the package cryptography: pip install cryptography; or make "
            "certificates with openssl, as docs/transport.md shows"
        ) from None
    names = [f"{end}.{kind}" for end in ("ca", "server", "client") for kind in ("key", "crt")]
    there = [name for name in names if os.path.lexists(directory / name)]
    if there:
        raise ConfigError(f"{directory / there[0]}: is there already; name another directory")
    make_dirs(directory)
    now = datetime.datetime.now(datetime.timezone.utc)
    keys = {end: ec.generate_private_key(ec.SECP256R1()) for end in ("ca", "server", "client")}

    def name(end: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"spool trial {end}")])

    for end, key in keys.items():
        is_ca = end == "ca"
        builder = (
            x509.CertificateBuilder()
            .subject_name(name(end))
            .issuer_name(name("ca"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=_DAYS))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )
        made = builder.sign(keys["ca"], hashes.SHA256())
        pem = serialization.Encoding.PEM
        secret = key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        file = os.open(directory / f"{end}.key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(file, "wb") as handle:
            handle.write(secret)
        atomic_write(directory / f"{end}.crt", made.public_bytes(pem))
    return [directory / name for name in names]
