/** Draws the lines of a tape that are in sight: free space, blocks in their colors, pending ones hatched. */
import { ALLOCATED, FREE, type Home, PENDING, type SegmentsAnswer } from "../api/types";
import { boxes, pieceAt, segmentsBetween, type Tape } from "./tape";
import { colorVariable, diagonals, type Palette } from "./palette";
import { fitted } from "./surface";

type Context = CanvasRenderingContext2D;

export const LINE = 21;
const BAR = 17;

export interface TapePicture {
  tape: Tape;
  answer: SegmentsAnswer;
  starts: Int32Array;
  /** Pixels scrolled away above, and the height in sight. */
  top: number;
  height: number;
  by: string;
  free: string;
  unknown: string;
  heading: (home: Home) => string;
}

export function drawTape(context: Context, picture: TapePicture, palette: Palette): void {
  const { tape, answer, top, height } = picture;
  const [from, to] = [Math.floor(top / LINE), Math.ceil((top + height) / LINE)];
  drawHeadings(context, picture, from, to, palette);
  const range = segmentsBetween(tape, from, to);
  if (!range) return;
  const unknown = dense(context, picture.unknown, palette.ground);
  const fills = answer.keys.map((part, k) =>
    isUnknown(picture.by, part.key) ? unknown : palette.fill(coloredBy(picture.by), part.key, k),
  );
  const veil = striped(context, palette.ground);
  for (let segment = range[0]; segment <= range[1]; segment++) {
    context.fillStyle = picture.free;
    for (const [line, a, b] of boxes(tape, segment, 0, tape.bytes[segment]!, [from, to]))
      context.fillRect(a, line * LINE - top + 2, b - a, BAR);
    drawPieces(context, picture, segment, [from, to], fills, veil, palette);
  }
}

/** Source lines, pools and streams take the colors of series, as modules do. */
function coloredBy(by: string): string {
  return by === "category" ? "category" : "module";
}

/** Keys that stand for a want of knowledge. */
export function isUnknown(by: string, key: string): boolean {
  if (by === "category") return colorVariable("category", key, 0) === "--cat-unknown";
  return ["(no stack)", "(not known)", "(not named)"].includes(key);
}

function drawPieces(
  context: Context,
  picture: TapePicture,
  segment: number,
  [from, to]: [number, number],
  fills: (string | CanvasPattern)[],
  veil: CanvasPattern | null,
  palette: Palette,
): void {
  const { tape, answer, starts, top } = picture;
  const { pieces } = answer;
  const perLine = (tape.width / tape.extent[segment]!) * tape.bytes[segment]!;
  const skipped = Math.max(0, from - tape.line[segment]! - 1) * perLine;
  const shown = (to - tape.line[segment]! + 2) * perLine;
  const first = pieceAt(pieces, starts, segment, skipped);
  if (first < 0) return;
  for (let i = first; i < starts[segment + 1]! && pieces.offset[i]! <= shown; i++) {
    const state = pieces.state[i]!;
    if (state === FREE) continue;
    const bytes = pieces.bytes[i]!;
    for (const [line, a, b] of boxes(tape, segment, pieces.offset[i]!, bytes, [from, to])) {
      const y = line * LINE - top + 2;
      const width = Math.max(0.5, b - a - (b - a > 4 ? 1 : 0));
      context.fillStyle = fills[pieces.key[i]!] ?? palette.muted;
      context.fillRect(a, y, width, BAR);
      if (state === PENDING && veil) {
        context.fillStyle = veil;
        context.fillRect(a, y, width, BAR);
      }
    }
    if (state === ALLOCATED && pieces.count[i] === 1) drawRounding(context, picture, segment, i, [from, to], palette);
  }
}

/** What a block takes beyond its request, in a lighter tone, where a screen can show it. */
function drawRounding(
  context: Context,
  picture: TapePicture,
  segment: number,
  i: number,
  lines: readonly [number, number],
  palette: Palette,
): void {
  const { tape, answer, top } = picture;
  const { offset, bytes, requested } = answer.pieces;
  const rest = bytes[i]! - requested[i]!;
  if (rest / tape.scale < 1.5) return;
  context.globalAlpha = 0.6;
  context.fillStyle = palette.ground;
  for (const [line, a, b] of boxes(tape, segment, offset[i]! + requested[i]!, rest, lines))
    context.fillRect(a, line * LINE - top + 2, Math.max(0.5, b - a - 1), BAR);
  context.globalAlpha = 1;
}

function drawHeadings(context: Context, picture: TapePicture, from: number, to: number, palette: Palette): void {
  const { tape, answer, top } = picture;
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = palette.muted;
  context.textBaseline = "alphabetic";
  for (const { line, home } of tape.headings) {
    if (line < from || line > to) continue;
    const text = fitted(context, picture.heading(answer.homes[home]!), tape.width);
    context.fillText(text, 0, (line + 1) * LINE - top - 4);
  }
}

/** A frame around one stretch, over all its lines. */
export function drawFrame(
  context: Context,
  picture: Pick<TapePicture, "tape" | "top" | "height">,
  place: { segment: number; offset: number; bytes: number },
  colors: { line: string; halo: string },
): void {
  const lines = [Math.floor(picture.top / LINE), Math.ceil((picture.top + picture.height) / LINE)] as const;
  for (const [line, a, b] of boxes(picture.tape, place.segment, place.offset, place.bytes, lines)) {
    const [y, width] = [line * LINE - picture.top + 2, Math.max(2, b - a)];
    context.strokeStyle = colors.halo;
    context.lineWidth = 4;
    context.strokeRect(a, y, width, BAR);
    context.strokeStyle = colors.line;
    context.lineWidth = 2;
    context.strokeRect(a, y, width, BAR);
  }
}

/** The hatching of what is unknown, but without see-through: blocks must stand out from what is free. */
function dense(context: Context, color: string, ground: string): CanvasPattern | string {
  return diagonals(context, 5, color, 1, [[ground, 1], [color, 0.62]]) ?? color;
}

/** Stripes of the ground over a color: let go of, and not yet free. */
export function striped(context: Context, ground: string): CanvasPattern | null {
  return diagonals(context, 6, ground, 2);
}
