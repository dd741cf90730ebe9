// The engine's panel: an update of the feed -> what it shows.

import { PoolMap } from "./pool.js";
import { Rates } from "./rates.js";
import { StepChart, tokensOf } from "./steps.js";

const STEP_KINDS = ["decode", "draft", "prefill", "padding"];

/** Returns a function that shows an update of `/debug/engine/stream`. */
export function startEngine(panel) {
  const at = (id) => panel.querySelector(`#${id}`);
  const set = (id, text) => {
    const element = at(id);
    if (element.textContent !== String(text)) element.textContent = text;
  };
  const chart = new StepChart(at("strip"), at("history"));
  const map = new PoolMap(at("map"));
  const rates = new Rates();

  const redraw = () => {
    chart.draw();
    map.draw();
  };
  new ResizeObserver(redraw).observe(panel);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  const showFigures = ({ time, engine }) => {
    const rate = rates.add(time, {
      output: engine.generation_tokens,
      prompt: engine.prompt_tokens - engine.cached_prompt_tokens,
      steps: engine.num_steps,
      useful: engine.useful_tokens,
      padded: engine.padded_tokens,
    });
    set("output-rate", rate ? short(rate.output) : "–");
    set("prompt-rate", rate ? short(rate.prompt) : "–");
    set("step-rate", rate ? short(rate.steps) : "–");
    set("packing", rate?.padded ? `${Math.round((100 * rate.useful) / rate.padded)} %` : "–");
    panel.dataset.idle = String(!rate?.steps);
  };

  const showSteps = ({ engine }) => {
    chart.add(engine.steps);
    const step = chart.newest;
    if (step === null) return;
    set("batch-note", `step ${step.step_id + 1} · bucket of ${step.bucket_tokens} tokens, ${step.bucket_seqs} rows`);
    for (const kind of STEP_KINDS) set(`n-${kind}`, tokensOf(step, kind));
  };

  const showPool = ({ engine: { pool } }) => {
    map.show(pool);
    const free = pool.num_blocks - pool.used - pool.shared - pool.cached;
    const held = pool.used + pool.shared;
    set("n-used", pool.used);
    set("n-shared", pool.shared);
    set("n-cached", pool.cached);
    set("n-free", free);
    const cell = pool.blocks_per_cell > 1 ? ` · a cell is ${pool.blocks_per_cell}` : "";
    set("pool-note", `${held} of ${pool.num_blocks} held${cell}`);
    at("map").setAttribute(
      "aria-label",
      `${pool.num_blocks} KV blocks: ${pool.used} used, ${pool.shared} shared, ${pool.cached} cached, ${free} free`,
    );
    showHost(pool);
  };

  const showHost = ({ host_blocks, host_used, host_pinned }) => {
    at("host").hidden = host_blocks === 0;
    if (host_blocks === 0) return;
    const swapped = Math.min(host_pinned, host_used);
    set("host-note", `host memory · ${host_used} of ${host_blocks} blocks`);
    set("n-swapped", swapped);
    set("n-host-cached", host_used - swapped);
    const strip = at("host-strip");
    strip.setAttribute("aria-label", `Host memory: ${swapped} blocks swapped out, ${host_used - swapped} cached`);
    strip.replaceChildren(
      ...[["swapped", swapped], ["host-cached", host_used - swapped]].map(([kind, blocks]) => {
        const part = document.createElement("i");
        part.dataset.kind = kind;
        part.style.width = `${(100 * blocks) / host_blocks}%`;
        return part;
      }),
    );
  };

  const showQueue = ({ engine }) => {
    const rows = Object.keys(engine.running).map((name) => {
      const row = document.createElement("tr");
      const head = document.createElement("th");
      head.scope = "row";
      head.textContent = name;
      row.append(head);
      for (const count of [engine.running[name], engine.waiting[name]]) row.insertCell().textContent = count;
      return row;
    });
    at("queue").replaceChildren(...rows);
    set("queue-note", engine.waiting_tokens ? `${engine.waiting_tokens} tokens wait to be computed` : "");
  };

  const showLatencies = ({ engine }) => {
    for (const name of ["ttft", "itl"]) {
      for (const rank of ["p50", "p90", "p99"]) {
        const seconds = engine[name][rank];
        set(`${name}-${rank}`, seconds === null ? "–" : milliseconds(seconds));
      }
    }
  };

  return (update) => {
    for (const show of [showFigures, showSteps, showPool, showQueue, showLatencies]) show(update);
  };
}

function short(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : value >= 10 ? value.toFixed(0) : value.toFixed(1);
}

function milliseconds(seconds) {
  const value = 1000 * seconds;
  return value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}
