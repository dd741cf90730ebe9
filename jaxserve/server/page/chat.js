// The chat: what was said so far, sending, stopping, asking again.

import { ApiError } from "./api.js";
import { ask, describe } from "./answer.js";
import { readSettings, systemMessages } from "./settings.js";
import { addPieces, addTurn, endTurn } from "./turns.js";

/**
 * Wires the chat up. `modelName()` says whom to ask; `onLocked()` is told when the server wants a key.
 */
export function startChat(page, modelName, onLocked) {
  const { log, message, send, stop, alert, again, fresh, empty, spoken, settings, composer, scroll } = page;
  let said = []; // {role, content}, without the system prompt
  let running = null; // AbortController of the answer that is coming
  let isRefused = false; // the last question was, with nothing answered: the next one takes its place

  const showState = () => {
    send.hidden = running !== null;
    stop.hidden = running === null;
    send.disabled = message.value.trim() === "";
    empty.hidden = log.querySelector(".turn") !== null;
    again.hidden = running !== null || said.length === 0;
    fresh.hidden = running !== null || empty.hidden === false;
  };

  const fitMessage = () => {
    message.style.height = "auto";
    message.style.height = `${message.scrollHeight + 2}px`;
    showState();
  };

  const isAtEnd = () => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
  const toEnd = () => (scroll.scrollTop = scroll.scrollHeight);

  const answer = async () => {
    let fields;
    try {
      fields = readSettings(settings);
    } catch (error) {
      alert.textContent = error.message;
      isRefused = true;
      return;
    }
    alert.textContent = "";
    isRefused = false;
    const turn = addTurn(log, "assistant");
    running = new AbortController();
    const mine = running;
    spoken.textContent = "Answering";
    showState();
    toEnd();
    let text = "";
    try {
      const request = { model: modelName(), messages: [...systemMessages(settings), ...said], ...fields };
      const result = await ask(request, mine.signal, (pieces, soFar) => {
        const follow = isAtEnd(); // unless the reader has scrolled up
        text = soFar;
        addPieces(turn, pieces);
        if (follow) toEnd();
      });
      said.push({ role: "assistant", content: result.text });
      endTurn(turn, describe(result));
      spoken.textContent = result.text === "" ? "The answer is empty" : result.text;
    } catch (error) {
      const isStopped = error.name === "AbortError";
      if (text !== "") said.push({ role: "assistant", content: text });
      isRefused = text === "" && !isStopped;
      if (isRefused) turn.remove();
      else endTurn(turn, isStopped ? "stopped" : error.message, !isStopped);
      if (isStopped) spoken.textContent = "Stopped";
      else alert.textContent = error.message;
      if (error instanceof ApiError && error.status === 401) onLocked();
    } finally {
      running = null;
      showState();
    }
  };

  const submit = () => {
    const content = message.value.trim();
    if (content === "" || running !== null) return;
    if (isRefused) {
      said.pop();
      log.querySelector(".turn:last-child").remove();
    }
    addTurn(log, "user").querySelector(".words").textContent = content;
    said.push({ role: "user", content });
    message.value = "";
    fitMessage();
    answer();
  };

  composer.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  message.addEventListener("input", fitMessage);
  message.addEventListener("keydown", (event) => {
    // While a character is being composed, Enter belongs to the input method.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  const halt = () => {
    if (running === null) return;
    running.abort();
    message.focus();
  };
  stop.addEventListener("click", halt);
  document.addEventListener("keydown", (event) => event.key === "Escape" && halt());
  again.addEventListener("click", () => {
    if (said.at(-1)?.role === "assistant") said.pop();
    log.querySelector(".turn:last-child[data-role=assistant]")?.remove(); // also one stopped before its first word
    answer();
  });
  fresh.addEventListener("click", () => {
    said = [];
    isRefused = false;
    log.querySelectorAll(".turn").forEach((turn) => turn.remove());
    alert.textContent = "";
    spoken.textContent = "A new chat";
    message.focus();
    showState();
  });
  showState();
}
