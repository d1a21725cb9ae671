/** What the server has said of itself, kept up to date by changes, and how to read it. */

/**
 * The target with a merge patch applied, as https://www.rfc-editor.org/rfc/rfc7396 says. What the
 * patch does not touch is the same object.
 */
export function merged(target, patch) {
  if (!isObject(patch)) return patch;
  const result = new Map(isObject(target) ? Object.entries(target) : []);
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) result.delete(name);
    else result.set(name, merged(result.get(name), value));
  }
  return Object.fromEntries(result);
}

/** The values of a map by numbers, or by pairs such as "0/1", in their order, with that as `id`. */
export function inOrder(map) {
  return Object.entries(map ?? {})
    .sort(([one], [other]) => compared(one, other))
    .map(([id, value]) => ({ ...value, id }));
}

/** A time of the report as milliseconds since 1970, or NaN where there is none. */
export function instant(text) {
  return Date.parse(text ?? "");
}

function compared(one, other) {
  const [ours, theirs] = [one, other].map((key) => key.split("/").map(Number));
  const differing = ours.findIndex((number, index) => number !== theirs[index]);
  return differing < 0 ? 0 : ours[differing] - theirs[differing];
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
