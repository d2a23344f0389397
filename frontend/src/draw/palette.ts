/** Colours for canvases, read from the stylesheet, so that a category has one colour everywhere. */
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

/** Told apart with every kind of colour blindness; a curve has 11 of them and the others. */
export const SERIES_COLOURS = 12;

/** The CSS variable that holds a key's colour. */
export function colourVariable(by: string, key: string, index: number): string {
  if (by === "category") return (CATEGORIES as readonly string[]).includes(key) ? `--cat-${key}` : "--cat-unknown";
  if (by === "phase")
    return ["forward", "backward", "optimizer", "before"].includes(key) ? `--phase-${key}` : "--phase-other";
  if (key === "(other modules)" || key === "(others)") return "--series-other";
  if (key === "unknown" || key === "(no stack)") return "--cat-unknown";
  return `--series-${index % SERIES_COLOURS}`;
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
      const name = colourVariable(by, key, index);
      return name === "--cat-unknown" ? hatch : read(name);
    },
    phase: (phase) => read(colourVariable("phase", phase ?? "other", 0).replace("--phase", "--lane")),
    call: (index) => read(index % 2 === 0 ? "--call-even" : "--call-odd"),
  };
}

/** Diagonal lines on the ground: what is unknown must not look like a category of its own. */
function hatched(context: CanvasRenderingContext2D, line: string, ground: string): CanvasPattern | string {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const ink = tile.getContext("2d");
  if (!ink) return line;
  ink.fillStyle = ground;
  ink.fillRect(0, 0, 8, 8);
  ink.strokeStyle = line;
  ink.lineWidth = 2;
  for (const offset of [-8, 0, 8]) {
    ink.moveTo(offset - 2, 10);
    ink.lineTo(offset + 10, -2);
  }
  ink.stroke();
  return context.createPattern(tile, "repeat") ?? line;
}
