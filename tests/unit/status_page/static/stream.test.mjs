/** Following a stream over real sockets: keys, changes, ends and back-off. */

import assert from "node:assert/strict";
import { createServer } from "node:http";
import { test } from "node:test";

import {
  EventParser,
  Follower,
  waitSeconds,
} from "../../../../server/holdfast/status_page/static/stream.js";

/** A server that answers each request as the next of these functions says. */
async function serving(t, ...answers) {
  const asked = [];
  const server = createServer((request, response) => {
    asked.push(request.headers);
    answers.shift()(response);
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  t.after(() => {
    server.closeAllConnections();
    server.close();
  });
  return { asked, url: `http://127.0.0.1:${server.address().port}/statusz/stream` };
}

/** A follower, what it has told, and a promise for the first thing of a kind that it tells. */
function following(t, url) {
  const told = [];
  const waiting = [];
  const tell = (one) => {
    told.push(one);
    for (const [wanted, resolve] of waiting) if (wanted(one)) resolve(one);
  };
  const follower = new Follower(url, {
    onEvent: (name, data) => tell({ event: name, data }),
    onConnection: (connection) => tell(connection),
  });
  t.after(() => follower.stop());
  const first = (wanted) =>
    new Promise((resolve) => {
      const found = told.find(wanted);
      if (found) resolve(found);
      else waiting.push([wanted, resolve]);
    });
  return { follower, told, first };
}

const named = (name) => (one) => one.name === name;
const refusing = (status, message, headers = {}) => (response) => {
  response.writeHead(status, { "content-type": "application/json", ...headers });
  response.end(JSON.stringify({ error: { message } }));
};
const streaming = (text, { isOver = false } = {}) => (response) => {
  response.writeHead(200, { "content-type": "text/event-stream; charset=utf-8" });
  response.write(text);
  if (isOver) response.end();
};

test("events are read however they are cut", () => {
  const text = 'retry: 2000\n\nid: a-1\nevent: snapshot\ndata: {"a":"ä"}\n\n: alive\n\nevent: bye\r\ndata:x\r\n\r\n';
  for (let size = 1; size <= text.length; size += 1) {
    const parser = new EventParser();
    const pieces = text.match(new RegExp(`[^]{1,${size}}`, "g"));
    assert.deepEqual(
      pieces.flatMap((piece) => parser.feed(piece)),
      [
        { name: "snapshot", data: '{"a":"ä"}', id: "a-1" },
        { name: "bye", data: "x", id: "a-1" },
      ],
    );
  }
});

test("the wait grows to half a minute, and viewers do not come at once", () => {
  assert.deepEqual([0, 1, 2, 3, 4, 9].map((failures) => waitSeconds(failures, 1)), [
    2, 4, 8, 16, 30, 30,
  ]);
  assert.equal(waitSeconds(0, 0), 1.5);
  assert.deepEqual([0, 1].map((chance) => waitSeconds(0, chance, 40)), [40, 50]);
  assert.equal(waitSeconds(0, 0, 86_400), 300);
});

test("the key travels in a header, and events arrive parsed", async (t) => {
  const { asked, url } = await serving(t, streaming('event: snapshot\ndata: {"state":"READY"}\n\n'));
  const { follower, first } = following(t, url);
  follower.start("a-key");
  const snapshot = await first((one) => one.event === "snapshot");
  assert.deepEqual(snapshot.data, { state: "READY" });
  assert.equal(asked[0].authorization, "Bearer a-key");
  assert.equal(asked[0]["last-event-id"], undefined);
});

test("a goodbye is told, and the next attempt says which event was the last", async (t) => {
  const goodbye = 'id: a-7\nevent: change\ndata: {}\n\nevent: bye\ndata: {"reason":"x"}\n\n';
  const { asked, url } = await serving(t, streaming(goodbye), streaming(": alive\n\n"));
  const { follower, told, first } = following(t, url);
  follower.start("");
  const stopped = await first(named("stopped"));
  assert.ok(stopped.retryAtMilliseconds > Date.now());
  told.length = 0;
  follower.retryNow();
  await first(named("live"));
  assert.equal(asked[1]["last-event-id"], "a-7");
  assert.equal(asked[1].authorization, undefined);
});

test("a stream that ends without a goodbye is lost", async (t) => {
  const { url } = await serving(t, streaming(": alive\n\n", { isOver: true }));
  const { follower, first } = following(t, url);
  follower.start("");
  await first(named("lost"));
});

test("a stream that is to be renewed is followed on, and tells only the time", async (t) => {
  const renewed = 'id: a-7\nevent: change\ndata: {}\n\nevent: renew\ndata: {"time":"x"}\n\n';
  const change = 'event: change\ndata: {"b":1}\n\n';
  const { asked, url } = await serving(t, streaming(renewed, { isOver: true }), streaming(change));
  const { follower, told, first } = following(t, url);
  follower.start("a-key");
  await first((one) => one.data?.b === 1);
  assert.deepEqual(told.map(({ name }) => name).filter(Boolean), ["connecting", "live", "live"]);
  const renewal = told.find(({ event }) => event === "renew");
  assert.deepEqual(renewal.data, { time: "x" });
  assert.deepEqual([asked[1].authorization, asked[1]["last-event-id"]], ["Bearer a-key", "a-7"]);
});

test("a refused key is asked for, and nothing is tried until there is another", async (t) => {
  const { asked, url } = await serving(t, refusing(401, "no key"), streaming(": alive\n\n"));
  const { follower, first } = following(t, url);
  follower.start("wrong");
  assert.deepEqual(await first(named("locked")), { name: "locked" });
  follower.start("right");
  await first(named("live"));
  assert.deepEqual(
    asked.map(({ authorization }) => authorization),
    ["Bearer wrong", "Bearer right"],
  );
});

test("a key that no header can carry is refused here", async (t) => {
  const { asked, url } = await serving(t);
  const { follower, first } = following(t, url);
  follower.start("schlüssel\u{1F511}");
  await first(named("locked"));
  assert.equal(asked.length, 0);
});

test("a full server says why, and for how long it is to be left alone", async (t) => {
  const full = refusing(503, "100 viewers look already.", { "retry-after": "30" });
  const { url } = await serving(t, full);
  const { follower, first } = following(t, url);
  follower.start("");
  const told = await first(named("full"));
  assert.equal(told.detail, "100 viewers look already.");
  assert.ok(told.retryAtMilliseconds > Date.now() + 25_000);
});

test("a proxy whose server is down does not speak of viewers", async (t) => {
  const down = (response) => {
    response.writeHead(503, { "content-type": "text/html" });
    response.end("<h1>no upstream</h1>");
  };
  const { url } = await serving(t, down);
  const { follower, first } = following(t, url);
  follower.start("");
  await first(named("lost"));
});

test("a server without the stream, and a proxy's own page, are told apart", async (t) => {
  const page = (response) => {
    response.writeHead(200, { "content-type": "text/html" });
    response.end("<p>Log in</p>");
  };
  const { url } = await serving(t, refusing(404, "Not found"), page);
  const { follower, first } = following(t, url);
  follower.start("");
  await first(named("absent"));
  follower.retryNow();
  await first(named("lost"));
});
