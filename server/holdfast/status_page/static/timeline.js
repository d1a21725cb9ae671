/** The life of the server over the last hours: states as bands, and what happened as marks. */

import { drawing, element, share, show } from "./elements.js";
import { count, duration, minutes, moment, plural, words } from "./format.js";
import { inOrder, instant } from "./report.js";

const MINUTE_SECONDS = 60;
const HOUR_SECONDS = 3600;
/** What can be shown, in seconds, and how far apart its ticks are. */
const SPANS = [
  { seconds: 5 * MINUTE_SECONDS, tick: MINUTE_SECONDS, name: "5 minutes" },
  { seconds: 15 * MINUTE_SECONDS, tick: 3 * MINUTE_SECONDS, name: "15 minutes" },
  { seconds: HOUR_SECONDS, tick: 10 * MINUTE_SECONDS, name: "hour" },
  { seconds: 6 * HOUR_SECONDS, tick: HOUR_SECONDS, name: "6 hours" },
  { seconds: 24 * HOUR_SECONDS, tick: 4 * HOUR_SECONDS, name: "24 hours" },
];
const [MARK_TOP, BAND_TOP, BAND_HEIGHT, HEIGHT] = [3, 20, 24, 66];
/** From this share of the width on, a tick's label is cut off at the edge. */
const EDGE = 0.03;
const SHAPES = {
  death: "M-6 0H6L0 10Z",
  restart: "M-6 0H6L0 10Z",
  growth: "M0 0L6 10H-6Z",
  probe: "M0 0A5 5 0 1 1 0 10A5 5 0 1 1 0 0Z",
  verify: "M0 -1L6 5L0 11L-6 5Z",
};

/** Draw the time line; `wanted` is the number of seconds to show, or 0 for as many as are known. */
export function showTimeline(places, view, wanted) {
  const engines = new Set(Object.values(view.report.ranks ?? {}).map(({ engine }) => engine));
  const entries = inOrder(view.report.timeline).map((entry) => ({
    ...entry,
    kind: isPlanned(entry) ? "restart" : entry.kind,
    at: instant(entry.at),
    isOfSeveral: engines.size > 1,
  }));
  const span = spanOf(entries, view.now, wanted);
  const scale = { from: view.now - span.seconds * 1000, to: view.now, tick: span.tick };
  const bands = bandsOf(entries, scale);
  const marks = entries.filter((entry) => SHAPES[entry.kind] && entry.at >= scale.from);
  const counted = ["death", "growth"].map((kind) => plural(countOf(marks, kind), kind));
  const summary = `The last ${span.name}: ${counted.join(", ")}`;
  show(places.timeline, figure(bands, marks, scale, summary));
  show(places.legend, legend(bands, marks));
  if (places.events.closest("details").open) show(places.events, rows(entries, view.now));
}

function spanOf(entries, now, wanted) {
  const known = (now - (entries[0]?.at ?? now)) / 1000;
  return SPANS.find(({ seconds }) => seconds >= (wanted || known)) ?? SPANS.at(-1);
}

/** The states within the scale, with their begin and end. */
function bandsOf(entries, scale) {
  const states = entries.filter(({ kind }) => kind === "state");
  return states
    .map((entry, index) => ({ ...entry, until: states[index + 1]?.at ?? scale.to }))
    .filter(({ until }) => until > scale.from);
}

function figure(bands, marks, scale, summary) {
  const attributes = { class: "timeline", height: HEIGHT, role: "img", tabindex: 0 };
  return drawing(
    "svg",
    { ...attributes, "aria-label": summary, "data-detail": summary },
    drawing("rect", { class: "track", width: "100%", y: BAND_TOP, height: BAND_HEIGHT }),
    ticks(scale),
    bands.map((band) => bandOf(band, scale)),
    marks.map((mark) => markOf(mark, scale)),
  );
}

function bandOf(band, scale) {
  const begin = Math.max(band.at, scale.from);
  const size = { y: BAND_TOP, height: BAND_HEIGHT };
  return drawing("rect", {
    ...size,
    class: "band",
    "data-state": band.state,
    "data-key": `band ${band.id}`,
    "data-detail": said(band, scale.to),
    x: at(begin, scale),
    width: share(band.until - begin, scale.to - scale.from),
  });
}

