import logging

import pytest

from deploy.errors import UserError
from sidecar.config import SidecarConfig
from sidecar.operations.reload import LIVE, Reloader, changed


def test_every_live_key_is_a_key():
    assert set(SidecarConfig.__struct_fields__) >= LIVE


def test_changed_names_the_keys():
    assert changed(SidecarConfig(), SidecarConfig()) == []
    new = SidecarConfig(listen="127.0.0.1:1", max_body_mib=1)
    assert sorted(changed(SidecarConfig(), new)) == ["listen", "max_body_mib"]


def test_only_live_keys_are_put_in_force(caplog):
    caplog.set_level(logging.INFO)
    applied: list[SidecarConfig] = []
    new = SidecarConfig(listen="127.0.0.1:1", max_body_mib=1)
    reloader = Reloader(SidecarConfig(), lambda: new, applied.append)
    reloader.reload()
    assert applied == [SidecarConfig(max_body_mib=1)] == [reloader.config]
    assert "changed: max_body_mib" in caplog.text
    assert "after a restart: listen" in caplog.text
    caplog.clear()
    reloader.reload()
    assert "changed: nothing" in caplog.text and "after a restart: listen" in caplog.text


@pytest.mark.parametrize("error", [UserError("no such file"), RuntimeError("a bug")])
@pytest.mark.parametrize("where", ["read", "apply"])
def test_what_fails_changes_nothing(caplog, error, where):
    def fail(*_):
        raise error

    def read() -> SidecarConfig:
        return fail() if where == "read" else SidecarConfig(max_body_mib=1)

    reloader = Reloader(SidecarConfig(), read, fail)
    reloader.reload()
    assert reloader.config == SidecarConfig()
    (line,) = caplog.records
    assert line.levelname == "ERROR" and "stays as it was" in caplog.text
