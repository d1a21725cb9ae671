/** What is asked, how far is it, and what was refused? Never the text of a request. */

import { element, show } from "./elements.js";
import { age, count, digits, plural, words } from "./format.js";
import { inOrder, instant } from "./report.js";

/** Draw the counts and the rows into the places of the page. */
export function showRequests(places, { report, now }) {
  const { requests } = report;
  const rows = inOrder(requests.rows);
  show(places.counts, counts(requests));
  show(places.reasons, reasons("refused", requests.refused), reasons("lost", requests.lost));
  show(
    places.rows,
    rows.length
      ? rows.map((row) => rowShown(row, now))
      : element("tr", {}, element("td", { colspan: 8, class: "empty" }, "No request is running.")),
  );
  const others = requests.rows_left_out;
  show(places.more, others ? `${plural(others, "more request")} not shown.` : null);
}

function counts({ in_flight: inFlight, held, running, waiting, replayed, continued }) {
  const named = { "in flight": inFlight, running, waiting, held, replayed, continued };
  return Object.entries(named).map(([name, number]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, count(number))),
  );
}

function reasons(name, numbers) {
  const found = Object.entries(numbers ?? {});
  if (!found.length) return null;
  const said = found.map(([reason, number]) => `${words(reason)} ${count(number)}`).join(", ");
  return element("p", {}, element("b", {}, name), ": ", said);
}

function rowShown(row, now) {
  const numbers = [
    count(row.output_tokens),
    digits(row.output_tokens_per_second),
    row.generation ? count(row.generation) : "–",
    count(row.replays),
  ];
  return element(
    "tr",
    { "data-key": row.id, "data-stage": row.stage },
    element("td", { class: "stage" }, row.stage),
    element("td", {}, row.key ?? "–"),
    element("td", { class: "number" }, age((now - instant(row.received)) / 1000)),
    element("td", { class: "prompt" }, prompt(row)),
    numbers.map((number) => element("td", { class: "number" }, number)),
  );
}

function prompt({ prompt_tokens: whole, prefilled_tokens: done }) {
  if (!Number.isFinite(whole)) return "unknown";
  if (!Number.isFinite(done)) return count(whole);
  const said = `${count(done)} of ${count(whole)}`;
  return [
    element("progress", { max: whole, value: done, "aria-label": "prompt tokens" }, said),
    element("span", { class: "number" }, said),
  ];
}
