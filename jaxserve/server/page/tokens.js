// Which part of an answer's text each token made.

/**
 * Cuts an answer, as it arrives, into pieces `{text, tokens}`: `tokens` are the logprob entries that made it, several
 * where only together they are whole characters, none where nothing is known.
 * The text is what counts: an entry whose text does not appear (a special token, a stop string) makes no piece.
 */
export class TokenText {
  #decoder = new TextDecoder();
  #text = ""; // arrived, in no piece yet
  #queue = []; // pieces whose text has not arrived
  #open = []; // entries of a character that is not whole

  /** The pieces that are whole after `text` and `entries` have arrived. */
  add(text, entries) {
    this.#text += text;
    for (const entry of entries ?? []) {
      this.#open.push(entry);
      const made = this.#decoder.decode(new Uint8Array(entry.bytes ?? []), { stream: true });
      if (made !== "") {
        this.#queue.push({ text: made, tokens: this.#open });
        this.#open = [];
      }
    }
    const pieces = [];
    while (this.#text !== "" && this.#queue.length) {
      const [first] = this.#queue;
      const at = this.#text.indexOf(first.text);
      if (at < 0 && first.text.startsWith(this.#text)) break; // the rest of it is still to come
      this.#queue.shift();
      if (at < 0) continue;
      if (at > 0) pieces.push({ text: this.#text.slice(0, at), tokens: [] }); // not as its own token said
      pieces.push(first);
      this.#text = this.#text.slice(at + first.text.length);
    }
    // Text that no entry waits for: nothing is known of it.
    if (!this.#queue.length && !this.#open.length) pieces.push(...this.end());
    return pieces;
  }

  /** What is left, when nothing more comes. */
  end() {
    const text = this.#text;
    this.#text = "";
    return text === "" ? [] : [{ text, tokens: [] }];
  }
}
