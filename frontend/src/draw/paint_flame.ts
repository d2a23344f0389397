/** Draws the part of a flame graph that is in sight. What its bars look like is for others to say. */
import type { Flame } from "./flame";
import { fitted } from "./surface";

type Context = CanvasRenderingContext2D;
type Fill = string | CanvasPattern;

const SPLIT = 5;
const NARROWEST = 0.6;
/** Too narrow to show how it is split. */
const WHOLE = 3;

export interface FlamePicture {
  flame: Flame;
  /** Pixels from one level to the next. */
  level: number;
  width: number;
  /** Pixels scrolled away above, and the height in sight. */
  top: number;
  height: number;
  hovered: number;
  /** Under the keyboard's frame; -1 for none. */
  focused: number;
}

/** The stylesheet's colors by the names of its variables, and the categories', of which one is hatched. */
export interface Paints {
  read: (variable: string) => string;
  category: (key: string) => Fill;
}

export interface Bar {
  fill: Fill;
  /** How strongly it is filled; the rest is the ground. */
  tint?: number;
  /** Along its lower edge: colors, and the shares that they have of it. */
  split?: [Fill, number][];
  name: string;
  more: string;
  strong: boolean;
  ink: string;
  /** Set where a search is on: whether it finds this. */
  found: boolean | undefined;
  /** Words on a hatched ground need a plate. */
  plate?: boolean;
}

const NAME = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

export function drawFlame(context: Context, picture: FlamePicture, look: (place: number) => Bar, paints: Paints): void {
  const { flame, level, top, height } = picture;
  context.textBaseline = "middle";
  const first = Math.max(0, Math.floor(top / level));
  const last = Math.min(flame.levels.length - 1, Math.floor((top + height) / level));
  for (let depth = first; depth <= last; depth++) {
    let drawn = -1; // how far this level is drawn: of ten thousand bars, most share a pixel with others
    for (const place of flame.levels[depth]!) {
      const right = flame.right[place]! * picture.width;
      const bar = look(place);
      if (right - drawn < NARROWEST && !bar.found && place !== picture.hovered && place !== picture.focused) continue;
      drawNode(context, picture, place, bar, paints);
      drawn = right;
    }
  }
}

function drawNode(context: Context, picture: FlamePicture, place: number, bar: Bar, { read }: Paints): void {
  const { flame, level, width, top } = picture;
  const height = level - 1;
  const x = flame.left[place]! * width;
  const full = flame.right[place]! * width - x;
  const y = flame.depth[place]! * level - top;
  const w = Math.max(NARROWEST, full - (full > 3 ? 1 : 0));
  fill(context, bar.fill, x, y, w, height, bar.tint);
  if (bar.split) drawSplit(context, w < WHOLE ? [[bar.fill, 1]] : bar.split, x, y + height - SPLIT, w);
  const dim = bar.found === false;
  if (dim) fill(context, read("--card"), x, y, w, height, 0.68);
  else if (bar.found) fill(context, read("--flame-match"), x, bar.split ? y : y + height - 3, w, 3);
  if (place === picture.hovered) fill(context, read("--card"), x, y, w, height, 0.25);
  if (place === picture.focused) {
    context.strokeStyle = read("--accent");
    context.lineWidth = 2;
    context.strokeRect(x + 1, y + 1, Math.max(1, w - 2), height - 2);
  }
  if (w < 22) return;
  if (bar.plate) {
    context.font = NAME;
    fill(context, read("--card"), x + 4, y + 3, Math.min(w - 8, context.measureText(bar.name).width + 8), height - 6);
  }
  const middle = y + (height - (bar.split ? SPLIT - 1 : 0)) / 2 + 0.5;
  drawLabel(context, x + (bar.plate ? 8 : 5), middle, w - (bar.plate ? 14 : 9), dim ? read("--muted") : bar.ink, bar);
}

function fill(context: Context, color: Fill, x: number, y: number, width: number, height: number, tint = 1): void {
  context.globalAlpha = tint;
  context.fillStyle = color;
  context.fillRect(x, y, width, height);
  context.globalAlpha = 1;
}

function drawSplit(context: Context, split: [Fill, number][], x: number, y: number, width: number): void {
  let from = 0;
  for (const [color, share] of split) {
    fill(context, color, x + from * width, y, share * width, SPLIT);
    from += share;
  }
}

function drawLabel(context: Context, x: number, y: number, width: number, color: string, words: Bar): void {
  context.fillStyle = color;
  context.font = words.strong ? `600 ${NAME}` : NAME;
  const name = fitted(context, words.name, width);
  context.fillText(name, x, y);
  const used = context.measureText(name).width;
  if (name !== words.name || words.more === "" || width - used < 40) return;
  context.font = NAME.replace("12px", "11px");
  context.globalAlpha = 0.75;
  context.fillText(fitted(context, words.more, width - used - 8), x + used + 8, y);
  context.globalAlpha = 1;
}
