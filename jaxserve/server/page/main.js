// Puts the page together: model, key, chat, engine.

import { call, forgetKey, keepKey } from "./api.js";
import { startChat } from "./chat.js";
import { startEngine } from "./engine.js";
import { watch } from "./feed.js";
import { showTips } from "./probabilities.js";
import { tokensOf } from "./turns.js";

const at = (id) => document.getElementById(id);
const model = at("model");
const LINK_TEXT = { live: "live", lost: "not connected", paused: "paused", locked: "needs a key" };

function setLink(state) {
  const link = at("link");
  link.dataset.state = state;
  if (link.textContent !== LINK_TEXT[state]) link.textContent = LINK_TEXT[state];
  link.title = LINK_TEXT[state];
}

function lock(isLocked, reason = "") {
  const wasLocked = !at("key-form").hidden;
  at("key-form").hidden = !isLocked;
  at("foot").hidden = isLocked;
  at("scroll").hidden = isLocked;
  at("key-error").textContent = reason;
  if (isLocked) at("key").focus();
  else if (wasLocked) at("message").focus();
}

/** Fills in the models; asks for a key where one is wanted. Tries again while the server can't be reached. */
async function connect() {
  let models;
  try {
    models = (await (await call("v1/models")).json()).data;
  } catch (error) {
    if (error.status === 401) {
      const isWrong = at("key").value !== "";
      forgetKey();
      lock(true, isWrong ? "The server does not know this key." : "");
    } else {
      setTimeout(connect, 2000);
    }
    return false;
  }
  model.replaceChildren(...models.map(({ id }) => new Option(id, id)));
  model.disabled = models.length < 2;
  at("key").value = "";
  lock(false);
  return true;
}

const showUpdate = startEngine(at("engine"));
const watchAgain = watch(showUpdate, (state) => {
  setLink(state);
  if (state === "locked" && at("key-form").hidden) connect(); // a server that wants one has taken the place of another
});

at("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  keepKey(at("key").value);
  if (!(await connect())) return;
  at("alert").textContent = ""; // where it said that a key is missing
  watchAgain();
});

for (const button of document.querySelectorAll("[data-shows]")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.shows;
    for (const other of document.querySelectorAll("[data-shows]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
  });
}

startChat(
  {
    log: at("log"),
    scroll: at("scroll"),
    empty: at("empty"),
    message: at("message"),
    composer: at("composer"),
    send: at("send"),
    stop: at("stop-button"),
    again: at("again"),
    fresh: at("new-chat"),
    settings: at("settings"),
    alert: at("alert"),
    spoken: at("spoken"),
  },
  () => model.value,
  connect,
);
showTips(at("log"), at("tip"), tokensOf);
connect().then((isOpen) => isOpen && at("message").focus());
