/** What was proven, when, and has it stayed true? */

import { drawing, element, share, show } from "./elements.js";
import { count, digits, duration, moment, plural, words } from "./format.js";
import { instant } from "./report.js";

const TREND_HEIGHT = 34;

/** Draw the verdicts and the steps into the places of the page. */
export function showProof(places, view) {
  const { report } = view;
  show(places.verdicts, verdicts(view));
  show(places.trend, trend(report.history));
  show(places.steps, steps(report.probe));
  show(places.phases, phases(report.start?.phases_s));
}

function verdicts({ report, now }) {
  const { probe, proof = {} } = report;
  const { verify, baseline = {} } = proof;
  return [
    verdict("probe", probe && probeSaid(probe), probe?.passed, probe?.finished, now),
    verdict("verify", verify && verifySaid(verify), isRight(verify), verify?.finished, now),
    ...["probe", "canary"].map((name) => {
      const found = baseline[name];
      const said = found && comparisonSaid(found);
      const title = name === "canary" ? "canary" : "baseline";
      return verdict(title, said, found?.agrees, found?.compared, now);
    }),
    nanVerdict(proof.nan_rows, now),
  ];
}

/** `isGood` is undefined where there is neither good nor bad yet. */
function verdict(name, said, isGood, finished, now) {
  const mark = said === undefined || isGood === undefined ? "unknown" : isGood ? "good" : "bad";
  const when = instant(finished);
  return element(
    "div",
    { "data-verdict": mark },
    element("dt", {}, name),
    element(
      "dd",
      {},
      said ?? "never ran",
      Number.isFinite(when) && element("small", {}, `at ${moment(when, now)}`),
    ),
  );
}

function probeSaid({ suite, passed, limited, proven_tokens: proven, duration_seconds: seconds }) {
  const outcome = passed ? "passed" : "failed";
  const end = limited ? ", limited" : "";
  return `${suite} ${outcome} in ${duration(seconds)}, ${plural(proven, "token")}${end}`;
}

function verifySaid({ verdict: outcome, profile, passed, failed, inconclusive }) {
  const numbers = { passed, failed, inconclusive };
  const said = Object.entries(numbers)
    .filter(([, number]) => number > 0)
    .map(([name, number]) => `${count(number)} ${name}`);
  return [`${outcome} (${profile})`, ...said].join(", ");
}

/** A difference without end, which JSON cannot write, is that of other tokens. */
function comparisonSaid({ worst_nats: nats }) {
  return Number.isFinite(nats)
    ? `${digits(nats)} nat from the baseline`
    : "other tokens than the baseline";
}

function isRight(verify) {
  if (!verify) return undefined;
  if (verify.verdict === "failed") return false;
  return verify.verdict === "passed" ? true : undefined;
}

function nanVerdict(rows, now) {
  const isKnown = Number.isFinite(rows);
  const said = isKnown ? plural(rows, "row") : "not counted";
  return verdict("NaN in logits", said, isKnown ? rows === 0 : undefined, null, now);
}

/** How far the canary was from the baseline over the last hour, as a line of points. */
function trend(history) {
  const runs = Object.entries(history?.points ?? {})
    .map(([key, point]) => ({
      at: Number(key),
      agrees: point.canary_agrees,
      nats: point.canary_worst_nats,
    }))
    .filter(({ agrees }) => agrees !== undefined)
    .sort((one, other) => one.at - other.at);
  if (runs.length < 2) return null;
  const differences = runs.map(({ nats }) => nats).filter(Number.isFinite);
  const worst = Math.max(0, ...differences);
  const [begin, end] = [runs[0].at, runs.at(-1).at];
  const said = trendSaid(runs, differences);
  // Other tokens are farther off than any number, so they are at the top.
  const heightOf = (nats) => (Number.isFinite(nats) ? (worst ? nats / worst : 0) : 1);
  return [
    drawing(
      "svg",
      { class: "trend", height: TREND_HEIGHT, role: "img", "aria-label": said },
      runs.map(({ at, agrees, nats }) =>
        drawing("circle", {
          cx: share(at - begin, end - begin),
          cy: TREND_HEIGHT - 4 - (TREND_HEIGHT - 8) * heightOf(nats),
          r: 2.5,
          "data-bad": !agrees,
        }),
      ),
    ),
    element("p", { class: "faint" }, said, "."),
  ];
}

function trendSaid(runs, differences) {
  const others = runs.length - differences.length;
  return [
    `The canary over the last hour: ${plural(runs.length, "run")}`,
    differences.length && `at most ${digits(Math.max(...differences))} nat off`,
    others && `${count(others)} found other tokens`,
  ]
    .filter(Boolean)
    .join(", ");
}

function steps(probe) {
  const found = probe?.steps ?? [];
  if (!found.length) {
    const row = element("td", { colspan: 4, class: "empty" }, "No probe has run.");
    return element("tr", {}, row);
  }
  const slowest = Math.max(...found.map((step) => step.duration_seconds)) || 1;
  return found.map((step) => stepRow(step, slowest));
}

function stepRow({ name, outcome, duration_seconds: seconds, tokens, limited, reason }, slowest) {
  const why = [limited && "limited", reason].filter(Boolean).join(": ");
  return element(
    "tr",
    { "data-key": name, "data-outcome": outcome },
    element("th", { scope: "row" }, words(name), why && element("small", {}, why)),
    element("td", { class: "outcome" }, outcome),
    element("td", { class: "number" }, tokens ? count(tokens) : "–"),
    element(
      "td",
      { class: "number seconds" },
      outcome === "skipped" ? "–" : duration(seconds),
      drawing(
        "svg",
        { height: 3, "aria-hidden": "true" },
        drawing("rect", { height: 3, width: share(seconds, slowest) }),
      ),
    ),
  );
}

function phases(seconds) {
  return Object.entries(seconds ?? {}).map(([name, taken]) =>
    element("li", {}, words(name), " ", element("b", {}, duration(taken))),
  );
}