function markOf(mark, scale) {
  // What lies inside is measured in pixels from the mark's own place.
  return drawing(
    "svg",
    { x: at(mark.at, scale), class: "mark", "data-key": `mark ${mark.id}` },
    drawing(
      "g",
      { class: `mark-${mark.kind}`, "data-bad": isBad(mark), "data-detail": said(mark, scale.to) },
      drawing("path", { class: "stem", d: `M0 ${MARK_TOP + 10}V${BAND_TOP + BAND_HEIGHT}` }),
      drawing("path", { d: SHAPES[mark.kind], transform: `translate(0 ${MARK_TOP})` }),
    ),
  );
}

function ticks(scale) {
  const zone = new Date(scale.to).getTimezoneOffset() * 60_000;
  const step = scale.tick * 1000;
  const first = Math.ceil((scale.from - zone) / step) * step + zone;
  const times = [];
  for (let time = first; time <= scale.to; time += step) times.push(time);
  return times.map((time) => {
    const x = at(time, scale);
    const ratio = (time - scale.from) / (scale.to - scale.from);
    const isInside = ratio > EDGE && ratio < 1 - EDGE;
    return drawing(
      "g",
      { class: "tick", "data-key": `tick ${time}` },
      drawing("line", { x1: x, x2: x, y1: BAND_TOP, y2: BAND_TOP + BAND_HEIGHT + 5 }),
      isInside && drawing("text", { x, y: HEIGHT - 4 }, minutes(time)),
    );
  });
}

function at(milliseconds, { from, to }) {
  return share(milliseconds - from, to - from);
}

function legend(bands, marks) {
  const states = [...new Set(bands.map(({ state }) => state))];
  const kinds = Object.keys(SHAPES).filter((kind) => countOf(marks, kind));
  const swatch = drawing("svg", { width: 12, height: 12, "aria-hidden": "true" });
  const filled = (shape) => {
    const copy = swatch.cloneNode();
    copy.append(shape);
    return copy;
  };
  return [
    states.map((state) => {
      const band = drawing("rect", { class: "band", "data-state": state, width: 12, height: 12 });
      return element("li", {}, filled(band), state);
    }),
    kinds.map((kind) => {
      const shape = drawing("path", { d: SHAPES[kind], transform: "translate(6 1)" });
      return element("li", {}, filled(drawing("g", { class: `mark-${kind}` }, shape)), kind);
    }),
  ];
}

function rows(entries, now) {
  return entries
    .toReversed()
    .map((entry) =>
      element(
        "tr",
        { "data-key": entry.id, "data-kind": entry.kind },
        element("td", { class: "time" }, moment(entry.at, now)),
        element("td", {}, entry.kind === "state" ? entry.state : entry.kind),
        element("td", {}, happened(entry)),
        element("td", { class: "number" }, count(entry.generation)),
      ),
    );
}

function said(entry, now) {
  const name = entry.kind === "state" ? entry.state : entry.kind;
  const lasted = entry.until ? ` for ${duration((entry.until - entry.at) / 1000)}` : "";
  return `${moment(entry.at, now)}: ${name}${lasted}, ${happened(entry)}`;
}

function happened(entry) {
  switch (entry.kind) {
    case "state":
      return entry.reason;
    case "death":
    case "restart":
      return `${words(entry.cause)}: ${entry.reason}`;
    case "growth":
      return `${plural(entry.growths, "growth")} on ${ranks(entry)}, ${phase(entry.phase)}`;
    case "probe":
      return probed(entry);
    case "verify":
      return `${entry.profile}: ${entry.verdict}`;
    default:
      return words(entry.kind);
  }
}

function probed({ suite, is_whole: isWhole, passed, proven_tokens: proven, duration_seconds: s }) {
  const proof = isWhole ? `, ${plural(proven, "token")} proven` : "";
  const outcome = passed ? `passed${proof}` : "failed";
  return `${isWhole ? suite : "one request"} ${outcome} in ${duration(s)}`;
}

function ranks({ ranks: numbers, engine, isOfSeveral }) {
  const which = numbers.length === 1 ? `rank ${numbers[0]}` : plural(numbers.length, "rank");
  return isOfSeveral ? `${which} of engine ${engine}` : which;
}

function phase(name) {
  return name === "locked" ? "after the lock" : `phase ${name}`;
}

/** Whether an operator, or --recycle-after, asked for the end of an engine. */
function isPlanned({ kind, cause }) {
  return kind === "death" && cause === "requested";
}

function isBad({ kind, passed, verdict }) {
  return (
    kind === "death" ||
    (kind === "probe" && passed === false) ||
    (kind === "verify" && verdict === "failed")
  );
}

/** How many there were of a kind; a mark may stand for several growths. */
export function countOf(marks, kind) {
  return marks
    .filter((mark) => mark.kind === kind)
    .reduce((all, { growths = 1 }) => all + growths, 0);
}
