/** Colors the pixels of bands, and frames those that are pointed at. */
import type { BandsAnswer } from "../api/types";
import { isEdge, NOTHING, type Owners } from "./bands";

export type Rgb = readonly [number, number, number];

export interface BandColors {
  /** Of each key; null is drawn hatched: unknown. */
  keys: (Rgb | null)[];
  unknown: Rgb;
  ground: Rgb;
  edge: Rgb;
}

/** Bands of one key alternate between three tones, so that neighbors can be told apart where they are thick enough. */
const TONES = [0, 0.1, 0.2];
const THIN = 2;
const EDGE = 0.28;
/** Many small ones together are paler, and ruled like a pile of thin sheets. */
const PILE = 0.38;
const SHEET = 0.62;
const SHEETS_APART = 4;

export function paintOwners(owners: Owners, answer: BandsAnswer, colors: BandColors): ImageData {
  const image = new ImageData(owners.width, owners.height);
  const pixels = new Uint32Array(image.data.buffer);
  const count = answer.bands.row.length;
  const fills = answer.bands.key.map((key, band) => {
    const thin = (answer.bands.bytes[band]! / owners.top) * owners.height < THIN;
    const tone = thin ? TONES[1]! : TONES[band % TONES.length]!;
    return packed(mixed(colors.keys[key] ?? colors.unknown, colors.ground, tone));
  });
  const edges = answer.bands.key.map((key) => packed(mixed(colors.keys[key] ?? colors.unknown, colors.edge, EDGE)));
  const hatched = answer.bands.key.map((key) => (colors.keys[key] ?? null) === null);
  const ground = packed(colors.ground);
  const piles = colors.keys.map((key) => packed(mixed(key ?? colors.unknown, colors.ground, PILE)));
  const sheets = colors.keys.map((key) => packed(mixed(key ?? colors.unknown, colors.ground, SHEET)));
  let at = 0;
  for (let row = 0; row < owners.height; row++) {
    for (let column = 0; column < owners.width; column++, at++) {
      const owner = owners.of[at]!;
      if (owner === NOTHING) continue;
      if (owner >= count) {
        const hatch = colors.keys[owner - count] === null && (column + row) % 7 > 2;
        pixels[at] = hatch ? ground : (row % SHEETS_APART === 0 ? sheets : piles)[owner - count]!;
      } else if (isEdge(owners, at, column)) pixels[at] = edges[owner]!;
      else if (hatched[owner] && (column + row) % 7 > 2) pixels[at] = ground;
      else pixels[at] = fills[owner]!;
    }
  }
  return image;
}

/** One band alone, in one color with its opacity (0 to 255). */
export function paintOne(owners: Owners, band: number, [r, g, b]: Rgb, opacity: number): ImageData {
  const image = new ImageData(owners.width, owners.height);
  const pixels = new Uint32Array(image.data.buffer);
  const inner = packed([r, g, b], opacity);
  const line = packed([r, g, b], 255);
  const { width, height, of } = owners;
  for (let at = 0; at < of.length; at++) {
    if (of[at] !== band) continue;
    const x = at % width;
    const border =
      at < width ||
      at >= width * (height - 1) ||
      x === 0 ||
      x === width - 1 ||
      of[at - 1] !== band ||
      of[at + 1] !== band ||
      of[at - width] !== band ||
      of[at + width] !== band;
    pixels[at] = border ? line : inner;
  }
  return image;
}

export function mixed(a: Rgb, b: Rgb, share: number): Rgb {
  return [a[0] + (b[0] - a[0]) * share, a[1] + (b[1] - a[1]) * share, a[2] + (b[2] - a[2]) * share];
}

/** Little-endian, as canvases keep their pixels on every machine that runs a browser. */
function packed([r, g, b]: Rgb, opacity = 255): number {
  return ((opacity << 24) | (Math.round(b) << 16) | (Math.round(g) << 8) | Math.round(r)) >>> 0;
}

const known = new Map<string, Rgb>();

/** The red, green and blue of a CSS color, as the browser reads it: once, for reading pixels back is slow. */
export function rgbOf(css: string): Rgb {
  const found = known.get(css) ?? read(css);
  known.set(css, found);
  return found;
}

function read(css: string): Rgb {
  const pen = document.createElement("canvas").getContext("2d");
  if (!pen) return [136, 136, 136];
  pen.fillStyle = css;
  pen.fillRect(0, 0, 1, 1);
  const { data } = pen.getImageData(0, 0, 1, 1);
  return [data[0]!, data[1]!, data[2]!];
}
