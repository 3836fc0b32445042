"""A certificate authority for tests, by the openssl program."""

from __future__ import annotations

import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path

CONFIG = """
[ca]
default_ca = spool
[spool]
database = {home}/index.txt
crlnumber = {home}/crlnumber
serial = {home}/serial
new_certs_dir = {home}
certificate = {home}/ca.crt
private_key = {home}/ca.key
default_md = sha256
default_days = 365
default_crl_days = 30
policy = any
unique_subject = no
[any]
commonName = supplied
[plain]
basicConstraints = CA:FALSE
[server]
extendedKeyUsage = serverAuth
"""


def openssl(*arguments: str, cwd: Path) -> None:
    done = subprocess.run(
        ["openssl", *arguments], cwd=cwd, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


class Authority:
    """Signs and revokes; everything it makes lies in its directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir(parents=True)
        (home / "index.txt").touch()
        (home / "crlnumber").write_text("01\n")
        (home / "serial").write_text("01\n")
        (home / "ca.cnf").write_text(CONFIG.format(home=home))
        self.run(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-days", "3650", "-subj", "/CN=test CA", "-keyout", "ca.key", "-out", "ca.crt"),
        )

    def run(self, *arguments: str) -> None:
        openssl(*arguments, cwd=self.home)

    def issue(
        self,
        name: str,
        *,
        days: tuple[int, int] = (-1, 365),
        extensions: str = "plain",
        passphrase: str = "",
    ) -> None:
        """Make ``name.crt`` and ``name.key``, valid from and to so many days from now."""
        locked = ("-passout", f"pass:{passphrase}") if passphrase else ("-nodes",)
        self.run(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", *locked),
            *("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr"),
        )
        now = datetime.now(timezone.utc)
        start, end = (f"{now + timedelta(days=day):%Y%m%d%H%M%SZ}" for day in days)
        self.run(
            *("ca", "-batch", "-config", "ca.cnf", "-in", f"{name}.csr", "-out", f"{name}.crt"),
            *("-startdate", start, "-enddate", end, "-extensions", extensions, "-notext"),
        )

    def revoke(self, name: str) -> None:
        """Put a certificate on the list of revoked ones."""
        self.run("ca", "-config", "ca.cnf", "-revoke", f"{name}.crt")

    def list_revoked(self, *options: str) -> None:
        """Make ``crl.pem``."""
        self.run("ca", "-config", "ca.cnf", "-gencrl", "-out", "crl.pem", *options)
