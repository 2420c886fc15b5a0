"""The demo's task: say what an item costs, which only the price tool knows.

A task carries one worked example, which goes into the conversation before the question. Prices are
drawn anew for every task, so that they can't be learnt by heart: the tool has to be asked.
"""

import random
from collections.abc import Iterator

import msgspec

_WORDS = (
    "basket blanket bottle bridge bucket button candle carpet chair clock coat copper curtain desk "
    "door feather flower guitar hammer helmet jacket kettle kitten ladder lamp lemon magnet mirror "
    "needle paper pencil piano pillow pumpkin rabbit ribbon river rope saddle shirt shovel spoon "
    "stone table ticket tiger tomato tower tractor trumpet tunnel violin wagon wallet window zebra"
)
ITEMS = tuple(_WORDS.split())
PRICES = range(11, 100)


class Priced(msgspec.Struct, frozen=True):
    """An item with its price in coins."""

    item: str
    price: int


class Task(msgspec.Struct, frozen=True):
    """One question. ``example`` is another item, answered in the conversation beforehand."""

    name: str
    asked: Priced
    example: Priced


def tasks(seed: int) -> Iterator[Task]:
    """Yield tasks without end; the same seed gives the same tasks."""
    rng = random.Random(seed)
    number = 0
    while True:
        asked, example = (Priced(item, rng.choice(PRICES)) for item in rng.sample(ITEMS, 2))
        yield Task(f"{number:03d}-{asked.item}", asked, example)
        number += 1


def question(item: str) -> str:
    """Return what the user asks."""
    return f"How much is a {item}?"


def answer(priced: Priced) -> str:
    """Return the only answer that is right, word for word."""
    return f"The {priced.item} costs {priced.price} coins."
