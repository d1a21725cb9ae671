"""Requests made from the OpenAPI document that a server serves, and what it answered to them.

Half of them are what clients send, kept small; the others differ from that in a field or two, whose
values come from the schema of the field, or from a list of what programs stumble over.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.core.result import Ok

from servers import Server

Body = dict[str, Any]
Bodies = st.SearchStrategy[Body]

CASE_DEADLINE_SECONDS = 60.0
"""For a whole answer, streams included."""
MODEL = "holdfast-demo"
UNSUPPORTED = 501
"""What vLLM documents, and answers where the model cannot do what a route is for."""
_KINDS = ("realistic", "realistic", "odd", "schematic")
_ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 2**31, 2**63, 2**64, 10**400, 1e308, -0.5, "", "a", "none", "auto"),
    *("\0", [], [0], [[]], ["a"], [None], {}, {"a": 1}, {"0": 1.0}, {"-1": 0.5}, {"99999999": 1}),
    *({"type": "json_object"}, {"type": "function"}, {"json": {"type": "zzz"}}, {"regex": "("}),
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "zzz"}}},
    *({"grammar": "x"}, {"choice": []}, [{"role": "user"}], [{"type": "text", "text": "x"}]),
    [{"type": "function", "function": {"name": "f"}}],
)


_TEXT = st.sampled_from(("hold fast", "What is a workspace?", "a" * 40, "\xe9", "\0 null"))
_FEW_TOKENS = st.integers(1, 8)
_TOKEN_IDS = st.lists(st.integers(20, 199), min_size=1, max_size=8)
_SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "stream": st.booleans(),
    "temperature": st.floats(0, 2),
    "n": st.integers(1, 2),
    "seed": st.integers(0, 99),
}
_MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(("user", "system")), "content": _TEXT}),
    min_size=1,
    max_size=3,
)
_USER_MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": _TEXT}), min_size=1, max_size=2
)


def _body(
    optional: Mapping[str, st.SearchStrategy[Any]] | None = None, **needed: st.SearchStrategy[Any]
) -> Bodies:
    needed = {"model": st.just(MODEL), **needed}
    return st.fixed_dictionaries(needed, optional=dict(optional or {}))


_COMPLETION = _body(
    prompt=st.one_of(_TEXT, _TOKEN_IDS, st.lists(_TEXT, min_size=1, max_size=2)),
    max_tokens=_FEW_TOKENS,
    optional={**_SAMPLING, "logprobs": st.integers(0, 3), "echo": st.booleans()},
)
_CHAT = _body(messages=_MESSAGES, max_completion_tokens=_FEW_TOKENS, optional=_SAMPLING)
_REALISTIC: dict[str, Bodies] = {
    "POST /v1/completions": _COMPLETION,
    "POST /v1/chat/completions": _CHAT,
    "POST /v1/chat/completions/batch": _body(
        messages=st.lists(_MESSAGES, min_size=1, max_size=2), max_completion_tokens=_FEW_TOKENS
    ),
    "POST /v1/responses": _body(
        input=_TEXT, max_output_tokens=_FEW_TOKENS, optional={"stream": st.booleans()}
    ),
    "POST /v1/messages": _body(
        messages=_USER_MESSAGES, max_tokens=_FEW_TOKENS, optional={"stream": st.booleans()}
    ),
    "POST /v1/messages/count_tokens": _body(messages=_MESSAGES),
    "POST /tokenize": st.one_of(_body(prompt=_TEXT), _body(messages=_MESSAGES)),
    "POST /detokenize": _body(tokens=_TOKEN_IDS),
    "POST /generative_scoring": _body(
        query=_TEXT,
        items=st.lists(_TEXT, min_size=1, max_size=2),
        label_token_ids=st.lists(st.integers(20, 90), min_size=2, max_size=2, unique=True),
    ),
    "POST /invocations": st.one_of(_COMPLETION, _CHAT),
    "POST /scale_elastic_ep": st.one_of(
        st.sampled_from(_ODD), st.just({"new_data_parallel_size": 1})
    ),
    "POST /admin/probe": st.fixed_dictionaries({"suite": st.just("quick")}),
    "POST /admin/sleep": st.fixed_dictionaries({"level": st.integers(1, 2)}),
    "POST /admin/wake": st.just({}),
    "POST /admin/profile/start": st.just({}),
    "POST /admin/cache/reset": st.fixed_dictionaries(
        {"caches": st.lists(st.sampled_from(("prefix", "mm", "encoder")), min_size=1, max_size=2)}
    ),
    "POST /admin/loras": st.fixed_dictionaries({"name": st.just("a"), "path": st.just("/nowhere")}),
    "PUT /admin/log-level": st.fixed_dictionaries(
        {"level": st.sampled_from(("info", "warning"))}, optional={"logger": st.just("vllm")}
    ),
}
"""What clients send to the operations that read a body."""
_ERROR = {"message", "type", "param", "code"}
_ADMIN = "/admin/"
_UNSAFE = frozenset({"/admin/drain", "/admin/restart", "/admin/save-sharded-state"})
"""Would end the server or its engine, or write wherever a case says: called without the key."""


@dataclass
class Tally:
    """What was answered, by operation and status, and what may not be answered."""

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: dict[str, str] = field(default_factory=dict)
    """The first of each kind: a failure, an undocumented status, an answer cut in the middle."""

    @property
    def cases(self) -> int:
        """How many requests were answered."""
        return self.answers.total()

    @property
    def reached(self) -> float:
        """The share that a handler answered with a 2xx."""
        good = sum(count for (_, status), count in self.answers.items() if 200 <= status < 300)
        return good / max(1, self.cases)

    def note(
        self, name: str, status: int, text: str, body: Any, documented: Mapping[str, Any]
    ) -> None:
        """Count an answer, and keep it if it may not be."""
        self.answers[name, status] += 1
        is_failure = status >= 500 and status != UNSUPPORTED
        if is_failure or not (str(status) in documented or _is_refusal(status, text)):
            self.wrong.setdefault(f"{name} {status} {text[:100]}", repr(body)[:800])

    def __str__(self) -> str:
        lines = [f"{self.cases} cases, {self.reached:.0%} answered with a 2xx"]
        lines += [f"  {name} {status}: {n}" for (name, status), n in sorted(self.answers.items())]
        return "\n".join([*lines, *(f"  WRONG {what}" for what in self.wrong.items())])


def _is_refusal(status: int, text: str) -> bool:
    """Whether an answer is what the document's `default` says of every operation."""
    try:
        return status >= 400 and set(json.loads(text)["error"]) == _ERROR
    except (ValueError, KeyError, TypeError):
        return False


