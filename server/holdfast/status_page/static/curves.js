/** Throughput, first tokens and load over the last hour at most, drawn by uPlot. */

import { element, show } from "./elements.js";
import { clock, count, digits, duration, minutes, percent } from "./format.js";

const HEIGHT = 132;
/** What can be shown, in seconds: of a young server, less than the hour that it remembers. */
const SPANS = [300, 900, 1800, 3600];
/** The interval that lasts has no point yet, and the point of the last one may be on its way. */
const NEWEST_COLUMNS = 3;

/** What is drawn: each curve is a member of a point of the history, with its name and colour. */
const CHARTS = [
  {
    id: "output",
    title: "Output",
    said: (value) => `${digits(value)} tokens/s`,
    curves: [{ member: "output_tokens_per_second", name: "", color: "accent", isArea: true }],
  },
  {
    id: "prompt",
    title: "Prompts",
    said: (value) => `${digits(value)} tokens/s`,
    curves: [{ member: "prompt_tokens_per_second", name: "", color: "accent", isArea: true }],
  },
  {
    id: "first-token",
    title: "First token of streams",
    said: duration,
    curves: [
      { member: "first_token_median_seconds", name: "median", color: "accent" },
      { member: "first_token_p99_seconds", name: "p99", color: "strong" },
    ],
  },
  {
    id: "load",
    title: "Requests",
    said: digits,
    curves: [
      { member: "running", name: "running", color: "accent", isArea: true },
      { member: "waiting", name: "waiting", color: "strong" },
    ],
  },
];

/** The points of the history as columns, times first; null where the server was not running. */
export function columnsOf(history, members, now) {
  const interval = history.interval_seconds;
  const last = Math.floor(now / 1000 / interval);
  const oldest = Math.min(last, ...Object.keys(history.points).map(Number));
  const known = (last - oldest) * interval;
  const seconds = SPANS.find((span) => span >= known) ?? SPANS.at(-1);
  const first = last - Math.ceil(seconds / interval);
  const columns = [[], ...members.map(() => [])];
  for (let index = first; index <= last; index += 1) {
    const point = history.points[index];
    columns[0].push(index * interval);
    members.forEach((member, place) => columns[place + 1].push(point?.[member] ?? null));
  }
  return columns;
}

/** The charts of the page, in a place that has one figure for each. */
export class Curves {
  #place;
  #table;
  #charts = [];
  #history = null;
  #now = 0;

