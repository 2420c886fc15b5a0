import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.access.redact import REDACTED, headers, is_secret, url

SECRET_NAMES = [
    "authorization",
    "Proxy-Authorization",
    "x-api-key",
    "api-key",
    "X-Goog-Api-Key",
    "cookie",
    "Set-Cookie",
    "x-auth-token",
    "X-Amz-Security-Token",
    "x-client-secret",
    "xApiKey",
    "X_ACCESS_TOKEN",
    "x-webhook-signature-key",
    "ApiKey1",
    "X-Pass",
    "X-Passwd",
    "X-Secrets",
    "X-Tokens",
    "X-Bearer",
    "cookie2",
    "X-Amz-Credentials",
    "pwd",
    "sig",
]
HARMLESS_NAMES = [
    "content-type",
    "x-ridealong-session",
    "x-claude-code-session-id",
    "session-id",
    "thread-id",
    "x-bypass",
    "x-request-id",
    "x-stainless-retry-count",
    "x-ratelimit-remaining-tokens",
    "anthropic-version",
    "idempotency-key",
    "keep-alive",
    "user-agent",
]
# Recognisable wherever it turns up, and never part of a name.
SECRET = st.text(alphabet="QZ0123456789", min_size=8)
CASE = st.sampled_from([str.lower, str.upper, str.title, lambda name: name])


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_credentials(name):
    assert is_secret(name)


@pytest.mark.parametrize("name", HARMLESS_NAMES)
def test_names_of_other_things(name):
    assert not is_secret(name)


@given(st.sampled_from(SECRET_NAMES), CASE, SECRET, st.sampled_from(HARMLESS_NAMES), st.text())
def test_no_secret_survives_and_nothing_else_changes(secret_name, case, secret, name, value):
    fields = [(name, value), (case(secret_name), f"Bearer {secret}"), (name, value)]
    redacted = headers(fields)
    assert secret not in repr(redacted[1])
    assert [redacted[0], redacted[2]] == [(name, value), (name, value)]
    assert redacted[1] == (case(secret_name), REDACTED)


@given(
    st.sampled_from(
        ["key", "api_key", "access_token", "apiKey", "api%5Fkey", "sig", "signature", "pwd"]
    ),
    SECRET,
    st.sampled_from(["/v1/x", "/v1/x/", "https://h/p"]),
    st.sampled_from(["", "model=a", "a=%20b&beta", "&&"]),
    st.sampled_from(["", "#f"]),
)
def test_no_secret_survives_in_a_url(name, secret, path, other, fragment):
    before = f"{path}?{other}&{name}={secret}&z=1{fragment}"
    assert url(before) == f"{path}?{other}&{name}={REDACTED}&z=1{fragment}"


@given(st.text(alphabet="/v1?&=#;abc%20"))
def test_a_url_without_secrets_stays_as_it_is(text):
    assert url(text) == text


def test_a_long_url_takes_no_longer_than_it_is():
    text = "/v1" + "?a=" * 100_000
    assert url(text + "&key=QZ") == f"{text}&key={REDACTED}"


def test_urls_in_headers():
    assert headers([("Location", "https://h/?token=QZ1"), ("Referer", "/a?b=c")]) == [
        ("Location", f"https://h/?token={REDACTED}"),
        ("Referer", "/a?b=c"),
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("https://u:QZ@h/x#access_token=QZ", "https://REDACTED@h/x#access_token=REDACTED"),
        ("https://QZ@h", "https://REDACTED@h"),
        (
            "https://h/a@b?u=http://v:QZ@w/?sig=Q?Z",
            "https://h/a@b?u=http://REDACTED@w/?sig=REDACTED",
        ),
        (
            "<https://h/?a=1>; x, <https://h/?pwd=QZ>",
            "<https://h/?a=1>; x, <https://h/?pwd=REDACTED",
        ),
    ],
)
def test_urls_in_any_header(before, after):
    assert headers([("X-Url", before)]) == [("X-Url", after)]
