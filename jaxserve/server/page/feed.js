// The live feed: connects, and connects again when the connection is lost. Nobody watches while the page is hidden.

import { call } from "./api.js";
import { events } from "./sse.js";

const RETRY_MS = 2000;

/**
 * Passes every update to `onUpdate`, and to `onState` "live", "lost", "paused" or "locked" (with the reason).
 * Returns a function that connects anew, as when a key has been given.
 */
export function watch(onUpdate, onState) {
  let connection = null;
  let timer = 0;

  const connect = async () => {
    clearTimeout(timer);
    connection?.abort();
    const mine = (connection = new AbortController());
    try {
      const response = await call("debug/engine/stream", { signal: mine.signal });
      for await (const data of events(response)) {
        if (mine !== connection) return;
        onState("live");
        onUpdate(JSON.parse(data));
      }
      throw new Error("The server has ended the connection.");
    } catch (error) {
      if (mine !== connection || error.name === "AbortError") return;
      onState(error.status === 401 ? "locked" : "lost", error.message);
      if (error.status !== 401) timer = setTimeout(connect, RETRY_MS);
    }
  };

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) return connect();
    clearTimeout(timer);
    connection?.abort();
    connection = null;
    onState("paused");
  });
  if (!document.hidden) connect();
  return connect;
}
