"""The document as text, for `curl /ui` and `holdfast top`: the four bands of the page.

Everything in a document may come from another server, so no text of it is interpreted: neither
markup nor control characters reach the terminal. Whatever it contains, nothing is raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import StringIO
from typing import get_args

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.labels import VerifyVerdict
from holdfast.status_page.cells import (
    add_row,
    age,
    age_until,
    bar,
    decimal,
    finite,
    in_order,
    is_mapping,
    map_of,
    new_table,
    number_of,
    percent,
    plain,
    size_of,
    sum_of,
)
from holdfast.status_page.patch import StatusDocument

TEXT_COLUMNS = 120
MAX_SHOWN_EVENTS = 8
MAX_TERMINAL_EVENTS = 3
ROOMY_LINES = 40
"""On a smaller terminal, no empty lines part the bands."""
MAX_SHOWN_ROWS = 20
BAND_SHARE = 1 / 8
"""The share of a terminal's lines that memory and requests each may take.

If memory needs more, each rank has one line. A terminal shows nothing beyond its last line.
"""

_STATE_STYLES = {
    "READY": "bold green",
    "SLEEPING": "bold cyan",
    "FAILED": "bold red",
    "STOPPED": "bold red",
}
_STARTING_STYLE = "bold yellow"
_VERDICTS = get_args(VerifyVerdict)
_MEMORY_PARTS = (
    ("weights", "weights_bytes"),
    ("KV cache", "kv_cache_bytes"),
    ("graphs", "cuda_graphs_bytes"),
    ("activation peak", "activation_peak_bytes"),
    ("non-torch", "non_torch_bytes"),
)
_RANK_PARTS = (
    ("retired", "retired_bytes"),
    ("persistent", "persistent_bytes"),
    ("Lamport", "lamport_bytes"),
    ("may grow by", "growth_limit_bytes"),
)
_REQUEST_COLUMNS = (
    "request",
    "stage",
    "age",
    "prompt",
    "",
    "output",
    "tok/s",
    "key",
    "generation",
    "replays",
)


def as_text(document: StatusDocument, now_unix_seconds: float) -> str:
    """Return the screen as plain text, for a client that asks once."""
    console = Console(
        file=StringIO(), width=TEXT_COLUMNS, color_system=None, highlight=False, emoji=False
    )
    with console.capture() as captured:
        console.print(screen(document, now_unix_seconds))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def screen(
    document: StatusDocument, now_unix_seconds: float, *, lines: int | None = None
) -> RenderableType:
    """Return all bands; ages are counted until `now_unix_seconds`, by the server's clock.

    A terminal of that many `lines` shows the newest events first, and has room for a part of the
    ranks, of the requests and of the proof.
    """
    state = _state_band(document, now_unix_seconds)
    memory = _memory_band(document, lines)
    requests = _requests_band(document, now_unix_seconds, lines)
    if lines is None:
        bands = (state, memory, requests, _proof_band(document), _events_band(document))
    else:
        events = _events_band(document, MAX_TERMINAL_EVENTS)
        bands = (state, events, memory, requests, _proof_band(document, is_short=True))
    gap = () if lines is not None and lines < ROOMY_LINES else (Text(""),)
    return Group(*(part for band in bands for part in (*band, *gap)))


def _state_band(document: StatusDocument, now: float) -> Iterator[RenderableType]:
    state = plain(document.get("state"))
    since = age(document.get("since"), now)
    yield Text.assemble(
        (state, _STATE_STYLES.get(state, _STARTING_STYLE)),
        f" for {since}: " if since else ": ",
        plain(document.get("reason")),
    )
    left = age_until(document.get("ready_expected"), now)
    overdue = age(document.get("ready_expected"), now)
    activity = map_of(document, "activity")
    doing = [plain(activity.get(name)) for name in ("phase", "step", "detail")]
    now_doing = ", ".join(filter(None, doing))
    if left or overdue or now_doing:
        expected = (
            f"READY expected in {left}" if left else overdue and f"READY is {overdue} overdue"
        )
        yield Text("; ".join(filter(None, (f"now: {now_doing}" if now_doing else "", expected))))
    engine, server = map_of(document, "engine"), map_of(document, "server")
    versions = map_of(server, "versions")
    facts = (
        plain(server.get("model")),
        f"generation {number_of(engine.get('generation'))}",
        f"restarts left: {number_of(engine.get('restarts_left'))}",
        f"Holdfast {plain(versions.get('holdfast'))}",
        f"vLLM {plain(versions.get('vllm'))}",
    )
    yield Text(", ".join(fact for fact in facts if fact and not fact.endswith(" ")), style="dim")
    for name, node in in_order(document, "nodes"):
        if not node.get("is_joined"):
            problem = plain(node.get("problem"))
            why = f": {problem}" if problem else ""
            yield Text(f"node {plain(name)} is missing{why}", style="bold red")


def _memory_band(document: StatusDocument, lines: int | None) -> Iterator[RenderableType]:
    table = _parts_table(document)
    left_out = 0
    if lines is not None and table.row_count > BAND_SHARE * lines:
        ranks = in_order(document, "ranks")
        shown = ranks[: _most_rows(lines)]
        table, left_out = _ranks_table(shown), len(ranks) - len(shown)
    if table.row_count:
        yield table
    if left_out:
        yield Text(f"and {number_of(left_out)} more", style="dim")
    told = list(_rank_notes(document))
    yield from told if lines is None else told[: max(1, _most_rows(lines) // 2)]
    host = map_of(document, "host_memory")
    if host:
        left, whole = (size_of(host.get(f"{name}_bytes")) for name in ("available", "total"))
        yield Text(f"host: {left} of {whole} left")


def _rank_notes(document: StatusDocument) -> Iterator[Text]:
    """Say what is wrong with ranks, those first that are lost."""
    ranks = in_order(document, "ranks")
    for name, rank in ranks:
        if error := plain(rank.get("fatal_error")):
            yield Text(f"rank {plain(name)} is lost: {error}", style="bold red")
    for name, rank in ranks:
        if rejections := sum_of(map_of(rank, "rejections")):
            yield Text(f"rank {plain(name)}: {number_of(rejections)} rejections")


def _parts_table(document: StatusDocument) -> Table:
    """Return a row for each part of each rank's memory."""
    table = new_table("rank", "part", "", "bytes", "high water", "reserved")
    for name, rank in in_order(document, "ranks"):
        memory = map_of(rank, "memory")
        total_bytes = memory.get("total_bytes")
        for label, member in _MEMORY_PARTS:
            if member in memory:
                size = memory[member]
                add_row(table, plain(name), label, bar(size, total_bytes), size_of(size), "", "")
        for slot_name, slot in in_order(rank, "slots"):
            size = slot.get("size_bytes")
            add_row(
                table,
                plain(name),
                f"slot {plain(slot_name)}",
                bar(slot.get("high_water_bytes"), size),
                size_of(size),
                size_of(slot.get("high_water_bytes")),
                size_of(slot.get("reserved_bytes")),
            )
        for label, member in _RANK_PARTS:
            if finite(rank.get(member)):
                add_row(table, plain(name), label, "", size_of(rank.get(member)), "", "")
        used = rank.get("kv_used_ratio")
        if finite(used) is not None:
            add_row(table, plain(name), "KV in use", bar(used, 1.0), percent(used), "", "")
    return table


