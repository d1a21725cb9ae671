/** Where is each byte of the devices? A bar for each rank, to scale, and one for each workspace. */

import { drawing, element, share, show } from "./elements.js";
import { bytes, percent, plural, words } from "./format.js";
import { inOrder } from "./report.js";

const BAR_HEIGHT = 30;
const LINK_HEIGHT = 14;
const SLOT_HEIGHT = 18;
/** A rank that takes less of its device than this is drawn once more, enlarged. */
const LARGE_SHARE = 0.6;
/** With more ranks than this, the table of each one's workspaces begins closed. */
const MOST_OPEN = 2;

/** Draw all ranks into a place of the page. */
export function showMemory(place, { report }) {
  const ranks = named(inOrder(report.ranks));
  if (!ranks.some(holdsMemory)) {
    const said = ranks.length ? "No engine holds memory now." : "No rank has measured its memory yet.";
    show(
      place,
      element("p", { class: "empty" }, said),
      report.host_memory && hostShown(report.host_memory),
      ranks.map(lastOfRank),
    );
    return;
  }
  const isOpen = ({ id }) =>
    place.querySelector(`[data-key="${CSS.escape(id)}"] details`)?.open ?? ranks.length <= MOST_OPEN;
  show(
    place,
    ranks.map((rank) => rankShown(rank, sharedBy(rank, report), isOpen(rank))),
  );
}

/** The ranks with what to call them: with data parallelism, each engine has a rank 0. */
function named(ranks) {
  const engines = new Set(ranks.map(({ engine }) => engine));
  return ranks.map((rank) => ({
    ...rank,
    name: engines.size > 1 ? `Engine ${rank.engine}, rank ${rank.rank}` : `Rank ${rank.rank}`,
  }));
}

/**
 * The memory of the host that the server runs on, if the device of this rank shares it. The first
 * node is the server's own; what the other hosts have left is unknown.
 */
export function sharedBy(rank, { host_memory: host, nodes }) {
  const [own] = Object.keys(nodes ?? {});
  return host?.is_unified && (own === undefined || rank.node === own) ? host : null;
}

function holdsMemory({ memory, slots }) {
  return Boolean(memory ?? slots);
}

function hostShown({ available_bytes: available, total_bytes: total }) {
  const parts = [
    { name: "in use", size: total - available },
    { name: "free", size: available },
  ].filter(({ size }) => size > 0);
  return element(
    "article",
    { class: "rank", "data-key": "host" },
    element("header", {}, element("h3", {}, "Host"), element("p", { class: "total" }, bytes(total))),
    bar(parts, total, "Host"),
    element("ul", { class: "legend" }, parts.map(legendEntry)),
  );
}

/** What the last engine counted. */
function lastOfRank(rank) {
  const place = [rank.node, `engine ${rank.engine}`, `generation ${rank.generation}`];
  return element(
    "article",
    { class: "rank", "data-key": rank.id },
    element(
      "header",
      {},
      element("h3", {}, rank.name),
      element("p", {}, place.filter(Boolean).join(", ")),
    ),
    notes(rank),
  );
}

/**
 * The parts that a rank holds, in the order in which they are drawn. `used` is the share of a part
 * that is filled. Where the device shares the memory of its host, two are left out: what is not
 * torch's was measured with all other processes in it, and the peak of the activations is free
 * between the steps.
 */
export function partsOf(rank, isShared) {
  const sizes = rank.memory ?? {};
  const held = inOrder(rank.slots).reduce((sum, slot) => sum + slot.size_bytes, 0);
  return [
    { name: "weights", size: sizes.weights_bytes },
    { name: "KV cache", size: sizes.kv_cache_bytes, used: rank.kv_used_ratio },
    { name: "graphs", size: sizes.cuda_graphs_bytes },
    { name: "workspaces", size: held },
    { name: "retired", size: rank.retired_bytes },
    { name: "persistent", size: (rank.persistent_bytes ?? 0) + (rank.lamport_bytes ?? 0) },
    { name: "activation peak", size: isShared ? 0 : sizes.activation_peak_bytes },
    { name: "non-torch", size: isShared ? 0 : sizes.non_torch_bytes },
  ].filter(({ size }) => size > 0);
}

