/**
 * Segments as a tape that wraps like text: one after the other from the left, as wide as they have bytes, broken at the
 * end of a line. Pure numbers, no canvas. A line may hold many small segments, and a segment may fill many lines.
 */
import type { Pieces } from "../api/types";
import { bisect } from "./bisect";

export interface Tape {
  /** Bytes of a pixel. */
  scale: number;
  width: number;
  /** Of each segment: the line where it begins, the pixel there, and its width in pixels over all its lines. */
  line: Int32Array;
  left: Float64Array;
  extent: Float64Array;
  bytes: readonly number[];
  /** Lines that hold a heading instead of segments, and of which home it tells. */
  headings: { line: number; home: number }[];
  lines: number;
}

export const GAP = 2;
const LEAST = 2;

/** Places the segments. Where `homes` are given, each run of one home begins on a line of its own under a heading. */
export function layTape(bytes: readonly number[], homes: readonly number[] | null, scale: number, width: number): Tape {
  const count = bytes.length;
  const tape: Tape = {
    scale,
    width,
    line: new Int32Array(count),
    left: new Float64Array(count),
    extent: new Float64Array(count),
    bytes,
    headings: [],
    lines: 0,
  };
  let line = 0;
  let x = 0;
  for (let i = 0; i < count; i++) {
    if (homes && (i === 0 || homes[i] !== homes[i - 1])) {
      if (i > 0) line += 1;
      tape.headings.push({ line, home: homes[i]! });
      line += 1;
      x = 0;
    }
    const extent = Math.max(LEAST, bytes[i]! / scale);
    if (x > 0 && x + Math.min(extent, width) > width) {
      line += 1;
      x = 0;
    }
    tape.line[i] = line;
    tape.left[i] = x;
    tape.extent[i] = extent;
    const further = Math.max(0, Math.ceil(extent / width - 1e-9) - 1);
    line += further;
    x += extent - further * width + GAP;
  }
  tape.lines = count === 0 ? 0 : line + 1;
  return tape;
}

export function lastLine(tape: Tape, segment: number): number {
  const further = Math.ceil((tape.left[segment]! + tape.extent[segment]!) / tape.width - 1e-9) - 1;
  return tape.line[segment]! + Math.max(0, further);
}

/** The segments that reach into the lines [from, to]: first and last, or null where there are none. */
export function segmentsBetween(tape: Tape, from: number, to: number): [number, number] | null {
  const count = tape.line.length;
  const first = bisect(count, (i) => lastLine(tape, i) >= from);
  const last = bisect(count, (i) => tape.line[i]! > to) - 1;
  return first <= last ? [first, last] : null;
}

/** Where a stretch of a segment lies within some lines: one box a line, in pixels of that line. */
export function boxes(
  tape: Tape,
  segment: number,
  offset: number,
  bytes: number,
  [first, last]: readonly [number, number] = [0, Infinity],
): [number, number, number][] {
  const whole = tape.bytes[segment]!;
  const extent = tape.extent[segment]!;
  const start = tape.left[segment]! + (whole > 0 ? (offset / whole) * extent : 0);
  const end = tape.left[segment]! + (whole > 0 ? ((offset + bytes) / whole) * extent : 0);
  const found: [number, number, number][] = [];
  const line = tape.line[segment]!;
  const until = Math.min(last - line, Math.ceil(end / tape.width));
  for (let k = Math.max(first - line, Math.floor(start / tape.width)); k <= until; k++) {
    const from = Math.max(start - k * tape.width, 0);
    const to = Math.min(end - k * tape.width, tape.width);
    if (to > from) found.push([line + k, from, to]);
  }
  return found;
}

/** The segment under a place, and the byte of it. */
export function segmentAt(tape: Tape, line: number, x: number): { segment: number; offset: number } | null {
  const after = bisect(tape.line.length, (i) => tape.line[i]! > line || (tape.line[i] === line && tape.left[i]! > x));
  const segment = after - 1;
  if (segment < 0) return null;
  const along = x + (line - tape.line[segment]!) * tape.width - tape.left[segment]!;
  const extent = tape.extent[segment]!;
  if (along < 0 || along > extent + GAP) return null;
  return { segment, offset: Math.min(along / extent, 1 - 1e-9) * tape.bytes[segment]! };
}

/** Where each segment's pieces begin; those of segment s are [starts[s], starts[s + 1]). */
export function pieceStarts(pieces: Pieces, segments: number): Int32Array {
  const starts = new Int32Array(segments + 1);
  for (const segment of pieces.segment) starts[segment + 1]! += 1;
  for (let i = 0; i < segments; i++) starts[i + 1]! += starts[i]!;
  return starts;
}

/** The piece that holds a byte of a segment; -1 where its pieces are not there. */
export function pieceAt(pieces: Pieces, starts: Int32Array, segment: number, offset: number): number {
  const [first, end] = [starts[segment] ?? 0, starts[segment + 1] ?? 0];
  return first === end ? -1 : first + Math.max(0, bisect(end - first, (i) => pieces.offset[first + i]! > offset) - 1);
}
