// The map of KV blocks: a cell is a block, or several neighbours in a large pool, and is filled by what they are for.

import { colours, prepare } from "./canvas.js";

const KINDS = ["used", "shared", "cached"];
const GAP = 1;

export class PoolMap {
  #canvas;
  #pool = null;

  constructor(canvas) {
    this.#canvas = canvas;
  }

  show(pool) {
    this.#pool = pool;
    this.draw();
  }

  draw() {
    const pool = this.#pool;
    if (pool === null || !this.#canvas.clientWidth) return;
    const count = pool.used_cells.length;
    const columns = columnsFor(count);
    const size = (this.#canvas.clientWidth + GAP) / columns;
    const rows = Math.ceil(count / columns);
    const { context } = prepare(this.#canvas, Math.ceil(rows * size));
    const colour = colours(...KINDS, "free");
    for (let cell = 0; cell < count; cell++) {
      const inCell = Math.min(pool.blocks_per_cell, pool.num_blocks - cell * pool.blocks_per_cell);
      const left = (cell % columns) * size;
      const top = Math.floor(cell / columns) * size;
      const side = size - GAP;
      context.fillStyle = colour.free;
      context.fillRect(left, top, side, side);
      let bottom = top + side;
      for (const kind of KINDS) {
        const tall = (pool[`${kind}_cells`][cell] / inCell) * side;
        context.fillStyle = colour[kind];
        context.fillRect(left, bottom - tall, side, tall);
        bottom -= tall;
      }
    }
  }
}

/** Cells in a row: few large ones for a small pool, at most 64. */
function columnsFor(count) {
  return Math.min(64, Math.max(16, Math.ceil(Math.sqrt(count * 2.5))));
}