def _most_rows(lines: int) -> int:
    return max(1, int(BAND_SHARE * lines))


def _ranks_table(ranks: Sequence[tuple[str, StatusDocument]]) -> Table:
    """Return a row for each rank."""
    table = new_table("rank", "held", "", "workspaces", "may grow by", "KV in use")
    for name, rank in ranks:
        memory = map_of(rank, "memory")
        workspaces = sum_of({key: slot.get("size_bytes") for key, slot in in_order(rank, "slots")})
        held = workspaces + sum_of({member: memory.get(member) for _, member in _MEMORY_PARTS})
        add_row(
            table,
            plain(name),
            bar(held, memory.get("total_bytes")),
            f"{size_of(held)} of {size_of(memory.get('total_bytes'))}",
            size_of(workspaces),
            size_of(rank.get("growth_limit_bytes")),
            percent(rank.get("kv_used_ratio")),
        )
    return table


def _requests_band(
    document: StatusDocument, now: float, lines: int | None
) -> Iterator[RenderableType]:
    requests = map_of(document, "requests")
    present, past = ("running", "waiting", "held"), ("replayed", "continued")
    counts = [
        ", ".join(f"{number_of(requests.get(name))} {name}" for name in names)
        for names in (present, past)
    ]
    turned_away = (_by_reason(map_of(requests, name), name) for name in ("refused", "lost"))
    yield Text(f"{'; '.join(counts)}, {', '.join(turned_away)}")
    rows = in_order(requests, "rows")
    if not rows:
        return
    table = new_table(*_REQUEST_COLUMNS)
    shown = MAX_SHOWN_ROWS if lines is None else min(MAX_SHOWN_ROWS, _most_rows(lines))
    for name, row in rows[:shown]:
        done, total = row.get("prefilled_tokens"), row.get("prompt_tokens")
        add_row(
            table,
            plain(name),
            plain(row.get("stage")),
            age(row.get("received"), now),
            "/".join(number_of(tokens) for tokens in (done, total) if tokens is not None),
            bar(done, total),
            number_of(row.get("output_tokens")),
            decimal(row.get("output_tokens_per_second")),
            plain(row.get("key")),
            number_of(row.get("generation")),
            number_of(row.get("replays")),
        )
    yield table
    left_out = requests.get("rows_left_out")
    others = len(rows) - shown + (finite(left_out) or 0)
    if others > 0:
        yield Text(f"and {number_of(others)} more", style="dim")


