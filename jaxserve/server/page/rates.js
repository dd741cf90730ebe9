// How fast counters grow: over the last few seconds, by the server's own clock.

const WINDOW_SECONDS = 3;

export class Rates {
  #seen = []; // {time, counters}, the oldest first

  /** Growth a second of every counter; null at first. A counter that shrinks belongs to a new server. */
  add(time, counters) {
    const last = this.#seen.at(-1);
    if (last && (time < last.time || Object.keys(counters).some((name) => counters[name] < last.counters[name]))) {
      this.#seen = [];
    }
    this.#seen.push({ time, counters });
    while (this.#seen.length > 2 && this.#seen[1].time <= time - WINDOW_SECONDS) this.#seen.shift();
    const [first] = this.#seen;
    const seconds = time - first.time;
    if (seconds <= 0) return null;
    return Object.fromEntries(
      Object.entries(counters).map(([name, value]) => [name, (value - first.counters[name]) / seconds]),
    );
  }
}
