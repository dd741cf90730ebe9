// The conversation on the screen: a turn each for what was asked and what was answered. Text goes in as text only.

import { doubt } from "./probabilities.js";

const tokensByElement = new WeakMap();

/** The logprob entries of a token's element. */
export function tokensOf(element) {
  return tokensByElement.get(element);
}

/** An empty turn at the end of `log`; `role` is "user" or "assistant". */
export function addTurn(log, role) {
  const element = document.createElement("article");
  element.className = "turn";
  element.dataset.role = role;
  element.setAttribute("aria-label", role === "user" ? "You" : "Answer");
  const words = document.createElement("div");
  words.className = "words";
  words.dir = "auto";
  element.append(words);
  if (role === "assistant") {
    element.setAttribute("aria-busy", "true");
    const meta = document.createElement("p");
    meta.className = "meta";
    element.append(meta);
  }
  log.append(element);
  return element;
}

/** Adds pieces of `TokenText` to a turn. */
export function addPieces(turn, pieces) {
  const words = turn.querySelector(".words");
  for (const { text, tokens } of pieces) {
    if (!tokens.length) {
      words.append(text);
      continue;
    }
    const element = document.createElement("span");
    element.className = "token";
    element.textContent = text;
    element.dataset.doubt = doubt(tokens);
    element.tabIndex = words.querySelector(".token") ? -1 : 0;
    tokensByElement.set(element, tokens);
    words.append(element);
  }
}

/** Nothing more comes; `note` says how it was. */
export function endTurn(turn, note, isError = false) {
  turn.setAttribute("aria-busy", "false");
  setNote(turn, note);
  turn.querySelector(".meta").classList.toggle("error", isError);
}

export function setNote(turn, note) {
  turn.querySelector(".meta").textContent = note;
}
