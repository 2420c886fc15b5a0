"""Settings of the serving engine that ``ridealong serve`` starts."""

from typing import Annotated

import msgspec


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section ``[serve]``. Empty and 0 mean: leave it to the default that the text names."""

    model: Annotated[
        str, msgspec.Meta(description="Folder of the model: config.json, weights, tokenizer.")
    ] = ""
    host: Annotated[str, msgspec.Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, msgspec.Meta(description="Port of the OpenAI-compatible API.", ge=1, le=65535)
    ] = 8000
    served_model_name: Annotated[
        str, msgspec.Meta(description="The model's name in requests; empty: the folder's name.")
    ] = ""
    chat_template: Annotated[
        str, msgspec.Meta(description="Jinja chat template file; empty: the tokenizer's own.")
    ] = ""
    tool_call_parser: Annotated[
        str,
        msgspec.Meta(
            description="vLLM tool-call parser, for example hermes; set, it turns on automatic "
            "tool choice. Empty: none."
        ),
    ] = ""
    dtype: Annotated[
        str,
        msgspec.Meta(
            description="vLLM dtype; empty: float32 on a CPU, the model's own on a GPU. float32 "
            "makes the engine's log-probs equal the trainer's."
        ),
    ] = ""
    kv_cache_gib: Annotated[
        int,
        msgspec.Meta(description="KV cache in GiB; 0: 1 on a CPU, vLLM's choice on a GPU.", ge=0),
    ] = 0
    max_model_len: Annotated[
        int, msgspec.Meta(description="Longest sequence in tokens; 0: the model's own.", ge=0)
    ] = 0
    extra_args: Annotated[
        list[str], msgspec.Meta(description="More vLLM flags; they win over the keys above.")
    ] = []
