"""The trainer as its own process: exact restart after kills, one at a time, never orphaned."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from deploy.errors import UserError
from tests.trainer.conftest import make_batch
from trainer.batch import Canary
from trainer.client import TrainerClient, TrainerDied, TrainingRejected
from trainer.config import TrainerConfig
from trainer.trainer import Trainer


class KillAt:
    """Kills a trainer as soon as it reports a stage, once it is told which."""

    def __init__(self) -> None:
        self.stage: str | None = None
        self.pid: int | None = None

    def __call__(self, stage: str) -> None:
        if stage == self.stage and self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)


def train_straight(
    config: TrainerConfig, model: Path, directory: Path, batches: list[Path]
) -> Canary:
    trainer = Trainer(config, model, directory, print)
    manifest = trainer.bootstrap()
    for k, batch in enumerate(batches):
        manifest = trainer.train(batch, f"v{k}", f"v{k + 1}")
    trainer.close()
    return manifest.canary


def state(directory: Path, version: str) -> dict[str, torch.Tensor]:
    """The published weights and all of the optimizer's state."""
    found = load_file(directory / "weights" / version / "model.safetensors")
    path = directory / "checkpoints" / version / "optim_world_size_1_rank_0.pt"
    # Sharded tensors unpickle only inside a process group.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for k, entry in torch.load(path, weights_only=False)["state"].items():
        for name, value in entry.items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{k}.{name}"] = torch.as_tensor(full).clone()
    dist.destroy_process_group()
    return found


async def test_killed_at_any_stage_equals_never_stopped(
    config: TrainerConfig, model: Path, tmp_path: Path
) -> None:
    batches = [tmp_path / "first.npz", tmp_path / "second.npz"]
    make_batch(model).save(batches[0])
    make_batch(model, seed=1, version=1).save(batches[1])
    expected = train_straight(config, model, tmp_path / "straight", batches)

    directory = tmp_path / "broken"
    killer = KillAt()
    client = TrainerClient(config, model, directory, killer)
    await client.start()
    await client.bootstrap()
    await client.train(batches[0], "v0", "v1")
    for stage in ("update", "writing"):
        killer.stage, killer.pid = stage, client.pid
        with pytest.raises(TrainerDied, match="signal 9"):
            await client.train(batches[1], "v1", "v2")
        with pytest.raises(TrainerDied):
            await client.train(batches[1], "v1", "v2")
        await client.start()
        for kind in ("weights", "checkpoints"):
            assert sorted(os.listdir(directory / kind)) == ["v0", "v1"]
    killer.pid = None
    found = await client.train(batches[1], "v1", "v2")
    with pytest.raises(TrainingRejected, match="exists already"):
        await client.train(batches[0], "v1", "v2")
    await client.close()

    assert found.canary == expected
    a, b = state(tmp_path / "straight", "v2"), state(directory, "v2")
    assert any("exp_avg_sq" in name for name in a)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


async def test_closing_in_the_middle_of_a_step_does_not_wait_for_it(
    config: TrainerConfig, model: Path, tmp_path: Path
) -> None:
    make_batch(model).save(tmp_path / "batch.npz")
    under_way = asyncio.Event()
    client = TrainerClient(config, model, tmp_path / "state", lambda stage: under_way.set())
    await client.start()
    await client.bootstrap()
    assert client.pid is not None
    process = psutil.Process(client.pid)
    under_way.clear()
    step = asyncio.create_task(client.train(tmp_path / "batch.npz", "v0", "v1"))
    await under_way.wait()
    process.suspend()  # a step that takes for ever
    step.cancel()
    began = time.monotonic()
    await client.close()
    assert time.monotonic() - began < 5
    assert not process.is_running()


async def test_a_second_trainer_waits_for_the_first(
    config: TrainerConfig, model: Path, tmp_path: Path
) -> None:
    first, second = (TrainerClient(config, model, tmp_path / "run") for _ in range(2))
    await first.start()
    starting = asyncio.create_task(second.start())
    await asyncio.sleep(2)
    assert not starting.done()
    await first.close()
    await asyncio.wait_for(starting, 120)
    await second.close()


def test_the_trainer_never_outlives_its_parent(
    config: TrainerConfig, model: Path, tmp_path: Path
) -> None:
    script = textwrap.dedent("""
        import asyncio, sys
        from pathlib import Path
        import msgspec
        from trainer.client import TrainerClient
        from trainer.config import TrainerConfig

        async def main():
            config = msgspec.json.decode(sys.argv[1], type=TrainerConfig)
            client = TrainerClient(config, Path(sys.argv[2]), Path(sys.argv[3]))
            await client.start()
            print(client.pid, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """)
    arguments = [msgspec.json.encode(config).decode(), str(model), str(tmp_path / "run")]
    parent = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def test_the_users_errors_come_through(
    config: TrainerConfig, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="can't be used"):
        await TrainerClient(config, model, tmp_path / "file").start()
