"""Encoding what is new against encoding the whole, on small tokenizers of every kind and on a real
one.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from tokenization.retokenize.spans import EMPTY, SpanEncoder

CORPUS = ["the cat sat on the mat", "def f(x): return x + 1\n", "éàü 日本語 🙂", "<|a|> a|> <|"] * 4
ADDED = [
    AddedToken("<|a|>", special=True, normalized=False),
    AddedToken("<|b|>", special=True, normalized=False),
    AddedToken("<|b|><|a|>", special=True, normalized=False),
    AddedToken("[<|a|>]", special=True, normalized=False),
    AddedToken("|><|", normalized=False),
    AddedToken("<s>", special=True, normalized=False, rstrip=True),
    AddedToken("</s>", special=True, normalized=False, lstrip=True),
    AddedToken("mat", single_word=True, normalized=False),
    AddedToken("te", normalized=True),
    AddedToken("e|", normalized=False),
]


def _byte_level(add_prefix_space: bool) -> tuple[Any, Any]:
    return None, pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)


KINDS: dict[str, tuple[Any, Any]] = {
    "byte level": _byte_level(False),
    "byte level, space before": _byte_level(True),
    "metaspace at the start": (None, pre_tokenizers.Metaspace(prepend_scheme="first")),
    "metaspace always": (None, pre_tokenizers.Metaspace(prepend_scheme="always")),
    "no normalizer in a sequence": (normalizers.Sequence([]), pre_tokenizers.ByteLevel(False)),
    "NFC": (normalizers.NFC(), pre_tokenizers.ByteLevel(False)),
    "changing length": (
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Lowercase()]),
        pre_tokenizers.Whitespace(),
    ),
}


@cache
def encoder_of(kind: str, added: tuple[int, ...]) -> tuple[Tokenizer, SpanEncoder]:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = KINDS[kind]
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>"], show_progress=False, initial_alphabet=["a", "|"]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([ADDED[number] for number in added])
    return tokenizer, SpanEncoder(tokenizer)


PIECE = st.sampled_from(
    [token.content for token in ADDED]
    + ["<unk>", "<|a", "|>", " ", "\n", "a", "the ", "é", "e\u0301"]
) | st.text(alphabet="aemtsTE <|>\n日🙂", max_size=4)
TEXT = st.lists(PIECE, max_size=10)


@given(
    kind=st.sampled_from(list(KINDS)),
    added=st.sets(st.sampled_from(range(len(ADDED)))).map(lambda some: tuple(sorted(some))),
    texts=st.lists(st.tuples(st.integers(0, 10), TEXT), min_size=1, max_size=5),
)
def test_as_the_whole_text(
    kind: str, added: tuple[int, ...], texts: list[tuple[int, list[str]]]
) -> None:
    """Each text keeps some pieces of the last one and goes on with others."""
    tokenizer, encoder = encoder_of(kind, added)
    pieces: list[str] = []
    encoded = EMPTY
    for keep, new in texts:
        pieces = pieces[:keep] + new
        text = "".join(pieces)
        encoded = encoder.encode(text, encoded)
        assert encoded.ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids
        again = encoder.encode(text)
        assert np.array_equal(encoded.cuts, again.cuts) and encoded.text == text


@pytest.mark.parametrize(
    ("before", "after"),
    [("x[<|a|>", "x[<|a|>]"), ("the mat", "the mats"), ("ate", "ate|"), ("x<s>", "x<s> y")],
    ids=["inside a longer one", "a whole word", "normalized", "takes the blanks behind it"],
)
def test_what_follows_can_undo_a_token(before: str, after: str) -> None:
    tokenizer, encoder = encoder_of("byte level", tuple(range(len(ADDED))))
    encoded = encoder.encode(after, encoder.encode(before))
    assert encoded.ids.tolist() == tokenizer.encode(after, add_special_tokens=False).ids


def test_an_unknown_token_is_no_cut() -> None:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.train_from_iterator(
        ["xyz"], trainers.BpeTrainer(special_tokens=["<unk>"], show_progress=False)
    )
    tokenizer.add_tokens([AddedToken("<unk>", special=True, normalized=False)])
    assert SpanEncoder(tokenizer).encode("日<unk>x").cuts.tolist() == [[1, 6, 1]]


def test_only_what_is_new_is_encoded(smol_model: Path) -> None:
    """In a conversation of 100 turns a turn costs its own tokens."""
    tokenizer = Tokenizer.from_file(str(smol_model / "tokenizer.json"))
    encoder = SpanEncoder(tokenizer)
    given_to: list[str] = []

    class FakeCounting:
        """Notes what it is asked to encode."""

        def encode(self, text: str, add_special_tokens: bool) -> Any:
            given_to.append(text)
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    encoder._tokenizer = FakeCounting()
    text, encoded = "", EMPTY
    for turn in range(100):
        text += f"<|im_start|>user\nQuestion {turn}: what is {turn} + 1?<|im_end|>\n"
        encoded = encoder.encode(text, encoded)
    assert encoded.ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids
    assert sum(map(len, given_to)) < 1.3 * len(text)


def test_truncation_and_padding_are_left_out(smol_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smol_model / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=100)
    assert 2 < len(SpanEncoder(tokenizer).encode("one two three four five").ids) < 100
