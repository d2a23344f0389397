/** A map of cells: where each lies, and its color. Pure numbers and pixels. */

export interface HeatLayout {
  left: number;
  top: number;
  /** Of all cells together, scrolled out of sight or not. */
  width: number;
  height: number;
  rowHeight: number;
  rows: number;
  columns: number;
}

const WIDEST_CELL = 132;
const HIGHEST_ROW = 26;
const LEAST_ROW = 4;

/** Rows as high as `room` allows, within bounds: names stand beside them. */
export function layHeatMap(rows: number, columns: number, width: number, left: number, top: number, room: number): HeatLayout {
  const rowHeight = Math.max(LEAST_ROW, Math.min(HIGHEST_ROW, Math.floor(room / Math.max(1, rows))));
  const wide = Math.max(1, Math.min(width - left, columns * WIDEST_CELL));
  return { left, top, width: wide, height: rows * rowHeight, rowHeight, rows, columns };
}

/** Pixel where a column begins; those between lie on whole pixels, so that none is blurred. */
export function columnLeft({ left, width, columns }: HeatLayout, column: number): number {
  return left + Math.round((column * width) / columns);
}

export function cellAt(layout: HeatLayout, x: number, y: number): { row: number; column: number } | null {
  const column = Math.floor(((x - layout.left) / layout.width) * layout.columns);
  const row = Math.floor((y - layout.top) / layout.rowHeight);
  const inside = column >= 0 && column < layout.columns && row >= 0 && row < layout.rows;
  return inside ? { row, column } : null;
}

/** 256 colors between stops like "#1c2f6b", as 32 bits a pixel. */
export function ramp(stops: readonly string[]): Uint32Array {
  const colors = stops.map((stop) => [1, 3, 5].map((at) => parseInt(stop.slice(at, at + 2), 16)));
  return Uint32Array.from({ length: 256 }, (_, i) => {
    const place = (i / 255) * (colors.length - 1);
    const from = Math.min(Math.floor(place), colors.length - 2);
    const mixed = (part: number): number =>
      Math.round(colors[from]![part]! + (place - from) * (colors[from + 1]![part]! - colors[from]![part]!));
    return ((255 << 24) | (mixed(2) << 16) | (mixed(1) << 8) | mixed(0)) >>> 0;
  });
}

/** One pixel a cell; what is missing stays clear. */
export function cellPixels(
  rows: readonly (readonly (number | null)[])[],
  columns: number,
  [low, high]: readonly [number, number],
  colors: Uint32Array,
): Uint8ClampedArray<ArrayBuffer> {
  const pixels = new Uint32Array(rows.length * columns);
  const scale = 255 / Math.max(high - low, Number.MIN_VALUE);
  rows.forEach((row, r) => {
    for (let c = 0; c < columns; c++) {
      const value = row[c];
      if (value === null || value === undefined) continue;
      pixels[r * columns + c] = colors[Math.max(0, Math.min(255, Math.round((value - low) * scale)))]!;
    }
  });
  return new Uint8ClampedArray(pixels.buffer);
}
