/** Makes elements, and changes what is shown into what shall be shown, in place. */

const SVG = "http://www.w3.org/2000/svg";
/** What readers change themselves, so that only an element's first drawing says it. */
const OWN_OF_READERS = new Set(["open", "data-current"]);

/** An HTML element. Attributes that are null, undefined or false are left out; true is empty. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** An SVG element, as `element` makes those of HTML. */
export function drawing(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

/**
 * Give a parent these children. What is alike stays the same node, so that focus, selection and
 * what a screen reader reads are not lost. Children with a `data-key` are known by it.
 */
export function show(parent, ...children) {
  settle(parent, present(children).map(asNode));
}

/** A share as the percentage that coordinates of SVG accept. */
export function share(part, whole) {
  const ratio = whole > 0 ? part / whole : 0;
  return `${(100 * Math.min(1, Math.max(0, ratio))).toFixed(3)}%`;
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  node.append(...present(children));
  return node;
}

function present(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false && child !== "");
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

function keyOf(node) {
  return node.dataset?.key;
}

function settle(parent, wanted) {
  const keys = new Set(wanted.map(keyOf));
  const known = new Map();
  for (const child of [...parent.children]) {
    const key = keyOf(child);
    if (key === undefined) continue;
    if (keys.has(key)) known.set(key, child);
    else child.remove();
  }
  let next = parent.firstChild;
  for (const node of wanted) {
    const key = keyOf(node);
    const old = key === undefined ? next : known.get(key);
    if (!old || !isAlike(old, node)) {
      parent.insertBefore(node, next);
      continue;
    }
    if (old === next) next = next.nextSibling;
    else parent.insertBefore(old, next);
    renew(old, node);
  }
  while (next) {
    const gone = next;
    next = next.nextSibling;
    gone.remove();
  }
}

function isAlike(old, node) {
  return old.nodeName === node.nodeName && keyOf(old) === keyOf(node);
}

function renew(old, node) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== node.data) old.data = node.data;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!node.hasAttribute(name) && !OWN_OF_READERS.has(name)) old.removeAttribute(name);
  }
  for (const { name, value } of node.attributes) {
    if (OWN_OF_READERS.has(name)) continue;
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  settle(old, [...node.childNodes]);
}