def _by_reason(counts: StatusDocument, name: str) -> str:
    reasons = ", ".join(f"{plain(reason)} {number_of(count)}" for reason, count in counts.items())
    return f"{number_of(sum_of(counts))} {name}" + (f" ({reasons})" if reasons else "")


def _proof_band(document: StatusDocument, *, is_short: bool = False) -> Iterator[RenderableType]:
    """With `is_short`, of the steps only those that have a reason to be looked at."""
    probe, proof = map_of(document, "probe"), map_of(document, "proof")
    if probe:
        outcome = "passed" if probe.get("passed") else "failed"
        limited = ", limited" if probe.get("limited") else ""
        yield Text(
            f"proof: {plain(probe.get('suite'))} {outcome}{limited}, "
            f"{number_of(probe.get('proven_tokens'))} tokens proven"
        )
    if nan_rows := proof.get("nan_rows"):
        yield Text(f"{number_of(nan_rows)} rows of logits with a NaN", style="bold red")
    if verify := map_of(proof, "verify"):
        counts = ", ".join(f"{number_of(verify.get(one))} {one}" for one in _VERDICTS)
        yield Text(
            f"verify {plain(verify.get('profile'))}: {plain(verify.get('verdict'))}, {counts}"
        )
    for check, found in in_order(proof, "baseline"):
        verdict = "agrees" if found.get("agrees") else "differs"
        yield Text(f"baseline: the {plain(check)} {verdict}")
    table = new_table("step", "outcome", "tokens", "seconds", "reason")
    steps = probe.get("steps")
    for step in filter(is_mapping, steps if isinstance(steps, list) else ()):
        if is_short and step.get("outcome") != "failed" and not step.get("limited"):
            continue
        add_row(
            table,
            plain(step.get("name")),
            plain(step.get("outcome")),
            number_of(step.get("tokens")),
            decimal(step.get("duration_seconds")),
            plain(step.get("reason")),
        )
    if table.row_count:
        yield table


def _events_band(
    document: StatusDocument, most: int = MAX_SHOWN_EVENTS
) -> Iterator[RenderableType]:
    events = in_order(document, "timeline")[-most:]
    if not events:
        return
    table = new_table("at (UTC)", "event", "")
    for _, event in reversed(events):
        kind = plain(event.get("kind"))
        facts = (event.get(name) for name in ("state", "cause", "phase", "verdict"))
        what = plain(next(filter(None, facts), None))
        detail = plain(event.get("reason"))
        if kind == "probe":
            what = "passed" if event.get("passed") else "failed"
            proven = f"{number_of(event.get('proven_tokens'))} tokens proven"
            detail = "one request" if event.get("is_whole") is False else proven
        elif kind == "growth":
            ranks = event.get("ranks")
            places = len(ranks) if isinstance(ranks, list) else None
            detail = f"{number_of(event.get('growths'))} on {number_of(places)} ranks"
        add_row(table, plain(event.get("at"))[:19].replace("T", " "), f"{kind} {what}", detail)
    yield table