/** What else the device has: apart only where the host says what is free. */
export function restOf(parts, total, available) {
  const left = total - sum(parts);
  if (!(left > 0)) return [];
  if (!Number.isFinite(available)) return [{ name: "others and free", size: left }];
  const free = Math.min(left, available);
  return [
    { name: "others and non-torch", size: left - free },
    { name: "free", size: free },
  ].filter(({ size }) => size > 0);
}

function rankShown(rank, shared, isOpen) {
  const parts = partsOf(rank, Boolean(shared));
  const total = shared?.total_bytes ?? rank.memory?.total_bytes;
  const rest = restOf(parts, total, shared?.available_bytes);
  const whole = sum(parts) + sum(rest);
  const isSmall = sum(parts) > 0 && sum(parts) < LARGE_SHARE * whole;
  return element(
    "article",
    { class: "rank", "data-key": rank.id },
    heading(rank, total, shared),
    bar([...parts, ...rest], whole, rank.name, rank.memory?.budget_bytes),
    isSmall && link(sum(parts), whole),
    isSmall && bar(parts, sum(parts), rank.name),
    element("ul", { class: "legend" }, [...parts, ...rest].map(legendEntry)),
    workspaces(rank, isOpen),
    notes(rank),
  );
}

function heading(rank, total, shared) {
  const place = [rank.node, `engine ${rank.engine}`, `generation ${rank.generation}`];
  const kind = shared ? "memory of the host and its device" : "memory of the device";
  return element(
    "header",
    {},
    element("h3", {}, rank.name),
    element("p", {}, place.filter(Boolean).join(", ")),
    element("p", { class: "total" }, total ? `${bytes(total)}, ${kind}` : "size unknown"),
  );
}

function bar(parts, whole, name, budget) {
  const summary = `${name}: ${parts.map(partSaid).join(", ")}`;
  const attributes = { class: "bar", height: BAR_HEIGHT, role: "img", tabindex: 0 };
  let from = 0;
  const pieces = parts.map((part) => {
    const begin = from;
    from += part.size;
    return piece(part, begin, whole);
  });
  return drawing(
    "svg",
    { ...attributes, "aria-label": summary, "data-detail": summary },
    pieces,
    budget > 0 && budget < whole && budgetTick(budget, whole),
  );
}

function piece(part, begin, whole) {
  const place = { x: share(begin, whole), height: BAR_HEIGHT };
  return drawing(
    "g",
    { "data-part": part.name, "data-detail": partSaid(part) },
    drawing("rect", { ...place, class: "part", width: share(part.size, whole) }),
    part.used > 0 &&
      drawing("rect", { ...place, class: "used", width: share(part.size * part.used, whole) }),
  );
}

function budgetTick(budget, whole) {
  const x = share(budget, whole);
  return drawing(
    "g",
    { "data-detail": `vLLM may use ${bytes(budget)}` },
    drawing("line", { class: "budget", x1: x, x2: x, y2: BAR_HEIGHT }),
  );
}

/** The lines from a small part of one bar to the whole of the next. */
function link(part, whole) {
  const x = share(part, whole);
  return drawing(
    "svg",
    { class: "enlarged", height: LINK_HEIGHT, "aria-hidden": "true" },
    drawing("line", { x1: 0, x2: 0, y2: LINK_HEIGHT }),
    drawing("line", { x1: x, x2: "100%", y2: LINK_HEIGHT }),
  );
}

function legendEntry(part) {
  return element(
    "li",
    { "data-key": part.name },
    drawing(
      "svg",
      { width: 12, height: 12, "aria-hidden": "true", "data-part": part.name },
      drawing("rect", { class: "part", width: 12, height: 12 }),
    ),
    element("span", { class: "name" }, part.name),
    element("span", { class: "number" }, bytes(part.size)),
    Number.isFinite(part.used) && element("span", { class: "faint" }, `${percent(part.used)} used`),
  );
}

