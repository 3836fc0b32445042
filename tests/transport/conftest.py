from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from authority import Authority

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(scope="session")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of certificates that are in order."""
    authority = Authority(tmp_path_factory.mktemp("certificates") / "ca")
    authority.issue("server")
    authority.issue("client")
    return authority.home


@pytest.fixture
def certificates(signed: Path, tmp_path: Path) -> Path:
    """A copy of one's own."""
    shutil.copytree(signed, tmp_path / "tls")
    return tmp_path / "tls"
