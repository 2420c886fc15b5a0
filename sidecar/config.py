"""The ``[sidecar]`` section of the configuration."""

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from sidecar.operations.logs import LogFormat

TokenSource = Literal["auto", "tap", "api", "none"]
Credentials = Literal["forward", "replace", "drop"]
Destination = Literal["routes", "original"]


class UpstreamConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One ``[[sidecar.upstreams]]``: the first one that takes a request gets it."""

    urls: Annotated[
        list[str],
        Meta(
            min_length=1,
            description="Model servers, all serving the same model: http or https, with or "
            "without a path prefix. The calls of one run go to one of them.",
        ),
    ]
    name: Annotated[
        str, Meta(description="Its name in messages and in /healthz; empty: its first URL.")
    ] = ""
    paths: Annotated[
        list[str],
        Meta(
            description="Request paths it takes, such as `/v1/messages*`; patterns may hold `*`, "
            "`?` and `[…]`. Empty: any."
        ),
    ] = []
    models: Annotated[
        list[str],
        Meta(
            description="Values of the request's `model` it takes, patterns like `paths`. Empty: "
            "any. A request whose upstream depends on its model is sent on when all of it is here."
        ),
    ] = []
    rename: Annotated[
        dict[str, str],
        Meta(
            description='Models to ask for under another name: `{"gpt-5*" = "my-model"}`. An exact '
            "name counts before patterns, which count in their order."
        ),
    ] = {}
    credentials: Annotated[
        Credentials,
        Meta(
            description="What becomes of the agent's API key: passed on, replaced by the one that "
            "`credential_env` or `credential_file` holds, or left out."
        ),
    ] = "forward"
    credential_env: Annotated[
        str, Meta(description="Environment variable with the API key that replaces the agent's.")
    ] = ""
    credential_file: Annotated[
        str, Meta(description="File with the API key that replaces the agent's.")
    ] = ""
    credential_header: Annotated[
        Literal["authorization", "x-api-key"],
        Meta(
            description="Header that carries it: `Authorization: Bearer …`, as vLLM and OpenAI "
            "want it, or `x-api-key`, as Anthropic does."
        ),
    ] = "authorization"
    tap: Annotated[
        bool,
        Meta(
            description="Ask for exact tokens, as `sidecar.token_source` says; false for servers "
            "that are not vLLM."
        ),
    ] = True
    health_path: Annotated[
        str,
        Meta(
            description="Path that answers anything but 5xx while a server is well; asked of "
            "replicas only."
        ),
    ] = "/health"


class InterceptConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One ``[[sidecar.intercept]]``: a host whose traffic is read where the sidecar is a proxy."""

    host: Annotated[
        str,
        Meta(
            description="Host, or host and port, such as `api.openai.com`, `*.example.com` or "
            "`10.0.0.5:8000`. Without a port: every port."
        ),
    ]
    to: Annotated[
        Destination,
        Meta(
            description="`routes`: its requests go where those to `sidecar.listen` go; "
            "`original`: they go to the host itself, and are recorded."
        ),
    ] = "routes"


class SidecarConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Every key has a default: a sidecar beside a vLLM on its usual port needs no configuration."""

    upstream: Annotated[
        str,
        Meta(
            description="Model server the agent's requests go to: http or https, with or without "
            "a path prefix."
        ),
    ] = "http://127.0.0.1:8000"
    listen: Annotated[
        str,
        Meta(
            description="Address the agent connects to; one that other machines reach needs "
            "`tls_certificate`, `tls_key` and `require_key`. Port 0 takes a free port. Unused when "
            "a listening socket is inherited (LISTEN_FDS)."
        ),
    ] = "127.0.0.1:8787"
    proxy: Annotated[
        str,
        Meta(
            description="Loopback address for agents that take HTTP_PROXY and HTTPS_PROXY, such as "
            "127.0.0.1:8789. Empty: off."
        ),
    ] = ""
    transparent: Annotated[
        str,
        Meta(
            description="Loopback address that `deploy/transparent.sh` redirects connections to, "
            "such as 127.0.0.1:15001. Empty: off."
        ),
    ] = ""
    local: Annotated[
        list[str],
        Meta(
            description="Names or pids of programs on this machine whose connections are taken by "
            "mitmproxy's local capture (eBPF; needs root; for experts). Empty: off."
        ),
    ] = []
    intercept: Annotated[
        list[InterceptConfig],
        Meta(
            description="Hosts whose traffic is read in the ways `proxy`, `transparent` and "
            "`local`. The upstreams are always read; all other hosts pass untouched, with their "
            "own certificates. A list of your own takes the place of this one."
        ),
    ] = field(
        default_factory=lambda: [
            InterceptConfig("api.openai.com"),
            InterceptConfig("api.anthropic.com"),
        ]
    )
    ca_dir: Annotated[
        str,
        Meta(
            description="Folder of the certificate authority that signs for intercepted hosts; "
            "made at the first start that needs it. `ca.pem` is its certificate, `bundle.pem` that "
            "and all public ones."
        ),
    ] = "~/.ridealong/ca"
    upstreams: Annotated[
        list[UpstreamConfig],
        Meta(
            description="Model servers for some paths or models, or with replicas, renamed models "
            "or other credentials. Requests that none of them takes go to `upstream`."
        ),
    ] = []
    timeout_seconds: Annotated[
        int,
        Meta(
            ge=1,
            description="Seconds without a byte in either direction after which a connection is "
            "given up.",
        ),
    ] = 86_400
    connect_seconds: Annotated[
        float,
        Meta(gt=0, description="Seconds a replica has to take a connection; then another is used."),
    ] = 5.0
    health_seconds: Annotated[
        float, Meta(gt=0, description="Seconds between two health checks of a replica.")
    ] = 10.0
    admin: Annotated[
        str,
        Meta(
            description="Loopback address of /healthz, /readyz and /metrics. Port 0 takes a free "
            "port."
        ),
    ] = "127.0.0.1:8788"
    require_key: Annotated[
        bool,
        Meta(
            description="Admit only requests with a run key in place of the API key; `ridealong "
            "key RUN` prints one."
        ),
    ] = False
    key_file: Annotated[
        str,
        Meta(
            description="File with the secret behind run keys, made with mode 0600 if there is "
            "none. A new secret ends all keys."
        ),
    ] = "~/.ridealong/run-keys.secret"
    tls_certificate: Annotated[
        str,
        Meta(
            description="PEM file with the certificate chain for TLS at `listen`; needs `tls_key`. "
            "Empty: plain HTTP."
        ),
    ] = ""
    tls_key: Annotated[
        str, Meta(description="PEM file with the unencrypted private key of `tls_certificate`.")
    ] = ""
    max_header_kib: Annotated[
        int, Meta(ge=1, description="A request whose header is larger (KiB) is refused with 431.")
    ] = 256
    max_header_fields: Annotated[
        int, Meta(ge=1, description="A request with more header fields is refused with 431.")
    ] = 500
    max_body_mib: Annotated[
        int, Meta(ge=1, description="A request whose body is larger (MiB) is refused with 413.")
    ] = 256
    log_format: Annotated[
        LogFormat, Meta(description="Log lines on stderr: for people, or a JSON object each.")
    ] = "text"
    traces: Annotated[str, Meta(description="Folder the trace shards are written to.")] = "traces"
    token_source: Annotated[
        TokenSource,
        Meta(
            description="Where the exact tokens of model calls come from. `tap`: the engine's "
            "token tap (`ridealong serve`). `api`: what a vLLM without it tells by its chat and "
            "completions API, asked for in the request's text and taken out of the reply again; "
            "not trained from, since it names no weight version. `auto`: the tap, or the API of a "
            "vLLM that has no tap. `none`: nowhere."
        ),
    ] = "auto"
    rotate_mib: Annotated[
        int,
        Meta(ge=1, description="A shard that has reached this size (MiB) is followed by a new."),
    ] = 256
    rotate_seconds: Annotated[
        int, Meta(ge=1, description="A shard of this age (seconds) is followed by a new one.")
    ] = 3600
    retain_days: Annotated[
        float,
        Meta(
            ge=0,
            description="Shards older than this (days) are deleted, once the daemon has consumed "
            "them; 0 keeps them.",
        ),
    ] = 0.0
    retain_gib: Annotated[
        float,
        Meta(
            ge=0,
            description="Beyond this size of the folder (GiB) the oldest shards are deleted, once "
            "the daemon has consumed them; 0 keeps them.",
        ),
    ] = 0.0
    queue_mib: Annotated[
        int,
        Meta(
            ge=1,
            description="Records (MiB) kept in memory while they can't be written; what comes on "
            "top of that is counted as lost.",
        ),
    ] = 256
    drain_seconds: Annotated[
        float,
        Meta(ge=0, description="Seconds that calls in flight are given to end after SIGTERM."),
    ] = 30.0
