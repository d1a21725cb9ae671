/** Asks for a key, and keeps it for as long as this tab of the browser is open. */

/** Behind a proxy, another server may have the same origin and another path. */
const NAME = `holdfast-key ${new URL(".", document.baseURI).pathname}`;

/** The key, also where the browser lets the page keep nothing. */
let ownKey = "";

/** The key that the tab has, or "". */
export function keptKey() {
  try {
    return sessionStorage.getItem(NAME) ?? ownKey;
  } catch {
    return ownKey;
  }
}

/** Keep a key for as long as the tab is open, or at least this page; with "" none. */
function keep(key) {
  ownKey = key;
  try {
    if (key) sessionStorage.setItem(NAME, key);
    else sessionStorage.removeItem(NAME);
  } catch {
    // Browsers that keep nothing say so by an exception.
  }
}

/** The form that asks for a key. `onKey` gets each one that is entered. */
export class LogIn {
  #form;
  #problem;
  #forget;

  constructor({ form, problem, forget }, onKey) {
    this.#form = form;
    this.#problem = problem;
    this.#forget = forget;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const key = form.elements.key.value.trim();
      keep(key);
      onKey(key);
    });
    forget.addEventListener("click", () => {
      keep("");
      onKey("");
    });
  }

  /** Ask, and say what was wrong with the key that the tab has. */
  ask(problem) {
    const wasTried = keptKey() !== "";
    keep("");
    this.#problem.textContent = wasTried ? problem || "The server does not accept this API key." : "";
    this.#form.hidden = false;
    this.#forget.hidden = true;
    this.#form.elements.key.focus();
    this.#form.elements.key.select();
  }

  /** The server accepts the key that the tab has, or needs none. */
  accept() {
    this.#form.hidden = true;
    this.#form.reset();
    this.#problem.textContent = "";
    this.#forget.hidden = keptKey() === "";
  }
}
