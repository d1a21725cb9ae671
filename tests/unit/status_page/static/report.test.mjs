/** The report that changes are merged into, and what is computed from it. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { columnsOf, newestOf } from "../../../../server/holdfast/status_page/static/curves.js";
import {
  largestOf,
  partsOf,
  restOf,
  sharedBy,
} from "../../../../server/holdfast/status_page/static/memory_band.js";
import { inOrder, merged } from "../../../../server/holdfast/status_page/static/report.js";
import { countOf } from "../../../../server/holdfast/status_page/static/timeline.js";

test("a merge patch sets, replaces and deletes, as the RFC's own examples", () => {
  // https://www.rfc-editor.org/rfc/rfc7396#appendix-A, without those of patches that are not objects
  const cases = [
    [{ a: "b" }, { a: "c" }, { a: "c" }],
    [{ a: "b" }, { b: "c" }, { a: "b", b: "c" }],
    [{ a: "b" }, { a: null }, {}],
    [{ a: "b", b: "c" }, { a: null }, { b: "c" }],
    [{ a: ["b"] }, { a: "c" }, { a: "c" }],
    [{ a: "c" }, { a: ["b"] }, { a: ["b"] }],
    [{ a: { b: "c" } }, { a: { b: "d", c: null } }, { a: { b: "d" } }],
    [{ a: [{ b: "c" }] }, { a: [1] }, { a: [1] }],
    [["a", "b"], ["c", "d"], ["c", "d"]],
    [{ e: null }, { a: 1 }, { e: null, a: 1 }],
    [[1, 2], { a: "b", c: null }, { a: "b" }],
    [{}, { a: { bb: { ccc: null } } }, { a: { bb: {} } }],
  ];
  for (const [target, patch, wanted] of cases) assert.deepEqual(merged(target, patch), wanted);
});

test("a name that means something to JavaScript is a name like others", () => {
  const report = merged({}, JSON.parse('{"__proto__": {"a": 1}}'));
  assert.deepEqual(Object.keys(report), ["__proto__"]);
  assert.equal(report.a, undefined);
});

test("what a patch does not touch is the same object", () => {
  const report = { ranks: { "0/0": {} }, state: "READY" };
  assert.equal(merged(report, { state: "DRAINING" }).ranks, report.ranks);
});

test("maps are in the order of the numbers of their keys", () => {
  const order = (map) => inOrder(map).map(({ id }) => id);
  assert.deepEqual(order({ 10: {}, 9: {}, 100: {} }), ["9", "10", "100"]);
  assert.deepEqual(order({ "1/0": {}, "0/10": {}, "0/2": {} }), ["0/2", "0/10", "1/0"]);
  assert.deepEqual(order(undefined), []);
});

test("the parts of a rank are what was measured, and the rest is of others and free", () => {
  const rank = {
    slots: { "0/0": { size_bytes: 30 }, "1/0": { size_bytes: 10 } },
    retired_bytes: 5,
    memory: { weights_bytes: 100, kv_cache_bytes: 50, total_bytes: 300 },
    kv_used_ratio: 0.5,
  };
  const parts = partsOf(rank);
  const sizes = (all) => Object.fromEntries(all.map(({ name, size }) => [name, size]));
  assert.deepEqual(sizes(parts), { weights: 100, "KV cache": 50, workspaces: 40, retired: 5 });
  assert.deepEqual(sizes(restOf(parts, 300, undefined)), { "others and free": 105 });
  assert.deepEqual(sizes(restOf(parts, 300, 60)), { "others and non-torch": 45, free: 60 });
  assert.deepEqual(sizes(restOf(parts, 300, 400)), { free: 105 });
  assert.deepEqual(restOf(parts, undefined, 60), []);
});

test("what other processes may hold is no part of a rank that shares its host's memory", () => {
  const memory = { weights_bytes: 100, non_torch_bytes: 80, activation_peak_bytes: 20 };
  const sizes = (all) => Object.fromEntries(all.map(({ name, size }) => [name, size]));
  assert.deepEqual(sizes(partsOf({ memory }, true)), { weights: 100 });
  assert.deepEqual(sizes(partsOf({ memory }, false)), {
    weights: 100,
    "activation peak": 20,
    "non-torch": 80,
  });
});

const NOW = 1_800_000_000_000;
const LAST = NOW / 1000 / 15;

test("the curves have a gap where the server was not running", () => {
  const history = { interval_seconds: 15, points: { [LAST - 2]: { running: 1 }, [LAST]: {} } };
  const [times, running] = columnsOf(history, ["running"], NOW);
  assert.equal(times.at(-1), NOW / 1000);
  assert.deepEqual(running.slice(-3), [1, null, null]);
});

test("the curves of a young server are not squeezed into the edge of an hour", () => {
  const minutesShown = (intervals) => {
    const history = { interval_seconds: 15, points: { [LAST - intervals]: {} } };
    const [times] = columnsOf(history, [], NOW);
    return (times.at(-1) - times[0]) / 60;
  };
  assert.deepEqual([0, 20, 21, 100, 239, 500].map(minutesShown), [5, 5, 15, 30, 60, 60]);
  const [times] = columnsOf({ interval_seconds: 15, points: {} }, [], NOW);
  assert.equal(times.length, 21);
});

test("what is said of now is not what was last measured an hour ago", () => {
  assert.equal(newestOf([1, 2, 3, null, null]), 3);
  assert.equal(newestOf([1, 2, 3, null, null, null]), undefined);
});

test("a mark may stand for several growths, and for one of anything else", () => {
  const marks = [{ kind: "growth", growths: 3 }, { kind: "growth", growths: 2 }, { kind: "death" }];
  assert.deepEqual(["growth", "death", "probe"].map((kind) => countOf(marks, kind)), [5, 1, 0]);
});

test("workspaces are drawn on the scale of the largest", () => {
  const slot = { size_bytes: 8, reserved_bytes: 6, high_water_bytes: 7 };
  assert.equal(largestOf([slot, { ...slot, reserved_bytes: 9 }]), 9);
  assert.equal(largestOf([{ size_bytes: 0, reserved_bytes: 0, high_water_bytes: 0 }]), 1);
});

test("only the ranks beside the server share the memory of its host", () => {
  const host = { is_unified: true };
  const nodes = { left: {}, right: {} };
  const shared = (rank, report) => sharedBy(rank, report) === host;
  assert.ok(shared({}, { host_memory: host }));
  assert.ok(shared({ node: "left" }, { host_memory: host, nodes }));
  assert.ok(!shared({ node: "right" }, { host_memory: host, nodes }));
  assert.ok(!shared({}, { host_memory: { is_unified: false } }));
  assert.ok(!shared({}, {}));
});
