/** Draws the part of a flame graph that is in sight: the user's code warm, libraries cool, C++ grey. */
import { type Frame, ROOT, type StacksAnswer, WITHOUT } from "../api/stacks";
import { frameName, frameWhere } from "../state/frames";
import type { Flame } from "./flame";
import { toneOf } from "./flame";
import { fitted } from "./surface";

type Context = CanvasRenderingContext2D;

export const LEVEL = 21;
const BAR = 20;
export const TONES = { user: 4, library: 3, native: 2 };

export interface FlamePicture {
  answer: StacksAnswer;
  flame: Flame;
  width: number;
  /** Pixels scrolled away above, and the height in sight. */
  top: number;
  height: number;
  searching: boolean;
  hovered: number;
  /** Under the keyboard's frame; -1 for none. */
  focused: number;
}

export interface FlameColours {
  read: (name: string) => string;
  hatch: string | CanvasPattern;
}

const NAME = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

export function drawFlame(context: Context, picture: FlamePicture, colours: FlameColours): void {
  const { flame, top, height } = picture;
  const text = {
    user: colours.read("--flame-user-text"),
    library: colours.read("--flame-library-text"),
    native: colours.read("--flame-native-text"),
    muted: colours.read("--muted"),
    veil: colours.read("--card"),
    match: colours.read("--flame-match"),
    line: colours.read("--accent"),
    strong: colours.read("--text"),
  };
  context.textBaseline = "middle";
  const first = Math.max(0, Math.floor(top / LEVEL));
  const last = Math.min(flame.levels.length - 1, Math.floor((top + height) / LEVEL));
  for (let depth = first; depth <= last; depth++)
    for (const place of flame.levels[depth]!) drawNode(context, picture, place, colours, text);
}

type Inks = Record<"user" | "library" | "native" | "muted" | "veil" | "match" | "line" | "strong", string>;

function drawNode(context: Context, picture: FlamePicture, place: number, colours: FlameColours, ink: Inks): void {
  const { answer, flame, width, top } = picture;
  const { nodes, frames } = answer;
  const x = flame.left[place]! * width;
  const full = flame.right[place]! * width - x;
  const y = flame.depth[place]! * LEVEL - top;
  const w = Math.max(0.6, full - (full > 3 ? 1 : 0));
  const label = nodes.label[place]!;
  const frame = label >= 0 ? frames[label] : undefined;
  context.fillStyle = fillOf(label, frame, colours);
  context.fillRect(x, y, w, BAR);
  const dim = picture.searching && !nodes.found[place] && label !== ROOT;
  if (dim) {
    context.globalAlpha = 0.68;
    context.fillStyle = ink.veil;
    context.fillRect(x, y, w, BAR);
    context.globalAlpha = 1;
  } else if (picture.searching && nodes.found[place]) {
    context.fillStyle = ink.match;
    context.fillRect(x, y + BAR - 3, w, 3);
  }
  if (place === picture.hovered) {
    context.globalAlpha = 0.25;
    context.fillStyle = ink.veil;
    context.fillRect(x, y, w, BAR);
    context.globalAlpha = 1;
  }
  if (place === picture.focused) {
    context.strokeStyle = ink.line;
    context.lineWidth = 2;
    context.strokeRect(x + 1, y + 1, Math.max(1, w - 2), BAR - 2);
  }
  if (w < 22) return;
  if (label === WITHOUT) {
    context.font = NAME;
    context.fillStyle = ink.veil;
    context.fillRect(x + 4, y + 3, Math.min(w - 8, context.measureText("no stack was recorded").width + 8), BAR - 6);
  }
  const tone = label === ROOT || label === WITHOUT ? ink.strong : ink[frame?.kind ?? "native"];
  drawLabel(context, x + (label === WITHOUT ? 8 : 5), y + BAR / 2 + 0.5, w - (label === WITHOUT ? 14 : 9), dim ? ink.muted : tone, wordsOf(picture, place, label, frame));
}

interface Words {
  name: string;
  more: string;
  strong: boolean;
}

function wordsOf({ answer }: FlamePicture, place: number, label: number, frame: Frame | undefined): Words {
  if (label === ROOT) return { name: "all allocations", more: "", strong: true };
  if (label === WITHOUT || !frame) return { name: "no stack was recorded", more: "", strong: false };
  const others = answer.nodes.run[place]!.length - 1;
  return {
    name: frameName(frame),
    more: `${frameWhere(frame)}${others > 0 ? `  +${others}` : ""}`,
    strong: frame.kind === "user",
  };
}

function drawLabel(context: Context, x: number, y: number, width: number, colour: string, words: Words): void {
  context.fillStyle = colour;
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

function fillOf(label: number, frame: Frame | undefined, { read, hatch }: FlameColours): string | CanvasPattern {
  if (label === ROOT) return read("--flame-root");
  if (label === WITHOUT || !frame) return hatch;
  return read(`--flame-${frame.kind}-${toneOf(frame.file, TONES[frame.kind])}`);
}
