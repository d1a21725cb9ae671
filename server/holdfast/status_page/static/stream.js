/**
 * Follows a stream of events by `fetch`, since `EventSource` can send no key, and reconnects.
 *
 * The server ends a stream every few minutes to see the key again, and says nothing of it. Apart
 * from that, the connection is one of
 *
 * - `connecting`: the first answer is awaited
 * - `live`: events arrive
 * - `stopped`: the server ended the stream because it stops
 * - `lost`: the connection broke, or nobody answers
 * - `full`: the server has as many viewers as it allows
 * - `absent`: the server has no such stream
 * - `locked`: the server wants another key; nothing is tried until `start` brings one
 */

const FIRST_WAIT_SECONDS = 2;
const LONGEST_WAIT_SECONDS = 30;
const LONGEST_RETRY_AFTER_SECONDS = 300;
const SILENCE_SECONDS = 40;

/** Splits text into events: https://html.spec.whatwg.org/multipage/server-sent-events.html. */
export class EventParser {
  #rest = "";
  #event = "";
  #data = [];
  #id = "";

  /** The events that this piece of text completes. */
  feed(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    return lines.flatMap((line) => this.#read(line.endsWith("\r") ? line.slice(0, -1) : line));
  }

  #read(line) {
    if (line === "") return this.#complete();
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "event") this.#event = value;
    else if (field === "data") this.#data.push(value);
    else if (field === "id") this.#id = value;
    return [];
  }

  #complete() {
    const complete = { name: this.#event || "message", data: this.#data.join("\n"), id: this.#id };
    const isEvent = this.#data.length > 0;
    this.#event = "";
    this.#data = [];
    return isEvent ? [complete] : [];
  }
}

/**
 * The seconds until the next attempt after this many failed ones, and not before those that the
 * server wants, unless it wants too many; `chance` is from 0 to 1.
 */
export function waitSeconds(failures, chance = Math.random(), wantedSeconds = 0) {
  const whole = Math.min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2 ** failures);
  const wanted = Math.min(LONGEST_RETRY_AFTER_SECONDS, wantedSeconds);
  // Viewers of a server that starts again must not all come at once.
  return Math.max(whole * (0.75 + chance / 4), wanted * (1 + chance / 4));
}

/** One stream that is followed until `stop`. */
export class Follower {
  #url;
  #onEvent;
  #onConnection;
  #running = new AbortController();
  #wake = () => {};
  #lastId = "";

  /** `onEvent` gets an event's name and its parsed data, `onConnection` what has become of it. */
  constructor(url, { onEvent, onConnection }) {
    this.#url = url;
    this.#onEvent = onEvent;
    this.#onConnection = onConnection;
  }

  /** Follow with this key from now on; with "" none is sent. */
  start(key) {
    this.stop();
    this.#running = new AbortController();
    this.#lastId = "";
    void this.#follow(key, this.#running.signal);
  }

  /** Close the stream. */
  stop() {
    this.#running.abort();
    this.#wake();
  }

  /** Do not wait for the next attempt any longer. */
  retryNow() {
    this.#wake();
  }

  async #follow(key, signal) {
    let failures = 0;
    this.#onConnection({ name: "connecting" });
    while (!signal.aborted) {
      const end = await this.#readOnce(key, signal);
      if (signal.aborted) return;
      if (end.name === "locked") {
        this.#onConnection(end);
        return;
      }
      failures = end.wasLive ? 0 : failures;
      if (end.name === "renewed") {
        await this.#pause(Math.random());
        continue;
      }
      const wait = waitSeconds(failures, Math.random(), end.retryAfterSeconds);
      failures += 1;
      this.#onConnection({ ...end, retryAtMilliseconds: Date.now() + wait * 1000 });
      await this.#pause(wait);
    }
  }

  /** Read one connection to its end, and return what ended it. */
  async #readOnce(key, signal) {
    const attempt = new AbortController();
    const abort = () => attempt.abort();
    signal.addEventListener("abort", abort, { once: true });
    const silence = new Alarm(SILENCE_SECONDS, abort);
    let wasLive = false;
    try {
      const response = await fetch(this.#url, {
        headers: this.#headers(key),
        cache: "no-store",
        signal: attempt.signal,
      });
      const refusal = await refusalOf(response);
      if (refusal) return refusal;
      wasLive = true;
      this.#onConnection({ name: "live" });
      return { name: await this.#readBody(response.body, silence), wasLive };
    } catch (error) {
      // The browser says in its console what happened; scripts are told no reason.
      if (error instanceof InvalidKeyError) return { name: "locked", detail: error.message };
      return { name: "lost", wasLive };
    } finally {
      silence.end();
      attempt.abort();
      signal.removeEventListener("abort", abort);
    }
  }

  #headers(key) {
    try {
      return new Headers({
        Accept: "text/event-stream",
        ...(key && { Authorization: `Bearer ${key}` }),
        ...(this.#lastId && { "Last-Event-ID": this.#lastId }),
      });
    } catch {
      throw new InvalidKeyError("A key has only letters, digits and signs of ASCII.");
    }
  }

  async #readBody(body, silence) {
    const parser = new EventParser();
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return "lost";
      silence.delay();
      for (const event of parser.feed(value)) {
        if (event.name === "bye") return "stopped";
        this.#lastId = event.id || this.#lastId;
        this.#tell(event);
        if (event.name === "renew") return "renewed";
      }
    }
  }

  /** Hand an event on. What is wrong with it, or with its reader, does not end the stream. */
  #tell({ name, data }) {
    try {
      this.#onEvent(name, JSON.parse(data));
    } catch (error) {
      reportError(error);
    }
  }

  #pause(seconds) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, seconds * 1000);
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}

class InvalidKeyError extends Error {}

/** Rings once, this many seconds after it was last delayed. */
class Alarm {
  #seconds;
  #ring;
  #timer;

  constructor(seconds, ring) {
    this.#seconds = seconds;
    this.#ring = ring;
    this.delay();
  }

  delay() {
    this.end();
    this.#timer = setTimeout(this.#ring, this.#seconds * 1000);
  }

  end() {
    clearTimeout(this.#timer);
  }
}

/** Why this answer is not a stream, or null if it is one. */
async function refusalOf(response) {
  if (response.status === 401 || response.status === 403) {
    return { name: "locked" }; // its message tells programs how to send a key
  }
  if (response.status === 503) {
    const retryAfterSeconds = Number(response.headers.get("Retry-After")) || 0;
    const detail = await messageOf(response);
    // A proxy says 503 too, while the server is down.
    return { name: detail ? "full" : "lost", detail, retryAfterSeconds };
  }
  if (response.status === 404) return { name: "absent" };
  const type = response.headers.get("Content-Type") ?? "";
  return response.ok && type.startsWith("text/event-stream") ? null : { name: "lost" };
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return "";
  }
}
