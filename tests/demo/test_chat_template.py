"""The demo's chat template: few tokens, and each turn extends the one before token by token."""

from pathlib import Path
from typing import Any

import pytest

from deploy.demo.settings import CHAT_TEMPLATE

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "price",
            "description": "Look up the price of an item.",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
        },
    }
]
HEAD: list[dict[str, Any]] = [
    {"role": "system", "content": "Look up the price."},
    {"role": "user", "content": "How much is a lemon?"},
]


def called(**arguments: Any) -> dict[str, Any]:
    function = {"name": "price", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


@pytest.fixture(scope="module")
def render(smol_model: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smol_model)
    template = CHAT_TEMPLATE.read_text(encoding="utf-8")

    def ids(messages: list[dict[str, Any]], tools: Any = TOOLS) -> list[int]:
        return tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template,
            add_generation_prompt=True,
            return_dict=False,
        )

    ids.text = lambda *args: tokenizer.decode(ids(*args))  # type: ignore[attr-defined]
    ids.encode = tokenizer.encode  # type: ignore[attr-defined]
    return ids


def test_text_of_a_conversation(render):
    text = render.text([*HEAD, called(item="lemon"), {"role": "tool", "content": "37"}])
    assert text == (
        "<|im_start|>system\nLook up the price.\nTools: price(item)<|im_end|>\n"
        "<|im_start|>user\nHow much is a lemon?<|im_end|>\n"
        "<|im_start|>assistant\n[price(item='lemon')]<|im_end|>\n"
        "<|im_start|>tool\n37<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_second_turn_extends_the_first_token_by_token(render):
    sampled = render.encode("[price(item='lemon')]<|im_end|>")
    first = render(HEAD) + sampled
    second = render([*HEAD, called(item="lemon"), {"role": "tool", "content": "37"}])
    assert second[: len(first)] == first
    assert len(second) < 75


def test_without_tools_and_system_only_the_turns_are_left(render):
    assert render.text(HEAD[1:], None) == (
        "<|im_start|>user\nHow much is a lemon?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_other_values_are_written_as_python_reads_them(render):
    text = render.text([*HEAD, called(item="it's", count=3)])
    assert '[price(item="it\'s", count=3)]' in text
