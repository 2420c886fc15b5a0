"""Encodes texts that go on from one another, at the cost of what is new. Pure.

A ``tokenizers`` pipeline looks for its added tokens first, from left to right, the longest of those
that begin at one place (``tokenizers/src/tokenizer/added_vocabulary.rs``), and encodes what stands
between two of them without a look at the rest. So the ids before such a token, a cut, are those of
every text that begins alike, and encoding goes on there. Chat templates put one around each
message.

Not every added token is a cut. One inside a longer one, one that counts only as a whole word, and
one that is looked for in a second pass, over normalized text, can be undone by what follows it. The
rest is encoded from the cut on, not from behind it: some tokenizers treat the beginning of a text
differently.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

IntArray = npt.NDArray[np.int32]
_Cuts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Encoded:
    """A text and its tokens.

    ``ids`` int32 (N,). ``cuts`` int64 (K, 3), in order: where a cut starts and ends in the text, in
    characters, and how many tokens come before it.
    """

    text: str
    ids: IntArray
    cuts: _Cuts


EMPTY = Encoded("", np.empty(0, np.int32), np.empty((0, 3), np.int64))


class SpanEncoder:
    """Encodes with one tokenizer, adding no special tokens: chat templates write them out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """``tokenizer`` is copied: its truncation and padding are not taken over."""
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._cuts = _cutting(self._tokenizer)

    def encode(self, text: str, after: Encoded = EMPTY) -> Encoded:
        """Return the tokens of ``text``, the same whatever comes ``after``.

        The time is that for what ``text`` does not begin with in common with ``after.text``, and
        for comparing the two.
        """
        kept = int(np.searchsorted(after.cuts[:, 1], _common(text, after.text), side="right")) - 1
        start, _, tokens = (int(n) for n in after.cuts[kept]) if kept >= 0 else (0, 0, 0)
        rest = self._tokenizer.encode(text[start:], add_special_tokens=False)
        found = [
            (start + begin, start + end, tokens + number)
            for number, (id_, (begin, end)) in enumerate(zip(rest.ids, rest.offsets, strict=True))
            # An unknown token can have the id of an added one.
            if (content := self._cuts.get(id_)) and text[start + begin : start + end] == content
        ]
        return Encoded(
            text,
            np.concatenate([after.ids[:tokens], np.array(rest.ids, np.int32)]),
            np.concatenate([after.cuts[: max(kept, 0)], np.array(found, np.int64).reshape(-1, 3)]),
        )


def _cutting(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the added tokens that are cuts."""
    added = tokenizer.get_added_tokens_decoder()
    contents = "\0".join(token.content for token in added.values())
    return {
        id_: token.content
        for id_, token in added.items()
        if not (token.normalized or token.single_word)
        and contents.find(token.content) == contents.rfind(token.content)
    }


def _common(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
