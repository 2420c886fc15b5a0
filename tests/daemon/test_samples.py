"""The samples that the protocol tests read are what vLLM itself takes and sends."""

from vllm.entrypoints.anthropic.protocol import (
    AnthropicMessagesRequest,
    AnthropicMessagesResponse,
    AnthropicStreamEvent,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.completion.protocol import (
    CompletionRequest,
    CompletionResponse,
    CompletionStreamResponse,
)
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse

from tests.daemon import samples


def test_chat():
    ChatCompletionRequest.model_validate(samples.CHAT_REQUEST)
    ChatCompletionResponse.model_validate(samples.CHAT_REPLY)
    for chunk in samples.CHAT_STREAM:
        ChatCompletionStreamResponse.model_validate(chunk)


def test_completions():
    CompletionRequest.model_validate(samples.COMPLETIONS_REQUEST)
    CompletionResponse.model_validate(samples.COMPLETIONS_REPLY)
    for chunk in samples.COMPLETIONS_STREAM:
        CompletionStreamResponse.model_validate(chunk)


def test_responses():
    from openai.types.responses import ResponseStreamEvent
    from pydantic import TypeAdapter

    ResponsesRequest.model_validate(samples.RESPONSES_REQUEST)
    ResponsesResponse.model_validate(samples.RESPONSES_REPLY)
    adapter = TypeAdapter(ResponseStreamEvent)
    for event in samples.RESPONSES_STREAM:
        assert adapter.validate_python(event).type == event["type"]


def test_messages():
    AnthropicMessagesRequest.model_validate(samples.MESSAGES_REQUEST)
    AnthropicMessagesResponse.model_validate(samples.MESSAGES_REPLY)
    for event in samples.MESSAGES_STREAM:
        AnthropicStreamEvent.model_validate(event)