function partSaid({ name, size, used }) {
  const filled = Number.isFinite(used) ? `, ${percent(used)} used` : "";
  return `${name} ${bytes(size)}${filled}`;
}

function workspaces(rank, isOpen) {
  const slots = inOrder(rank.slots);
  if (!slots.length) return null;
  const end = largestOf(slots);
  const held = sum(slots.map((slot) => ({ size: slot.size_bytes })));
  const growth = rank.growth_limit_bytes;
  const limit = Number.isFinite(growth) ? `; the rank may grow by ${bytes(growth)} in all` : "";
  return element(
    "details",
    { class: "workspaces", open: isOpen },
    element("summary", {}, `${plural(slots.length, "workspace")}, ${bytes(held)}${limit}`),
    element(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": `slots of ${rank.name}` },
      element(
        "table",
        {},
        element("thead", {}, element("tr", {}, columns().map(([name, style]) => th(name, style)))),
        // A table that nobody sees is not worth its rows at each change.
        element("tbody", {}, isOpen && slots.map((slot) => slotRow(slot, end))),
      ),
    ),
  );
}

function columns() {
  return [
    ["ubatch / lane", ""],
    ["to scale", "wide"],
    ["high water", "number"],
    ["size", "number"],
    ["reserved", "number"],
    ["largest request by", ""],
  ];
}

function th(name, style) {
  return element("th", { scope: "col", class: style || null }, name);
}

/** All workspaces of a rank share a scale, which ends where the largest does. */
export function largestOf(slots) {
  const sizes = slots.flatMap((slot) => [
    slot.size_bytes,
    slot.reserved_bytes,
    slot.high_water_bytes,
  ]);
  return Math.max(1, ...sizes);
}

function slotRow(slot, end) {
  const sizes = [slot.high_water_bytes, slot.size_bytes, slot.reserved_bytes];
  return element(
    "tr",
    { "data-key": slot.id },
    element("th", { scope: "row" }, `${slot.ubatch} / ${slot.lane}`),
    element("td", { class: "wide" }, slotBar(slot, end)),
    sizes.map((size) => element("td", { class: "number" }, bytes(size))),
    element("td", { class: "caller" }, slot.high_water_caller || "nobody yet"),
  );
}

function slotBar(slot, end) {
  const tick = (name, size) => {
    const x = share(size, end);
    return drawing("line", { class: name, x1: x, x2: x, y2: SLOT_HEIGHT });
  };
  const middle = { y: 4, height: SLOT_HEIGHT - 8 };
  return drawing(
    "svg",
    { class: "slot", height: SLOT_HEIGHT, "aria-hidden": "true", "data-detail": slotSaid(slot) },
    drawing("rect", { class: "track", width: "100%", ...middle }),
    drawing("rect", { class: "size", width: share(slot.size_bytes, end), ...middle }),
    drawing("rect", { class: "high-water", width: share(slot.high_water_bytes, end), ...middle }),
    tick("reserved", slot.reserved_bytes),
  );
}

function slotSaid(slot) {
  const [high, size, reserved] = [slot.high_water_bytes, slot.size_bytes, slot.reserved_bytes];
  const name = `Workspace ${slot.ubatch} / ${slot.lane}`;
  return `${name}: ${bytes(high)} used at most of ${bytes(size)}, ${bytes(reserved)} reserved`;
}

function notes(rank) {
  const grown = rank.growths?.locked ?? 0;
  const refused = Object.values(rank.rejections ?? {}).reduce((all, one) => all + one, 0);
  const last = rank.last_rejection;
  return element(
    "p",
    { class: "notes" },
    `${plural(rank.steps, "step")}. `,
    rank.is_locked ? "Locked" : "Not locked yet",
    `, ${plural(grown, "growth")} since, ${plural(refused, "request")} refused`,
    last && `; the last: ${words(last.kind)}, ${bytes(last.needed_bytes)}, by ${last.caller}`,
    last && ` (${last.reason})`,
    ".",
    rank.fatal_error && ` It is lost: ${rank.fatal_error}`,
  );
}

function sum(parts) {
  return parts.reduce((all, { size }) => all + size, 0);
}
