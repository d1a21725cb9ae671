/** The page: what the server says goes into the four bands, as it changes and as time passes. */

import { Curves } from "./curves.js";
import { show } from "./elements.js";
import { age } from "./format.js";
import { LogIn, keptKey } from "./log_in.js";
import { showMemory } from "./memory_band.js";
import { showProof } from "./proof_band.js";
import { readOut } from "./readout.js";
import { instant, merged } from "./report.js";
import { showRequests } from "./requests_band.js";
import { showState } from "./state_band.js";
import { Follower } from "./stream.js";
import { showTimeline } from "./timeline.js";

const TICK_MILLISECONDS = 1000;
/** With more ranks than this, the map is drawn less often than changes come. */
const MANY_RANKS = 8;
const MAP_MILLISECONDS = 2000;
const STREAM = new URL("statusz/stream", document.baseURI);

const places = (...names) =>
  Object.fromEntries(names.map((name) => [name, document.getElementById(name)]));
const state = places("word", "expectation", "facts");
const timeline = places("timeline", "legend", "events");
const requests = places("counts", "reasons", "rows", "more");
const proof = places("verdicts", "trend", "steps", "phases");
const { memory, curves, history, bands } = places("memory", "curves", "history", "bands");
const { server, connection, attempt, retry } = places("server", "connection", "attempt", "retry");
const span = document.getElementById("span");
const charts = new Curves(curves, history);

let report = null;
let drawn = null;
let mapDrawn = null;
let mapDrawnAt = -Infinity;
let view = null;
let serverAheadMilliseconds = 0;
let link = { name: "connecting" };

const follower = new Follower(STREAM, {
  onEvent(name, data) {
    if (name === "snapshot" || name === "renew") setClock(data.time);
    if (name === "snapshot") {
      report = data;
    } else if (name === "change") {
      report = merged(report, data);
    }
    draw();
  },
  onConnection(now) {
    link = now;
    if (link.name === "live") logIn.accept();
    if (link.name === "locked") {
      report = null;
      logIn.ask(link.detail);
    }
    draw();
  },
});
const logIn = new LogIn(
  { ...places("problem", "forget"), form: document.getElementById("log-in") },
  (key) => {
    report = null;
    follower.start(key);
  },
);

/** The time of the server's sending tells how far its clock is ahead of ours, which may be set. */
function setClock(sent) {
  const aheadMilliseconds = instant(sent) - Date.now();
  if (Number.isFinite(aheadMilliseconds)) serverAheadMilliseconds = aheadMilliseconds;
}

function draw() {
  document.body.dataset.connection = link.name;
  show(connection, linkSaid());
  showAttempt();
  bands.hidden = !report;
  document.title = `${titleOf()}Holdfast`;
  if (!report) return;
  // Without a connection, what was last said is shown as of then: nothing gets older.
  if (link.name === "live" || !view) {
    view = { report, now: Date.now() + serverAheadMilliseconds };
  }
  if (document.hidden) return;
  show(server, report.server.model);
  showState(state, view);
  showTimeline(timeline, view, Number(span.querySelector(":checked").value));
  showRequests(requests, view);
  drawMap();
  if (report === drawn) return; // only time has passed
  drawn = report;
  showProof(proof, view);
  charts.show(view);
}

function drawMap() {
  const isEasy = Object.keys(report.ranks ?? {}).length <= MANY_RANKS;
  const isDue = isEasy || performance.now() - mapDrawnAt >= MAP_MILLISECONDS;
  if (report === mapDrawn || !isDue) return;
  mapDrawn = report;
  mapDrawnAt = performance.now();
  showMemory(memory, view);
}

function titleOf() {
  if (!report) return "";
  const word = link.name === "live" ? report.state : link.name;
  return [word, report.server.model, ""].filter((part) => part !== undefined).join(" · ");
}

function linkSaid() {
  return {
    connecting: "connecting",
    live: "live",
    stopped: "The server has stopped.",
    lost: "There is no connection to the server.",
    full: link.detail,
    absent: "This server has no status page: it is older, or runs with --ui off.",
    locked: "The server asks for a key.",
  }[link.name];
}

/** The count-down is beside the status, which a screen reader would read again each second. */
function showAttempt() {
  const left = (link.retryAtMilliseconds - Date.now()) / 1000;
  const isAwaited = Number.isFinite(left);
  show(attempt, isAwaited && `Next attempt in ${age(left)}.`);
  retry.hidden = !isAwaited;
}

for (const band of document.querySelectorAll("[data-band]")) {
  readOut(band, band.querySelector(".readout"));
}
retry.addEventListener("click", () => follower.retryNow());
addEventListener("online", () => follower.retryNow());
span.addEventListener("change", draw);
timeline.events.closest("details").addEventListener("toggle", draw);
// This event does not bubble, so it is met on its way down.
memory.addEventListener("toggle", () => report && showMemory(memory, view), { capture: true });
document.addEventListener("visibilitychange", draw);
setInterval(draw, TICK_MILLISECONDS);
follower.start(keptKey());
