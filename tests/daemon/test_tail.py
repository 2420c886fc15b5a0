"""Noticing new trace data."""

import asyncio
import time

from daemon.tail import Listing, Tail, list_shards
from tests.daemon.recorded import append, exchange


async def test_a_write_wakes_it_long_before_the_poll(tmp_path):
    tail = Tail(tmp_path, poll_seconds=30)
    tail.start()
    try:
        waiting = asyncio.create_task(tail.wait())
        await asyncio.sleep(0.2)
        append(tmp_path / "a", [[exchange("1")]])
        await asyncio.wait_for(waiting, 5)
    finally:
        tail.stop()


async def test_reading_does_not_wake_it(tmp_path):
    shard = append(tmp_path / "a", [[exchange("1")]])
    tail = Tail(tmp_path, poll_seconds=0.6)
    tail.start()
    try:
        await tail.wait()
        began = time.monotonic()
        waiting = asyncio.create_task(tail.wait())
        await asyncio.sleep(0)
        shard.read_bytes()
        await waiting
        assert time.monotonic() - began > 0.5
    finally:
        tail.stop()


async def test_polls_where_there_are_no_events(tmp_path):
    tail = Tail(tmp_path, poll_seconds=0.05)
    await asyncio.wait_for(tail.wait(), 5)


def test_shards_by_name(tmp_path):
    append(tmp_path / "b", [])
    append(tmp_path / "a", [[exchange("1")]])
    (tmp_path / "other.txt").touch()
    sizes = list_shards(tmp_path).sizes
    assert list(sizes) == ["a.jsonl.zst", "b.jsonl.zst"]
    assert sizes["b.jsonl.zst"] == 0 < sizes["a.jsonl.zst"]
    assert list_shards(tmp_path / "missing") == Listing()
