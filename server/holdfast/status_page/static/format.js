/** Sizes, counts and times as people read them. What is unknown is a dash. */

export const UNKNOWN = "–";

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const MINUTE_SECONDS = 60;
const HOUR_SECONDS = 3600;
const DAY_SECONDS = 86400;

const COUNT = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const CLOCK = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
const TO_MINUTES = new Intl.DateTimeFormat("en", CLOCK);
const TO_SECONDS = new Intl.DateTimeFormat("en", { ...CLOCK, second: "2-digit" });
const TO_DAY = new Intl.DateTimeFormat("en", { day: "numeric", month: "short" });

/** A size in IEC units, with three digits at most: 1536 is "1.5 KiB". */
export function bytes(size) {
  if (!Number.isFinite(size)) return UNKNOWN;
  let value = size;
  let unit = 0;
  // From 1023.5 on, three digits and a rounding would read as 1024 of the smaller unit.
  while (Math.abs(value) >= 1023.5 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${digits(value)} ${UNITS[unit]}`;
}

/** A whole number, in groups of three digits. */
export function count(number) {
  return Number.isFinite(number) ? COUNT.format(number) : UNKNOWN;
}

/** A number with three digits at most before it is rounded to a whole one: 0.314, 12.3, 118. */
export function digits(value) {
  if (!Number.isFinite(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size >= 99.95) return COUNT.format(value);
  return String(Number(value.toFixed(size >= 9.995 ? 1 : size >= 0.9995 ? 2 : 3)));
}

/** A share of a whole as a percentage: 0.42 is "42 %", and what is not nothing is not "0 %". */
export function percent(ratio) {
  if (!Number.isFinite(ratio)) return UNKNOWN;
  if (ratio > 0 && ratio < 0.01) return "< 1 %";
  return `${Math.round(ratio * 100)} %`;
}

/** How long something took, in its two largest units. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return UNKNOWN;
  const rounded = Math.round(seconds);
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${Number(seconds.toFixed(1))} s`;
  if (rounded < MINUTE_SECONDS) return `${rounded} s`;
  if (rounded < HOUR_SECONDS) return pair(rounded, MINUTE_SECONDS, "min", 1, "s");
  if (rounded < DAY_SECONDS) return pair(rounded, HOUR_SECONDS, "h", MINUTE_SECONDS, "min");
  return pair(rounded, DAY_SECONDS, "d", HOUR_SECONDS, "h");
}

/** How long ago something was, in whole seconds, so that it does not flicker. */
export function age(seconds) {
  if (!Number.isFinite(seconds)) return UNKNOWN;
  const whole = Math.max(0, Math.floor(seconds));
  return whole === 0 ? "0 s" : duration(whole);
}

/** A time of the day where the reader is, to the minute. */
export function minutes(milliseconds) {
  return Number.isFinite(milliseconds) ? TO_MINUTES.format(milliseconds) : UNKNOWN;
}

/** A time of the day where the reader is, to the second. */
export function clock(milliseconds) {
  return Number.isFinite(milliseconds) ? TO_SECONDS.format(milliseconds) : UNKNOWN;
}

/** A time of the day, with the date if that is not the date of `now`. */
export function moment(milliseconds, now) {
  if (!Number.isFinite(milliseconds)) return UNKNOWN;
  const day = TO_DAY.format(milliseconds);
  return day === TO_DAY.format(now) ? clock(milliseconds) : `${day}, ${clock(milliseconds)}`;
}

/** A name of the server's as words: `full_context` is "full context". */
export function words(name) {
  return String(name ?? UNKNOWN).replaceAll("_", " ");
}

/** "1 request", "2 requests". */
export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

function pair(seconds, large, largeName, small, smallName) {
  const rest = Math.floor((seconds % large) / small);
  const first = `${Math.floor(seconds / large)} ${largeName}`;
  return rest ? `${first} ${rest} ${smallName}` : first;
}