def send_cases(server: Server, cases: int, start: int, *, admin_key: str = "") -> Tally:
    """Send about `count` cases, as many to each operation, the same ones for the same `start`.

    Without the admin key one goes to each route of admins, which answers it with 404.
    """
    document = server.get("/openapi.json").json()
    tally = Tally()
    made = schemathesis.openapi.from_dict(document).get_all_operations()
    found = [one.ok() for one in made if isinstance(one, Ok)]
    assert len(found) == sum(map(len, document["paths"].values())), "an operation cannot be read"
    keys = {operation.path: _key_for(operation.path, admin_key) for operation in found}
    wide = [one for one in found if _is_wide(document, one, has_key=bool(keys[one.path]))]
    for operation in found:
        share = -(-(cases - len(found)) // len(wide)) + 1 if operation in wide else 1
        _send_to(server.url, document, operation, share, start, tally, keys[operation.path])
    return tally


def _key_for(path: str, admin_key: str) -> str:
    return admin_key if path.startswith(_ADMIN) and path not in _UNSAFE else ""


def _is_wide(document: Body, operation: Any, *, has_key: bool) -> bool:
    """Whether requests of it may be answered in more than one way."""
    if operation.path.startswith(_ADMIN) and not has_key:
        return False
    raw = document["paths"][operation.path][operation.method]
    return operation.label in _REALISTIC or bool(raw.get("requestBody") or raw.get("parameters"))


def _send_to(
    url: str, document: Body, operation: Any, cases: int, start: int, tally: Tally, key: str
) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    documented = document["paths"][operation.path][operation.method]["responses"]
    names, schematic = _names(document, operation), operation.as_strategy()

    @seed(start)
    @settings(
        max_examples=cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def send(data: st.DataObject) -> None:
        if operation.label in _REALISTIC:
            body = data.draw(_varied(_REALISTIC[operation.label], names, schematic))
            case = operation.Case(body=body, media_type="application/json")
        else:
            case = data.draw(schematic)
        try:
            answer = case.call(base_url=url, headers=headers, timeout=CASE_DEADLINE_SECONDS)
        except requests.RequestException as error:
            tally.wrong.setdefault(f"{operation.label} {error}", repr(case.body)[:800])
        else:
            tally.note(operation.label, answer.status_code, answer.text, case.body, documented)

    send()


@st.composite
def _varied(
    draw: st.DrawFn, realistic: Bodies, names: list[str], schematic: st.SearchStrategy[Any]
) -> Any:
    """A body as clients send it, or with something in it that they hardly ever send."""
    kind = draw(st.sampled_from(_KINDS))
    body = draw(realistic)
    if kind == "realistic" or not names:
        return body
    # Made only where it is used: a body from one of vLLM's schemas takes a tenth of a second.
    drawn = draw(schematic).body if kind == "schematic" else dict.fromkeys(names)
    if not isinstance(drawn, dict) or not drawn:
        return body
    few = draw(st.lists(st.sampled_from(sorted(drawn)), min_size=1, max_size=2))
    odd = {
        name: drawn[name] if kind == "schematic" else draw(st.sampled_from(_ODD)) for name in few
    }
    return {**body, **odd, **(_bounds(body) if kind == "schematic" else {})}


def _bounds(body: Body) -> Body:
    """What keeps a case small, whatever else is in it."""
    return {name: value for name, value in body.items() if name == "model" or "max_" in name}


def _names(document: Body, operation: Any) -> list[str]:
    """The fields of a body."""
    path = "/v1/completions" if operation.path == "/invocations" else operation.path
    content = document["paths"][path][operation.method].get("requestBody", {}).get("content", {})
    found: set[str] = set()
    for media in content.values():
        found.update(_properties(document, media["schema"]))
    return sorted(found)


def _properties(document: Body, schema: Mapping[str, Any]) -> Iterator[str]:
    if reference := schema.get("$ref"):
        yield from _properties(
            document, document["components"]["schemas"][reference.split("/")[-1]]
        )
    for word in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(word, ()):
            yield from _properties(document, part)
    yield from schema.get("properties", ())
