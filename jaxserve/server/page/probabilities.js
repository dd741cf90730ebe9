// The tip over a token: what else could have stood there, and how likely. By pointer, or by arrow keys.

/** How loudly a token says that the model was unsure: 0 to 3. */
export function doubt(tokens) {
  if (!tokens.length) return 0;
  const least = Math.min(...tokens.map((token) => Math.exp(token.logprob)));
  return least > 0.8 ? 0 : least > 0.5 ? 1 : least > 0.2 ? 2 : 3;
}

/**
 * Shows `tip` for the tokens inside `log`; `tokensOf` says which logprob entries an element stands for.
 * Tokens of an answer are one stop of the Tab key; the arrow keys go from one to the next.
 */
export function showTips(log, tip, tokensOf) {
  const show = (element) => {
    const tokens = tokensOf(element);
    if (!tokens?.length) return hide();
    tip.replaceChildren(...tokens.map(alternatives));
    tip.hidden = false;
    place(tip, element);
    log.querySelector("[aria-describedby=tip]")?.removeAttribute("aria-describedby");
    element.setAttribute("aria-describedby", "tip");
  };
  const hide = () => {
    tip.hidden = true;
    log.querySelector("[aria-describedby=tip]")?.removeAttribute("aria-describedby");
  };
  const tokenAt = (event) => event.target.closest?.(".token");

  log.addEventListener("pointerover", (event) => (tokenAt(event) ? show(tokenAt(event)) : hide()));
  log.addEventListener("pointerleave", hide);
  log.addEventListener("focusin", (event) => (tokenAt(event) ? show(tokenAt(event)) : hide()));
  log.addEventListener("focusout", hide);
  log.closest(".scroll").addEventListener("scroll", hide, { passive: true });
  log.addEventListener("keydown", (event) => {
    const token = tokenAt(event);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!token || !step) return;
    let next = token;
    do next = step > 0 ? next.nextElementSibling : next.previousElementSibling;
    while (next && !next.classList.contains("token"));
    if (!next) return;
    event.preventDefault();
    token.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}

function alternatives(token) {
  const list = document.createElement("ol");
  const rows = [...token.top_logprobs];
  if (!rows.some((row) => sameBytes(row, token))) rows.push(token);
  list.append(...rows.map((row) => alternative(row, sameBytes(row, token))));
  return list;
}

function alternative(row, isChosen) {
  const item = document.createElement("li");
  item.className = isChosen ? "chosen" : "";
  const text = document.createElement("span");
  text.className = "text";
  text.textContent = visible(row);
  const share = document.createElement("span");
  share.className = "share";
  const probability = Math.exp(row.logprob);
  share.textContent = percent(probability);
  const bar = document.createElement("span");
  bar.className = "bar-line";
  const filled = document.createElement("i");
  filled.style.width = `${100 * probability}%`;
  bar.append(filled);
  item.append(text, share, bar);
  return item;
}

function sameBytes(one, other) {
  return one.token === other.token && String(one.bytes) === String(other.bytes);
}

/** A token's text with what can't be seen made visible; parts of characters as their bytes. */
function visible({ token, bytes }) {
  if (token.includes("\ufffd") && bytes) {
    return bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
  }
  return token.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "(nothing)";
}

function percent(probability) {
  const value = 100 * probability;
  return value >= 10 ? `${value.toFixed(0)} %` : value >= 0.1 ? `${value.toFixed(1)} %` : "< 0.1 %";
}

function place(tip, element) {
  const [box] = element.getClientRects();
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left), innerWidth - width - 8);
  const above = box.top - height - 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${above >= 8 ? above : box.bottom + 8}px`;
}
