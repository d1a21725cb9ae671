/** Sizes, counts and times in words. */

import assert from "node:assert/strict";
import { test } from "node:test";

import {
  age,
  bytes,
  count,
  digits,
  duration,
  percent,
  plural,
  words,
} from "../../../../server/holdfast/status_page/static/format.js";

const KIB = 1024;

test("sizes are in IEC units, with three digits at most", () => {
  assert.deepEqual(
    [0, 512, 1536, 24 * KIB ** 2, 1023 * KIB, 1023.9 * KIB, 120.4 * KIB ** 3].map(bytes),
    ["0 B", "512 B", "1.5 KiB", "24 MiB", "1,023 KiB", "1 MiB", "120 GiB"],
  );
});

test("what is unknown is a dash", () => {
  for (const said of [bytes, count, digits, percent, duration, age]) {
    assert.equal(said(undefined), "–");
    assert.equal(said(NaN), "–");
  }
  assert.equal(words(undefined), "–");
});

test("durations have their two largest units", () => {
  assert.deepEqual(
    [0.004, 0.4, 9.96, 59.4, 59.6, 61, 3599.6, 7500, 90000].map(duration),
    ["4 ms", "0.4 s", "10 s", "59 s", "1 min", "1 min 1 s", "1 h", "2 h 5 min", "1 d 1 h"],
  );
});

test("an age counts whole seconds, and is never negative", () => {
  assert.deepEqual([-3, 0.9, 1.9, 75.2].map(age), ["0 s", "0 s", "1 s", "1 min 15 s"]);
});

test("a share that is not nothing is not shown as nothing", () => {
  assert.deepEqual([0, 0.001, 0.42, 1].map(percent), ["0 %", "< 1 %", "42 %", "100 %"]);
});

test("numbers keep the digits that matter", () => {
  assert.deepEqual(
    [0.0014, 0.314, 3.14159, 14.25, 118.2, 2048].map(digits),
    ["0.001", "0.314", "3.14", "14.3", "118", "2,048"],
  );
  assert.deepEqual([plural(1, "death"), plural(1200, "token")], ["1 death", "1,200 tokens"]);
});
