/** Colors for canvases, read from the stylesheet, so that a category has one color everywhere. */
import { CATEGORIES } from "../state/categories";

export interface Palette {
  text: string;
  muted: string;
  rule: string;
  ground: string;
  accent: string;
  peak: string;
  outline: string;
  reserved: string;
  lane: string;
  laneText: string;
  fill: (by: string, key: string, index: number) => string | CanvasPattern;
  phase: (phase: string | null) => string;
  call: (index: number) => string;
}

/** Chosen to differ under every kind of color blindness. A curve uses 11, and one color for all other keys. */
const SERIES_COLORS = 12;

/** The CSS variable that holds a key's color. */
export function colorVariable(by: string, key: string, index: number): string {
  if (by === "category") return (CATEGORIES as readonly string[]).includes(key) ? `--cat-${key}` : "--cat-unknown";
  if (by === "phase")
    return ["forward", "backward", "optimizer", "before"].includes(key) ? `--phase-${key}` : "--phase-other";
  if (key === "(other modules)" || key === "(others)") return "--series-other";
  if (key === "unknown" || key === "(no stack)") return "--cat-unknown";
  return `--series-${index % SERIES_COLORS}`;
}

export function readPalette(element: HTMLElement, context: CanvasRenderingContext2D): Palette {
  const style = getComputedStyle(element);
  const read = (name: string): string => style.getPropertyValue(name).trim() || "#888";
  const hatch = hatched(context, read("--cat-unknown"), read("--card"));
  return {
    text: read("--text"),
    muted: read("--muted"),
    rule: read("--rule"),
    ground: read("--card"),
    accent: read("--accent"),
    peak: read("--peak"),
    outline: read("--outline"),
    reserved: read("--reserved"),
    lane: read("--lane"),
    laneText: read("--lane-text"),
    fill: (by, key, index) => {
      const name = colorVariable(by, key, index);
      return name === "--cat-unknown" ? hatch : read(name);
    },
    phase: (phase) => read(colorVariable("phase", phase ?? "other", 0).replace("--phase", "--lane")),
    call: (index) => read(index % 2 === 0 ? "--call-even" : "--call-odd"),
  };
}

/** Diagonal lines on the ground: what is unknown must not look like a category of its own. */
function hatched(context: CanvasRenderingContext2D, line: string, ground: string): CanvasPattern | string {
  return diagonals(context, 8, line, 2, [[ground, 1]]) ?? line;
}

/** By what was drawn: each tile is a canvas of its own, too much to make in every frame. */
const patterns = new Map<string, CanvasPattern>();

/** Lines from corner to corner of a tile that repeats, over fills of these colors and opacities. */
export function diagonals(
  context: CanvasRenderingContext2D,
  size: number,
  line: string,
  width: number,
  fills: [color: string, opacity: number][] = [],
): CanvasPattern | null {
  const key = JSON.stringify([size, line, width, fills]);
  const known = patterns.get(key);
  if (known) return known;
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const ink = tile.getContext("2d");
  if (!ink) return null;
  for (const [color, opacity] of fills) {
    ink.fillStyle = color;
    ink.globalAlpha = opacity;
    ink.fillRect(0, 0, size, size);
  }
  ink.globalAlpha = 1;
  ink.strokeStyle = line;
  ink.lineWidth = width;
  for (const offset of [-size, 0, size]) {
    ink.moveTo(offset - 2, size + 2);
    ink.lineTo(offset + size + 2, -2);
  }
  ink.stroke();
  const pattern = context.createPattern(tile, "repeat");
  if (pattern) patterns.set(key, pattern);
  return pattern;
}
