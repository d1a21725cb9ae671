/** Is it up, since when, why, and when will it be? */

import { element, show } from "./elements.js";
import { age, clock, count, duration, moment, percent, plural, words } from "./format.js";
import { inOrder, instant } from "./report.js";

const STARTS = new Set(["STARTING", "RECOVERING"]);

/** Draw the state into the places of the page. */
export function showState(places, view) {
  const { report } = view;
  show(
    places.word,
    element("p", { class: "word", "data-state": report.state }, report.state),
    element("p", { class: "reason" }, report.reason),
  );
  show(places.expectation, expectation(view));
  show(places.facts, facts(view));
}

/** What a start does now, and how far it is if one knows how long it takes. */
function expectation({ report, now }) {
  const activity = doing(report.activity);
  const expected = report.state === "READY" ? NaN : instant(report.ready_expected);
  if (!Number.isFinite(expected)) return activity && element("p", {}, activity);
  const left = (expected - now) / 1000;
  const says = left >= 0 ? `READY in ${age(left)}` : `READY is ${age(-left)} overdue`;
  const begun = beginOfStart(report);
  const done = Math.min(1, Math.max(0, (now - begun) / (expected - begun)));
  return [
    element("p", {}, element("b", {}, says), activity && ` · ${activity}`),
    element("progress", { max: 1, value: done.toFixed(3), "aria-label": "start" }, percent(done)),
  ];
}

function doing(activity) {
  if (!activity) return "";
  const { phase, step, tokens, detail } = activity;
  const parts = [words(phase), step && words(step), tokens && `${count(tokens)} tokens`, detail];
  return parts.filter(Boolean).join(", ");
}

/** When the engine began to start that is starting now. */
function beginOfStart(report) {
  const starts = inOrder(report.timeline).filter(
    ({ kind, state }) => kind === "state" && STARTS.has(state),
  );
  return instant(starts.at(-1)?.at ?? report.since);
}

function facts(view) {
  const { report, now } = view;
  const { engine, server, progress, limits, probe } = report;
  const since = instant(report.since);
  return [
    fact("in this state", age((now - since) / 1000), `since ${moment(since, now)}`),
    fact("proven", proven(probe), probe?.limited ? "limited: see the probe" : null),
    fact(
      "engine",
      `generation ${count(engine.generation)}`,
      restarts(engine),
    ),
    fact("last start", duration(engine.last_start_seconds), phases(report.start?.phases_s)),
    fact("last step", lastStep(progress, now), serving(progress)),
    fact("context", tokens(limits?.max_model_len), capacity(limits)),
    fact("runs on", devices(server), driver(server)),
    fact("versions", ...versions(server.versions ?? {})),
    engine.last_exit && fact(nameOfExit(engine.last_exit), engine.last_exit, null, "wide"),
    inOrderOfName(report.nodes).map(([name, node]) => nodeFact(name, node)),
  ];
}

function nameOfExit(exit) {
  return exit.startsWith("requested") ? "last restart" : "last death";
}

function fact(name, value, more = null, width = null) {
  return element(
    "div",
    { class: width },
    element("dt", {}, name),
    element("dd", {}, value, more && element("small", {}, more)),
  );
}

function proven(probe) {
  if (!probe) return "nothing yet";
  return probe.passed ? tokens(probe.proven_tokens) : "nothing: the probe failed";
}

function tokens(number) {
  return Number.isFinite(number) ? plural(number, "token") : "unknown";
}

function restarts({ restarts: done, restarts_left: left }) {
  const allowed = Number.isFinite(left) ? `, ${count(left)} left` : "";
  return `${plural(done, "restart")}${allowed}`;
}

function phases(seconds) {
  const [longest] = Object.entries(seconds ?? {}).sort(([, one], [, other]) => other - one);
  return longest ? `longest: ${words(longest[0])}, ${duration(longest[1])}` : null;
}

function lastStep({ last_step: last }, now) {
  return last ? `${age((now - instant(last)) / 1000)} ago` : "none yet";
}

function serving({ running, waiting }) {
  return `${count(running)} running, ${count(waiting)} waiting`;
}

function capacity(limits) {
  const whole = limits?.kv_capacity_tokens;
  return whole ? `KV cache: ${tokens(whole)}` : null;
}

function devices({ devices: names = [] }) {
  const counts = new Map();
  for (const name of names) counts.set(name, (counts.get(name) ?? 0) + 1);
  const said = [...counts].map(([name, times]) => (times > 1 ? `${times} × ${name}` : name));
  return said.join(", ") || "unknown";
}

function driver({ driver: version, started }) {
  const begun = `server up since ${clock(instant(started))}`;
  return version ? `driver ${version}, ${begun}` : begun;
}

function versions({ vllm, holdfast, torch }) {
  const others = [holdfast && `Holdfast ${holdfast}`, torch && `torch ${torch}`];
  return [vllm ? `vLLM ${vllm}` : "unknown", others.filter(Boolean).join(", ")];
}

function nodeFact(name, { is_joined: isJoined, problem }) {
  return fact(`node ${name}`, isJoined ? "joined" : "missing", isJoined ? null : problem);
}

function inOrderOfName(map) {
  return Object.entries(map ?? {}).sort(([one], [other]) => one.localeCompare(other));
}
