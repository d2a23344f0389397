/** A canvas that fits its box and its screen: drawn when either changes, never at size 0. */

export interface Size {
  width: number;
  height: number;
}

const SHARPEST = 2;

export function sharpness(): number {
  return Math.min(SHARPEST, window.devicePixelRatio || 1);
}

/** Sets the canvas to a CSS size and hands out a context in CSS pixels; null where there is nothing to draw on. */
export function prepare(canvas: HTMLCanvasElement, size: Size): CanvasRenderingContext2D | null {
  if (size.width < 1 || size.height < 1) return null;
  const ratio = sharpness();
  const width = Math.round(size.width * ratio);
  const height = Math.round(size.height * ratio);
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  canvas.style.width = `${size.width}px`;
  canvas.style.height = `${size.height}px`;
  const context = canvas.getContext("2d");
  context?.setTransform(ratio, 0, 0, ratio, 0, 0);
  context?.clearRect(0, 0, size.width, size.height);
  return context;
}

/** Watches an element's width; tells nothing while the tab is hidden (width 0). */
export function watchWidth(element: HTMLElement, callback: (width: number) => void): () => void {
  const observer = new ResizeObserver((entries) => {
    const width = Math.floor(entries.at(-1)?.contentRect.width ?? 0);
    if (width > 0) callback(width);
  });
  observer.observe(element);
  return () => observer.disconnect();
}

/** Text that fits: whole, or its start with a mark, or nothing. */
export function fitted(context: Pick<CanvasRenderingContext2D, "measureText">, text: string, width: number): string {
  if (width < 14) return "";
  if (context.measureText(text).width <= width) return text;
  const each = Math.max(1, context.measureText(text).width / text.length);
  let keep = Math.floor(width / each) - 1;
  while (keep > 1 && context.measureText(`${text.slice(0, keep)}…`).width > width) keep--;
  return keep > 1 ? `${text.slice(0, keep)}…` : "";
}
