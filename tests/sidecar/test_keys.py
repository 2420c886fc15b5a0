import base64
import os
import threading

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deploy.errors import UserError
from sidecar.access.admission import Access, Admission, in_scope
from sidecar.access.keys import BadKey, RunKeys, load_secret
from sidecar.access.refusal import Refusal

KEYS = RunKeys(b"s" * 32)
RUNS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True)
CHAT = "/v1/chat/completions"


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@given(RUNS)
def test_a_key_names_its_run_and_passes_in_every_place(run):
    key = KEYS.issue(run)
    assert KEYS.verify(key) == run
    assert key.isascii() and not set(key) & set(' \t\r\n:,;"@/?#%')
    with pytest.raises(BadKey):
        RunKeys(b"t" * 32).verify(key)


@given(RUNS, st.data())
def test_no_changed_key_is_accepted(run, data):
    key = KEYS.issue(run)
    at = data.draw(st.integers(len("ridealong-"), len(key) - 1))
    changed = key[:at] + data.draw(st.characters()) + key[at + data.draw(st.integers(0, 1)) :]
    assume(changed != key)
    with pytest.raises(BadKey):
        KEYS.verify(changed)


@pytest.mark.parametrize("text", ["", "sk-proj-1", "EMPTY", "ridealon", "Ridealong-a-b"])
def test_other_keys_are_nobodys(text):
    assert KEYS.verify(text) is None


@pytest.mark.parametrize("text", ["ridealong-", "ridealong-run", "ridealong-run-", "ridealong--é"])
def test_malformed_keys(text):
    with pytest.raises(BadKey):
        KEYS.verify(text)


@pytest.mark.parametrize("run", ["", "-a", "a/b", "a b", "é", "a" * 129])
def test_no_key_for_what_is_no_run(run):
    with pytest.raises(ValueError, match="not a run id"):
        KEYS.issue(run)


def test_the_secret_is_made_once_and_private(tmp_path):
    path = tmp_path / "state" / "secret"
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(load_secret(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 8 and len(found[0]) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_secret_that_others_can_read_is_refused(tmp_path, mode):
    load_secret(tmp_path / "s")
    os.chmod(tmp_path / "s", mode)
    with pytest.raises(UserError, match="chmod 600"):
        load_secret(tmp_path / "s")


@pytest.mark.parametrize("text", ["", "ab", "not hex", "ab" * 31, "ab" * 40])
def test_a_file_that_holds_no_secret(tmp_path, text):
    path = tmp_path / "s"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(UserError, match="holds no secret"):
        load_secret(path)


def test_a_secret_that_can_not_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"sidecar\.key_file"):
        load_secret(tmp_path / "file" / "s")


PLACES = [
    ("Authorization", "Bearer {}"),
    ("authorization", "bearer  {}"),
    ("AUTHORIZATION", "{}"),
    ("X-Api-Key", "{}"),
    ("api-key", "{}"),
    ("x-goog-api-key", "{}"),
]


def admit(headers, path_run=None, proxy=None, *, required=True, path=CHAT):
    return Access(KEYS, required).admit("POST", path, headers, path_run, proxy)


@pytest.mark.parametrize(("name", "form"), PLACES)
@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("path_run", [None, "a-1"])
def test_a_key_in_each_place(name, form, required, path_run):
    headers = [("host", "h"), (name, form.format(KEYS.issue("a-1")))]
    admission = admit(headers, path_run, required=required)
    assert admission == Admission("a-1", True, frozenset({name.lower()}))


def test_a_key_as_basic_password_or_user_and_the_spent_header_only():
    key = KEYS.issue("a")
    for value in (basic("anyone", key), basic(key, ""), basic("a", key)):
        admission = admit([("authorization", value), ("x-api-key", "sk-real")])
        assert admission == Admission("a", True, frozenset({"authorization"}))


@pytest.mark.parametrize(("name", "form"), PLACES)
@pytest.mark.parametrize("required", [False, True])
def test_a_forged_key_is_never_admitted(name, form, required):
    forged = RunKeys(b"x" * 32).issue("a")
    for text in (forged, "ridealong-a-", "ridealong-"):
        refusal = admit([(name, form.format(text))], "a", required=required)
        assert isinstance(refusal, Refusal) and refusal.status == 401
        good = ("x-other", "1"), ("authorization", f"Bearer {KEYS.issue('a')}")
        refusal = admit([*good, ("api-key", forged)], required=required)
        assert isinstance(refusal, Refusal) and refusal.status == 401


def test_a_key_opens_no_other_run():
    headers = [("authorization", f"Bearer {KEYS.issue('a')}")]
    for required in (False, True):
        refusal = admit(headers, "b", required=required)
        assert isinstance(refusal, Refusal) and refusal.status == 403
        two = [*headers, ("x-api-key", KEYS.issue("b"))]
        refusal = admit(two, required=required)
        assert isinstance(refusal, Refusal) and refusal.status == 403


def test_without_a_key():
    real = [("authorization", "Bearer sk-real"), ("x-api-key", "sk-ant")]
    assert admit(real, "a", required=False) == Admission("a")
    assert admit([], None, required=False) == Admission(None)
    refusal = admit(real, "a")
    assert isinstance(refusal, Refusal) and refusal.status == 401
    assert refusal.headers["www-authenticate"].startswith("Bearer")
    assert b"ridealong key RUN" in refusal.body


def test_proxy_credentials():
    access = Access(KEYS, required=True)
    key = KEYS.issue("a")
    for proxy in (basic("a", key), basic(key, ""), f"Bearer {key}"):
        assert admit([], None, proxy) == Admission("a", True)
        assert access.connect(proxy) == Admission("a", True)
    for proxy in (basic("a", "pw"), basic("b", key), basic("a", key[:-1] + "x"), None, "Basic é"):
        refusal = access.connect(proxy)
        assert isinstance(refusal, Refusal) and refusal.status == 407, proxy
        refusal = admit([], None, proxy)
        assert isinstance(refusal, Refusal) and refusal.status == 401, proxy

    def named(proxy):
        return admit([], None, proxy, required=False)

    assert named(basic("a", "anything")) == Admission("a")
    assert named(basic("", "secret")) == named("Bearer secret") == Admission(None)
    assert admit([], "p", basic("a", "pw"), required=False) == Admission("p")
    refusal = admit([], "b", basic("a", key), required=False)
    assert isinstance(refusal, Refusal) and refusal.status == 403


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/health",
        CHAT,
        "/chat/completions",
        "/v1/v1/messages?beta=true",
        "/v1/messages/count_tokens",
        "/v1/responses/resp_1/cancel",
        "/v1/models",
        "/v1/models/org/name",
    ],
)
def test_what_a_key_opens(path):
    assert in_scope(path)
    assert isinstance(admit([("x-api-key", KEYS.issue("a"))], path=path), Admission)


@pytest.mark.parametrize(
    "path",
    [
        "/collective_rpc",
        "/v1/load_lora_adapter",
        "/pause",
        "/metrics",
        "/ridealong/engine",
        "/v1/models/../../pause",
        "/v1/models/%2e%2e/%2e%2e/pause",
        "/v1//pause",
        "/v1/modelsx",
        "*",
        "http://other/v1/models",
    ],
)
def test_what_a_key_does_not_open(path):
    assert not in_scope(path)
    refusal = admit([("x-api-key", KEYS.issue("a"))], path=path)
    assert isinstance(refusal, Refusal) and refusal.status == 403