  constructor(place, table) {
    this.#place = place;
    this.#table = table;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.#build();
      this.#draw();
    });
    new ResizeObserver(() => this.#resize()).observe(place);
    table.closest("details").addEventListener("toggle", () => this.#fillTable());
  }

  /** Draw the history, if it is another than before. */
  show({ report: { history }, now }) {
    if (this.#history === history) return;
    this.#history = history;
    this.#now = now;
    if (!this.#charts.length) this.#build();
    this.#draw();
    this.#fillTable();
  }

  #draw() {
    if (!this.#history) return;
    for (const chart of this.#charts) chart.draw(this.#history, this.#now);
  }

  /** Make the charts, in the colours of the present scheme. */
  #build() {
    for (const chart of this.#charts) chart.end();
    this.#place.replaceChildren();
    this.#charts = CHARTS.map((described) => new Chart(described, this.#place));
  }

  #resize() {
    for (const chart of this.#charts) chart.resize();
  }

  #fillTable() {
    if (!this.#history || !this.#table.closest("details").open) return;
    const { interval_seconds: interval, points } = this.#history;
    const rows = Object.entries(points)
      .sort(([one], [other]) => Number(other) - Number(one))
      .map(([key, point]) => tableRow(Number(key) * interval, point));
    show(this.#table, rows);
  }
}

class Chart {
  #described;
  #figure;
  #caption;
  #plot;

  constructor(described, place) {
    this.#described = described;
    this.#caption = element("figcaption", {});
    this.#figure = element("div", { class: "plot", role: "img", "aria-label": described.title });
    place.append(element("figure", { id: `chart-${described.id}` }, this.#caption, this.#figure));
    // Its data comes later, and the width once the page has one.
    const empty = [[], ...described.curves.map(() => [])];
    this.#plot = new globalThis.uPlot(options(described, this.#width), empty, this.#figure);
  }

  draw(history, now) {
    const members = this.#described.curves.map(({ member }) => member);
    const columns = columnsOf(history, members, now);
    this.#plot.setData(columns);
    const said = this.#said(columns);
    this.#figure.setAttribute("aria-label", `${this.#described.title}, the last hour: ${said}`);
    show(
      this.#caption,
      element("b", {}, this.#described.title),
      this.#described.curves.map((curve, place) =>
        element(
          "span",
          { class: `curve-${curve.color}` },
          curve.name && `${curve.name} `,
          element("b", {}, this.#described.said(newestOf(columns[place + 1]))),
        ),
      ),
    );
  }

  /** Fill the place that the page has for it. */
  resize() {
    const width = this.#width;
    if (width !== this.#plot.width) this.#plot.setSize({ width, height: HEIGHT });
  }

  /** Let go of what it listens to. */
  end() {
    this.#plot.destroy();
  }

  get #width() {
    return Math.max(120, this.#figure.clientWidth);
  }

  #said(columns) {
    return this.#described.curves
      .map(({ name }, place) => {
        const values = columns[place + 1].filter((value) => value !== null);
        if (!values.length) return `${name} unknown`.trim();
        const newest = newestOf(columns[place + 1]);
        const [now, most] = [newest, Math.max(...values)].map(this.#described.said);
        return `${name} ${now} now, ${most} at most`.trim();
      })
      .join("; ");
  }
}

/** The value of now; undefined if the last two intervals have none. */
export function newestOf(values) {
  return values.slice(-NEWEST_COLUMNS).findLast((value) => value !== null);
}

function options(described, width) {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  const font = `11px ${style.getPropertyValue("--font").trim()}`;
  const axis = {
    font,
    stroke: color("faint"),
    grid: { stroke: color("line"), width: 1 },
    ticks: { show: false },
  };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { sync: { key: "curves" }, y: false, drag: { x: false, y: false } },
    padding: [6, 18, 0, 0],
    scales: { x: { time: true }, y: { range: (_plot, _least, most) => [0, topOf(most)] } },
    axes: [
      { ...axis, size: 22, gap: 4, space: 60, values: (_plot, times) => times.map(clockOf) },
      {
        ...axis,
        ...{ size: 46, gap: 4, space: 28 },
        values: (_plot, values) => values.map((value) => short(described.said(value))),
      },
    ],
    series: [
      {},
      ...described.curves.map((curve) => ({
        stroke: color(curve.color),
        fill: curve.isArea ? color("accent-wash") : undefined,
        width: 1.5,
        points: { show: false, size: 4, filter: lonely },
      })),
    ],
  };
}

/** The end of a scale: nothing is drawn as a flat line at the bottom, not in the middle. */
function topOf(most) {
  return most > 0 ? most * 1.1 : 1;
}

function clockOf(seconds) {
  return minutes(seconds * 1000);
}

/** The axis has room for a number, and the caption names the unit. */
function short(said) {
  return said.replace(" tokens/s", "");
}

/** The values between two gaps, which a line would not show. */
function lonely(plot, series) {
  const values = plot.data[series];
  const found = values.flatMap((value, at) =>
    value != null && values[at - 1] == null && values[at + 1] == null ? [at] : [],
  );
  return found.length ? found : null;
}

function tableRow(seconds, point) {
  const numbers = [
    digits(point.output_tokens_per_second),
    digits(point.prompt_tokens_per_second),
    duration(point.first_token_median_seconds),
    duration(point.first_token_p99_seconds),
    count(point.running),
    count(point.waiting),
    percent(point.kv_used_ratio),
  ];
  return element(
    "tr",
    { "data-key": seconds },
    element("th", { scope: "row" }, clock(seconds * 1000)),
    numbers.map((number) => element("td", { class: "number" }, number)),
  );
}
