from daemon.protocols.conversation import Message, Request, Text, Tool
from daemon.retries import chain
from daemon.sidecalls import Turn, kind, without_tools

TOOL = Tool("bash", "", {}, {})


def ask(
    *messages: tuple[str, str],
    tools: tuple[Tool, ...] = (),
    form: dict | None = None,
    max_tokens: int | None = None,
) -> Request:
    return Request(
        model="m",
        stream=True,
        messages=tuple(Message(role, (Text(text),)) for role, text in messages),
        tools=tools,
        response_format=form,
        max_tokens=max_tokens,
    )


def of(request: Request, **headers: str) -> str | None:
    named = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return kind("/v1/messages?beta=true", named, request)


TITLE = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}


def test_an_ordinary_turn_is_none():
    assert of(ask(("system", "You are an agent."), ("user", "hi"), tools=(TOOL,))) is None
    assert of(ask(("user", "hi"))) is None
    assert kind("/v1/chat/completions", [], None) is None


def test_count_tokens_by_its_path():
    assert kind("/v1/messages/count_tokens?beta=true", [], None) == "count_tokens"


def test_codex_says_what_it_does():
    request = ask(("user", "hi"))
    assert of(request, x_codex_turn_metadata='{"request_kind":"compaction"}') == "compaction"
    assert of(request, x_codex_turn_metadata='{"request_kind":"turn"}') is None
    assert of(request, x_codex_turn_metadata="{") is None
    assert of(request, x_codex_turn_metadata="[1]") is None
    assert of(request, x_openai_subagent="compact") == "compaction"
    assert of(request, x_openai_subagent="collab_spawn") is None


def test_title_by_the_schema_it_asks_for():
    for form in (
        {"type": "json_schema", "schema": TITLE},
        {"type": "json_schema", "json_schema": {"name": "t", "schema": TITLE}},
    ):
        assert of(ask(("user", "hi"), form=form)) == "title"
        assert of(ask(("user", "hi"), form=form, tools=(TOOL,))) is None


def test_an_answer_that_also_has_a_title_is_no_title_call():
    schema = {"properties": {"title": {}, "body": {}}}
    assert of(ask(("user", "write"), form={"type": "json_schema", "schema": schema})) is None
    assert of(ask(("user", "write"), form={"type": "json_object"})) is None


def test_quota_probe():
    assert of(ask(("user", "quota"), max_tokens=1)) == "quota_probe"
    assert of(ask(("user", "quota"), max_tokens=100)) is None
    assert of(ask(("user", "yes or no?"), max_tokens=1)) is None


def test_words_of_known_harnesses():
    memory = "You are now acting as the managed memory extraction subagent for this"
    assert of(ask(("system", memory), ("user", "x"), tools=(TOOL,))) == "memory"
    title = "You are a title generator. You output ONLY a title."
    assert of(ask(("system", title), ("user", "x"))) == "title"
    commit = "You are an expert who generates concise, one-line Git commit messages"
    assert of(ask(("system", commit), ("user", "diff"))) == "commit_message"
    last = ("user", "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.")
    assert of(ask(("user", "work"), ("assistant", "ok"), last, tools=(TOOL,))) == "compaction"


def test_words_elsewhere_in_the_history_are_no_mark():
    said = ("user", "CRITICAL: Respond with TEXT ONLY is what it wrote")
    assert of(ask(said, ("assistant", "ok"), ("user", "go on"), tools=(TOOL,))) is None
    assert of(ask(("system", "agent"), ("user", "You are a title generator"))) is None


def turn(call: str, tools: int, *texts: str) -> Turn:
    return Turn(call, tools, chain([("user", text) for text in texts]))


def test_calls_without_tools_beside_an_agent_with_tools():
    turns = [
        turn("title", 0, "name this"),
        turn("first", 3, "task"),
        turn("second", 3, "task", "call", "result"),
    ]
    assert without_tools(turns) == {"title"}


def test_an_agents_last_answer_without_tools_is_its_own():
    turns = [turn("first", 3, "task"), turn("last", 0, "task", "call", "result")]
    assert without_tools(turns) == set()


def test_a_dialogue_without_tools_is_an_agent_of_its_own():
    turns = [turn("a", 3, "task"), turn("b", 0, "hello"), turn("c", 0, "hello", "ok", "more")]
    assert without_tools(turns) == set()


def test_a_run_without_tools_has_no_such_calls():
    assert without_tools([turn("a", 0, "x"), turn("b", 0, "y")]) == set()
    assert without_tools([turn("a", 2, "x"), Turn("b", 0, ())]) == set()
