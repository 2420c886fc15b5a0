from pathlib import Path

import pytest

from deploy import config
from deploy.demo.settings import Addresses, Settings, configuration, to_toml


def test_the_configuration_is_one_that_the_programs_take(tmp_path: Path):
    path = tmp_path / "ridealong.toml"
    addresses = Addresses(engine=8001, sidecar=8002, sidecar_admin=8003, daemon=8004)
    model = tmp_path / 'a "model"'
    path.write_text(
        to_toml(configuration(Settings(seed=5, steps=2), addresses, model, tmp_path)),
        encoding="utf-8",
    )
    read = config.load(path)
    assert read.serve.model == read.daemon.model == str(model)
    assert read.serve.port == 8001
    assert read.sidecar.upstream == read.daemon.engine == "http://127.0.0.1:8001"
    assert read.sidecar.traces == read.daemon.traces
    assert read.daemon.listen == "127.0.0.1:8004"
    assert read.trainer.learning_rate == pytest.approx(Settings(seed=0, steps=1).learning_rate)
    assert Path(read.serve.chat_template).is_file()


def test_a_run_has_its_own_base_url():
    addresses = Addresses(engine=1, sidecar=8787, sidecar_admin=3, daemon=4)
    assert addresses.agent_base_url("000-piano.3") == "http://127.0.0.1:8787/r/000-piano.3/v1"
