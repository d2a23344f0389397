/**
 * Bands of single allocations, stacked: which pixel belongs to which. Pure numbers, no canvas.
 * A band that was born later lies above; when one goes, those above it sink. The rest lies on top of all, by its keys.
 */
import type { BandsAnswer } from "../api/types";

export const NOTHING = -1;

export interface Owners {
  width: number;
  height: number;
  /** Bytes that the whole height stands for. */
  top: number;
  /** Of each pixel, row by row from the top: the place of a band; of the rest the number of bands plus its key; or NOTHING. */
  of: Int32Array;
}

/** A pixel belongs to what lies at its middle, so no band is drawn larger than it is by more than half a pixel. */
export function ownersOf(answer: BandsAnswer, height: number, top: number): Owners {
  const { bands, px: width, parts } = answer;
  const count = bands.row.length;
  const owners: Owners = { width, height, top, of: new Int32Array(width * height).fill(NOTHING) };
  let alive: number[] = [];
  let firstEnd = Infinity; // the last column of the alive band that ends first
  let next = 0;
  for (let column = 0; column < width; column++) {
    if (firstEnd < column) {
      alive = alive.filter((band) => bands.last[band]! >= column);
      firstEnd = alive.reduce((end, band) => Math.min(end, bands.last[band]!), Infinity);
    }
    // In order of birth, so the columns in which bands begin never decrease.
    while (next < count && bands.first[next]! <= column) {
      const end = bands.last[next]!;
      if (end >= column) {
        alive.push(next);
        firstEnd = Math.min(firstEnd, end);
      }
      next += 1;
    }
    let bytes = 0;
    let row = 0; // from the bottom
    for (const band of alive) {
      bytes += bands.bytes[band]!;
      row = fill(owners, column, row, bytes, band);
    }
    parts?.forEach((part, key) => {
      if (part[column] === 0) return;
      bytes += part[column]!;
      row = fill(owners, column, row, bytes, count + key);
    });
  }
  return owners;
}

/** Gives the rows from `row` up to the bytes to a band; the first row that is free then. */
function fill({ width, height, top, of }: Owners, column: number, row: number, bytes: number, band: number): number {
  const end = Math.min(height, Math.round((bytes / top) * height));
  for (let r = row; r < end; r++) of[(height - 1 - r) * width + column] = band;
  return Math.max(row, end);
}

/** Who owns the pixel at a share of the width and of the height, from the left and the top. */
export function ownerAt({ width, height, of }: Owners, across: number, down: number): number {
  const column = Math.floor(across * width);
  const row = Math.floor(down * height);
  if (column < 0 || column >= width || row < 0 || row >= height) return NOTHING;
  return of[row * width + column]!;
}

/** Whether a pixel lies at the upper or left edge of a band that is thick enough to have edges. */
export function isEdge({ width, of }: Owners, at: number, column: number): boolean {
  const owner = of[at];
  if (at >= width && of[at - width] !== owner && of[at + 2 * width] === owner) return true;
  return column > 0 && of[at - 1] !== owner && of[at + 2] === owner && of[at + 2 - width] === owner;
}

/** How many of the largest bands at a column it takes to make up half of it; null where they do not. */
export function halfOf(answer: BandsAnswer, column: number): { count: number; bytes: number } | null {
  const { bands } = answer;
  const sizes = bands.bytes
    .filter((_, band) => bands.first[band]! <= column && bands.last[band]! >= column)
    .sort((a, b) => b - a);
  const half = answer.max[column]! / 2;
  let bytes = 0;
  for (let i = 0; i < sizes.length; i++) {
    bytes += sizes[i]!;
    if (bytes >= half) return { count: i + 1, bytes };
  }
  return null;
}
