"""The secret that an agent shares with the plugin in vLLM's workers."""

from pathlib import Path

import pytest

from deploy.security.exposure import missing_at_agent
from deploy.security.plugin_secret import NoPluginSecret, plugin_secret
from engine_adapter.vllm.config import VllmConfig


def test_a_missing_file_is_created_for_its_owner_alone_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "new" / "v.secret"
    secret = plugin_secret(file)
    assert len(secret) >= 32
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o077 == 0
    assert plugin_secret(file) == secret
    assert plugin_secret(tmp_path / "other") != secret


def test_files_that_protect_nothing_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "v.secret"
    file.write_text("a secret of enough characters\n")
    file.chmod(0o640)
    with pytest.raises(NoPluginSecret, match="chmod 600"):
        plugin_secret(file)
    file.chmod(0o600)
    assert plugin_secret(file) == b"a secret of enough characters"
    file.write_text("short\n")
    with pytest.raises(NoPluginSecret, match="at least 16 characters, not 5"):
        plugin_secret(file)
    with pytest.raises(NoPluginSecret, match="secret_file"):
        plugin_secret(file / "inside a file")


def test_an_address_that_other_machines_reach_is_named() -> None:
    assert missing_at_agent(VllmConfig(listen="127.0.0.1:1")) is None
    lacks = missing_at_agent(VllmConfig(listen="0.0.0.0:1"))
    assert lacks is not None
    assert "the agent of vLLM's workers would listen on '0.0.0.0'" in lacks
