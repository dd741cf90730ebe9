// What drawing on a canvas needs: sharp lines on any screen, and the colours of the style sheet.

/** The 2D context of a canvas, cleared, in CSS pixels; and its width and height in these. */
export function prepare(canvas, height) {
  const width = canvas.clientWidth;
  if (height !== undefined) canvas.style.height = `${height}px`;
  const tall = height ?? canvas.clientHeight;
  const ratio = devicePixelRatio;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(tall * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(tall * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, tall);
  return { context, width, height: tall };
}

/** The values of custom properties, by their names without the dashes. */
export function colours(...names) {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}
