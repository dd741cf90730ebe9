// The batch of the newest step as a strip, to scale with its bucket, and those before it as columns.

import { colours, prepare } from "./canvas.js";

const KINDS = ["decode", "draft", "prefill", "padding"];
const NUM_COLUMNS = 96;

export class StepChart {
  #steps = [];
  #strip;
  #history;

  constructor(strip, history) {
    this.#strip = strip;
    this.#history = history;
  }

  /** The newest of all steps, or null. */
  get newest() {
    return this.#steps.at(-1) ?? null;
  }

  add(steps) {
    if (!steps.length) return;
    this.#steps = [...this.#steps, ...steps].slice(-NUM_COLUMNS);
    this.#drawStrip();
    this.draw();
  }

  #drawStrip() {
    const step = this.newest;
    const parts = KINDS.flatMap((kind) => (kind === "prefill" ? step.prefill : [step[kind]]).map((n) => [kind, n]));
    this.#strip.replaceChildren(
      ...parts
        .filter(([, tokens]) => tokens > 0)
        .map(([kind, tokens]) => {
          const part = document.createElement("i");
          part.dataset.kind = kind;
          part.style.width = `${(100 * tokens) / step.bucket_tokens}%`;
          return part;
        }),
    );
    this.#strip.setAttribute("aria-label", describeStep(step));
  }

  /** The columns; as high as their buckets, the largest of those shown reaching the top. */
  draw() {
    const { context, width, height } = prepare(this.#history);
    const colour = colours(...KINDS, "line");
    const most = Math.max(1, ...this.#steps.map((step) => step.bucket_tokens));
    const wide = width / NUM_COLUMNS;
    context.fillStyle = colour.line;
    context.fillRect(0, height - 1, width, 1);
    this.#steps.forEach((step, index) => {
      const left = width - (this.#steps.length - index) * wide;
      let bottom = height - 1;
      for (const kind of KINDS) {
        const tall = (tokensOf(step, kind) / most) * (height - 2);
        context.fillStyle = colour[kind];
        context.fillRect(left, bottom - tall, Math.max(1, wide - 1), tall);
        bottom -= tall;
      }
    });
  }
}

/** Tokens of one kind in a step. */
export function tokensOf(step, kind) {
  return kind === "prefill" ? step.prefill.reduce((sum, tokens) => sum + tokens, 0) : step[kind];
}

/** A step in words. */
export function describeStep(step) {
  const parts = KINDS.filter((kind) => tokensOf(step, kind)).map((kind) => `${tokensOf(step, kind)} ${kind}`);
  return `step ${step.step_id + 1}: ${step.bucket_tokens} tokens, of which ${parts.join(", ")}`;
}
